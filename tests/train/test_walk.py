"""The serving walk from the cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.train.walk import WalkSums, pooled, response_runs, walk


@given(st.lists(st.integers(1, 8), max_size=60))
def test_the_walk_takes_each_stride_from_where_the_last_one_ended(strides: list[int]) -> None:
    """An array that is wrong everywhere but where the walk stands gives exactly the planned strides."""
    accepted = np.ones(sum(strides), np.int64)
    np.put(accepted, np.cumsum([0, *strides])[:-1].astype(int), strides)
    assert walk(accepted) == strides


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_responses_are_the_supervised_runs_of_two_or_more(mask: list[int]) -> None:
    loss_mask = np.array(mask, np.uint8)
    runs = response_runs(loss_mask)
    inside = np.zeros(len(mask), np.uint8)
    for begin, end in runs:
        assert end - begin >= 2
        assert loss_mask[begin:end].all()
        assert begin == 0 or not loss_mask[begin - 1]
        assert end == len(mask) or not loss_mask[end]
        inside[begin:end] = 1
    alone = loss_mask - inside
    assert not (alone[:-1] & alone[1:]).any()


def test_easy_stretches_raise_the_average_above_the_walk() -> None:
    accepted = np.array([4, 3, 2, 1, 1, 1])
    sums = pooled([accepted])
    assert sums.anchor_tau == pytest.approx(2.0)
    assert sums.walk_tau == pytest.approx(6 / 3)
    easy = pooled([np.array([8, 7, 6, 5, 4, 3, 2, 1]), np.array([1])])
    assert easy.walk_tau == pytest.approx(9 / 2)
    assert WalkSums().walk_tau == 1.0
