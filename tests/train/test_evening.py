"""One-bucket micro-batches cost about the same; evening them changes neither their number nor the pass."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.train.evening import BLOCK, EvenBatches, even_groups
from dflash.train.levels import choose_caps
from dflash.train.packing import Packing
from dflash.train.pools import BucketPool


def packing(budget: int, slots: int = 8) -> Packing:
    return Packing(slots, budget, 1.0, 1 / 32768)


def pool(lengths: list[int] | np.ndarray, position: int = 0) -> BucketPool:
    return BucketPool(np.arange(len(lengths)), np.asarray(lengths), ("d", 0, 0), position)


def spread(lengths: list[int], groups: list[list[int]]) -> float:
    work = [sum(packing(1).work(lengths[index]) for index in group) for group in groups]
    return max(work) / (sum(work) / len(work))


def cut(lengths: list[int], budget: int) -> list[int]:
    sizes, room = [], 0
    for length in lengths:
        if length > room:
            sizes.append(0)
            room = budget
        sizes[-1] += 1
        room -= length
    return sizes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=80), st.integers(100, 300))
def test_a_block_is_divided_within_the_budget_and_never_less_evenly_than_in_order(lengths, budget):
    """Every sample is in one group, as many groups as before."""
    sizes = cut(lengths, budget)
    groups = even_groups(lengths, sizes, packing(budget))
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert len(groups) == len(sizes)
    assert all(group for group in groups)
    assert max(sum(lengths[index] for index in group) for group in groups) <= budget
    ends = np.cumsum([0, *sizes])
    in_order = [list(range(begin, end)) for begin, end in pairwise(ends)]
    assert spread(lengths, groups) <= spread(lengths, in_order) + 1e-9


def test_a_number_of_samples_that_does_not_divide_is_made_up_for_by_their_length():
    """Four long ones cost as much as five short ones."""
    lengths = np.random.default_rng(0).integers(2561, 3073, 72).tolist()
    assert spread(lengths, even_groups(lengths, cut(lengths, 13400), packing(16384))) < 1.05


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 99), st.integers(60, 200), st.data())
def test_a_pass_is_used_up_by_as_many_micro_batches_as_planned_and_can_be_resumed(count, seed, budget, data):
    lengths = np.random.default_rng(seed).integers(1, 61, count)
    even = EvenBatches(pool(lengths), packing(budget), budget)
    planned = even.count
    stop = data.draw(st.integers(0, planned))
    drawn = [even.take() for _ in range(stop)]
    begin, *_ = saved = even.state()
    again = EvenBatches(pool(lengths, begin), packing(budget), budget, saved)
    rest = [even.take() for _ in range(planned - stop)]
    assert [again.take() for _ in range(planned - stop)] == rest
    assert again.state() == even.state()
    rows = [draw.row for batch, _ in drawn + rest for draw in batch]
    assert sorted(rows) == list(range(count))
    assert [tokens for _, tokens in drawn + rest] == [
        sum(int(lengths[draw.row]) for draw in batch) for batch, _ in drawn + rest
    ]
    assert {draw.epoch for draw in even.take()[0]} == {1}, "the next pass follows"


def test_blocks_mix_the_order_of_light_and_heavy_micro_batches():
    lengths = np.random.default_rng(0).integers(500, 1000, 2000)
    even = EvenBatches(pool(lengths), packing(16384), 4000)
    sizes = [len(even.take()[0]) for _ in range(4 * BLOCK)]
    assert len(set(sizes)) > 1
    assert sizes[:BLOCK] not in (sorted(sizes[:BLOCK]), sorted(sizes[:BLOCK], reverse=True))


def test_caps_even_out_what_long_and_short_micro_batches_cost():
    """At equal tokens the long ones cost a tenth more; the caps halve that at least."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(low, low + 512, 600) for low in (16, 2048, 3584)])
    pools = [
        BucketPool(np.arange(first, first + 600), lengths, ("d", 0, number))
        for number, first in enumerate((0, 600, 1200))
    ]

    def means(caps: list[int]) -> np.ndarray:
        found = []
        for bucket, cap in zip(pools, caps, strict=True):
            bucket.position = 0
            even = EvenBatches(bucket, packing(16384), cap)
            work = [
                sum(packing(16384).work(int(lengths[draw.row])) for draw in even.take()[0])
                for _ in range(even.count)
            ]
            found.append(np.mean(work))
        return np.array(found)

    caps = choose_caps(pools, [8, 1, 1], packing(16384))
    chosen, full = means(caps), means([16384] * 3)
    assert max(caps) <= 16384
    assert full.max() / full.min() > 1.1
    assert chosen.max() / chosen.min() < 1.06


@pytest.mark.parametrize(("slots", "count"), [(1, 3), (8, 1)])
def test_nothing_is_given_up_where_nothing_has_to_match(slots, count):
    """A step of one micro-batch, or a corpus of one bucket."""
    pools = [pool(np.full(50, 300 + number)) for number in range(count)]
    assert choose_caps(pools, [1] * count, packing(1000, slots)) == [1000] * count
