"""The mask token is an embedding row that nothing else uses."""

from __future__ import annotations

import numpy as np
import pytest
from chat_families import FAMILIES, build_tokenizer

from dflash.extract.mask_token import find_mask_token

NOTHING = np.empty(0, dtype=np.int32)


def tokenizer_with(*special):
    return build_tokenizer(FAMILIES["chatml"]._replace(special=(*FAMILIES["chatml"].special, *special)))


def test_a_row_behind_the_vocabulary_comes_first():
    tokenizer = tokenizer_with("<|unused|>")
    assert find_mask_token(tokenizer, {}, len(tokenizer) + 5, NOTHING) == len(tokenizer)


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (("<|reserved_0|>", "<|reserved_1|>", "<|tool|>"), "<|reserved_0|>"),
        (("<|one|>", "<|two|>"), "<|two|>"),
        ((), None),
    ],
)
def test_a_spare_special_token_otherwise(special, expected):
    tokenizer = tokenizer_with(*special)
    found = find_mask_token(tokenizer, {}, len(tokenizer), NOTHING)
    assert found == (tokenizer.convert_tokens_to_ids(expected) if expected else None)


def test_tokens_with_a_role_or_in_the_corpus_are_in_use():
    tokenizer = tokenizer_with("<|unused_0|>", "<|unused_1|>", "<|unused_2|>")
    zero, one, two = (tokenizer.convert_tokens_to_ids(f"<|unused_{n}|>") for n in range(3))
    seen = np.asarray([5, one], dtype=np.int32)
    assert find_mask_token(tokenizer, {"eos_token_id": [zero, 1]}, len(tokenizer), seen) == two
    assert (
        find_mask_token(tokenizer, {"pad_token_id": two, "bos_token_id": zero}, len(tokenizer), seen) is None
    )
