"""Training data in the target's own words: every assistant turn is answered again.

1. `tasks`: conversations without their answers, each under a stable id.
2. `server` asks an OpenAI-compatible server, `local` decodes with the target; turn after turn, in context.
3. `journal` keeps what is answered, line by line, so that a kill loses nothing; at the end all is in order.
4. `run` does all of it.
"""
