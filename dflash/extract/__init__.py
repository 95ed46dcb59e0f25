"""Stage 1: text to tokens to hidden states.

1. `formats` reads rows, `conversation` normalises their shapes, `chat` renders and marks them.
2. `corpus` tokenises, cuts, drops and numbers; `token_store` keeps the result; `prompts` reads those of
   evaluation.
3. `plan` makes batches and units, `sink` writes in a thread, `pipeline` runs the target over what is left.
"""
