"""The seeded permutation is a bijection, the same by element and by slice, and looks random."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from corpora import for_all, quick_and_long
from hypothesis import strategies as st

from dflash.train.permutation import Permutation, derive_key, keyed_below


@pytest.mark.parametrize("size", [*range(1, 70), 99, 100, 101, 1023, 1024, 1025, 65_537, 99_991])
def test_every_value_appears_exactly_once(size: int) -> None:
    values = Permutation(size, derive_key("bijection", size)).slice(0, size)
    assert np.array_equal(np.sort(values), np.arange(size))


@quick_and_long(60, 800)
def test_one_element_equals_the_same_place_of_a_slice(examples: int) -> None:
    """Also for sizes far beyond memory, since nothing is stored."""

    @for_all(examples, st.integers(1, 2**50), st.integers(0, 2**64), st.data())
    def check(size: int, seed: int, data: st.DataObject) -> None:
        permutation = Permutation(size, derive_key(seed))
        start = data.draw(st.integers(0, size - 1))
        stop = min(size, start + data.draw(st.integers(1, 30)))
        assert permutation.slice(start, stop).tolist() == [permutation[index] for index in range(start, stop)]
        assert all(0 <= permutation[index] < size for index in range(start, stop))


@pytest.mark.parametrize("size", [2, 3, 5, 12, 40])
def test_each_value_is_equally_likely_in_each_place(size: int) -> None:
    """Chi-squared over 2,000 keys stays within six standard deviations of its mean."""
    keys = 2000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), Permutation(size, derive_key("uniform", key)).slice(0, size)] += 1
    expected = keys / size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


def test_neighbours_are_unrelated() -> None:
    """Differences of neighbours in a random order average a third of the size, and hardly any is 1."""
    size = 20_000
    values = Permutation(size, derive_key("neighbours")).slice(0, size)
    steps = np.abs(np.diff(values))
    assert abs(steps.mean() / size - 1 / 3) < 0.01
    assert (steps == 1).sum() < 15
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_keys_depend_on_every_part_and_on_where_it_ends() -> None:
    keys = [
        derive_key("a", 1, 2),
        derive_key("a", 12),
        derive_key("a", 1, 3),
        derive_key("b", 1, 2),
        derive_key("a1", 2),
    ]
    assert len(set(keys)) == len(keys)
    orders = [Permutation(50, key).slice(0, 50).tolist() for key in keys]
    assert all(first != second for first, second in pairwise(orders))


def test_keyed_numbers_are_below_the_limit_and_even() -> None:
    counts = Counter(keyed_below(b"key", counter, 7) for counter in range(7000))
    assert set(counts) == set(range(7))
    assert all(abs(count - 1000) < 150 for count in counts.values())
