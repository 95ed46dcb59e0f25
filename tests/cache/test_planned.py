"""The plan of an extraction says what each bucket will hold, and is refused where it cannot be trusted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash.cache.planned import PLANNED_NAME, Planned, load_planned, save_planned
from dflash.errors import CacheCorrupt, CacheError

EDGES = (16, 32, 64)


def test_the_plan_counts_samples_and_tokens_of_each_bucket(tmp_path):
    planned = Planned.of(np.array([1, 16, 17, 64, 33], np.int32), EDGES)
    assert planned == Planned(EDGES, (2, 1, 2), (17, 17, 97), 64)
    save_planned(tmp_path, planned)
    assert load_planned(tmp_path, EDGES) == planned


def test_a_cache_without_a_plan_says_how_to_get_one(tmp_path):
    with pytest.raises(CacheError, match=r"has no planned.json.*`dflash extract` writes it"):
        load_planned(tmp_path, EDGES)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"edges": EDGES, "samples": [1, 2, 3], "tokens": [1, 2, 3]},
        {"edges": EDGES, "samples": [1, 2], "tokens": [1, 2, 3], "longest": 3},
        {"edges": EDGES, "samples": [1, 2, -3], "tokens": [1, 2, 3], "longest": 3},
        {"edges": [16, 64], "samples": [1, 2], "tokens": [1, 2], "longest": 3},
    ],
)
def test_a_plan_that_is_damaged_or_of_another_cache_is_refused(tmp_path, value):
    (tmp_path / PLANNED_NAME).write_text(json.dumps(value))
    with pytest.raises(CacheCorrupt, match=PLANNED_NAME):
        load_planned(tmp_path, EDGES)
    (tmp_path / PLANNED_NAME).write_text("{")
    with pytest.raises(CacheCorrupt, match="cannot be read"):
        load_planned(tmp_path, EDGES)


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    save_planned(tmp_path, Planned.of(np.array([1, 16, 17, 64, 33], np.int32), EDGES))
    whole = (tmp_path / PLANNED_NAME).read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            flipped = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            (tmp_path / PLANNED_NAME).write_bytes(flipped)
            with pytest.raises(CacheCorrupt, match=PLANNED_NAME):
                load_planned(tmp_path, EDGES)
