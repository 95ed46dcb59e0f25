"""What a drafter is worth: acceptance, speed-up, and whether output is unchanged.

`config` says what is evaluated, `pair` opens target and drafter, `run` decodes every prompt both ways,
`figures` adds up, `plot` draws.
"""
