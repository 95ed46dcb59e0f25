"""Speculative decoding: the drafter proposes, the target verifies in one pass, nothing of the output changes.

`config` says how, `sampling` which token follows from logits, `drafting` runs the drafter on one sequence,
`pace` decides how much is drafted, `rollback` takes refused drafts out of the target's cache, `loop` decodes
one sequence, `tree` drafts trees, `batched` decodes several sequences at once.
"""
