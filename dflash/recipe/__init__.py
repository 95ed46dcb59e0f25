"""`dflash run`: a recipe's stages one after another, each of them only where there is something to do.

1. `stages` lists what a recipe can do: which command does it, what it reads, what it leaves.
2. `reading` reads the recipe and its overrides and checks every key against the flags of its command.
3. `identity` says what files, data sets, targets, caches and runs are, by content.
4. `decide` compares that with what the last finished stage was made from (`state`).
5. `execute` runs a stage as a command of its own; `run` goes from stage to stage; `summary` tells what came
   of it.
"""
