"""The mask token: an embedding row of the target that means nothing, the same at training and serving."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_SPARE = re.compile(r"unused|reserved|extra|mask|dummy|placeholder", re.IGNORECASE)


def find_mask_token(
    tokenizer: Any, config: Mapping[str, Any], vocab_size: int, seen: np.ndarray
) -> int | None:
    """An unused row of the target's embedding.

    The first row behind the tokenizer's vocabulary, where the embedding has more rows; otherwise a special
    token that has no role, is not in the chat template and does not occur in the corpus: one whose name says
    that it is spare, else the last.

    Args:
        tokenizer: The target's tokenizer.
        config: The target's configuration; names the ids that have a role.
        vocab_size: V, rows of the embedding.
        seen: int32 tokens of the corpus.

    Returns:
        The id, or None when every row is in use.
    """
    names = {
        int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest + 1 < vocab_size:
        return highest + 1
    used = _ids_with_a_role(tokenizer, config) | set(np.unique(seen).tolist())
    template = str(tokenizer.chat_template or "")
    free = [
        n for n, name in sorted(names.items()) if n < vocab_size and n not in used and name not in template
    ]
    spare = [number for number in free if _SPARE.search(names[number])]
    return spare[0] if spare else free[-1] if free else None


def _ids_with_a_role(tokenizer: Any, config: Mapping[str, Any]) -> set[int]:
    ids = set(tokenizer.convert_tokens_to_ids(list(map(str, tokenizer.special_tokens_map.values()))))
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(role)
        ids |= set(value) if isinstance(value, (list, tuple)) else {value}
    return {number for number in ids if number is not None}
