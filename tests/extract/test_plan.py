"""Every sample is planned exactly once, in batches within the budget, whatever was done before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.extract.plan import Unit, batches_of, mixed_order, pad_share, plan_units, remaining, units_of

EDGES = (8, 16, 64)
lengths_ = st.lists(st.integers(1, 64), max_size=80).map(lambda x: np.asarray(x, dtype=np.int32))


def ids_of(lengths):
    return np.random.default_rng(len(lengths)).permutation(len(lengths)).astype(np.uint64)


def flat(batches):
    return sorted(int(row) for batch in batches for row in batch)


def flat_units(units):
    return flat(batch for unit in units for batch in unit.batches)


@given(lengths_, st.integers(1, 200))
def test_batches_hold_every_sample_once_within_budget_and_bucket(lengths, budget):
    batches = batches_of(lengths, ids_of(lengths), EDGES, budget)
    assert flat(batches) == list(range(len(lengths)))
    for batch in batches:
        parts = lengths[batch]
        assert len(batch) == 1 or len(batch) * parts.max() <= budget
        assert len(set(np.searchsorted(EDGES, parts))) == 1
        assert (np.diff(parts) <= 0).all()
    firsts = [int(lengths[batch[0]]) for batch in batches]
    assert firsts == sorted(firsts, reverse=True)


@given(lengths_, st.integers(0, 2**32 - 1))
def test_batches_do_not_depend_on_the_order_of_the_data(lengths, seed):
    ids = ids_of(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    one = [ids[batch].tolist() for batch in batches_of(lengths, ids, EDGES, 64)]
    other = [ids[order][batch].tolist() for batch in batches_of(lengths[order], ids[order], EDGES, 64)]
    assert one == other


@given(lengths_, st.integers(1, 300), st.integers(1, 5), st.data())
def test_ranks_share_what_is_left_exactly_once(lengths, limit, size, data):
    """After any number of whole batches is committed, the union over ranks is the rest."""
    ids = ids_of(lengths)
    batches = batches_of(lengths, ids, EDGES, 64)
    done = [batch for batch in batches if data.draw(st.booleans())]
    committed = ids[np.concatenate(done)] if done else np.empty(0, np.uint64)
    left = remaining(batches, ids, committed)
    shared = plan_units(left, lengths, EDGES, limit, size)
    assert flat_units(shared) == sorted(set(range(len(lengths))) - set(flat(done)))
    # What is computed together does not depend on what was done before: the numbers are the same to the bit.
    whole = {tuple(batch.tolist()) for batch in batches}
    assert all(tuple(batch.tolist()) in whole for unit in shared for batch in unit.batches)


@given(lengths_, st.integers(1, 300))
def test_a_unit_is_one_bucket_and_about_the_limit(lengths, limit):
    batches = batches_of(lengths, ids_of(lengths), EDGES, 64)
    for unit in units_of(batches, lengths, EDGES, limit):
        assert unit.tokens == sum(int(lengths[batch].sum()) for batch in unit.batches)
        assert unit.tokens - int(lengths[unit.batches[-1]].sum()) < limit
        assert len({int(np.searchsorted(EDGES, lengths[batch[0]])) for batch in unit.batches}) == 1


def test_samples_committed_one_by_one_are_left_out_of_their_batch():
    lengths = np.asarray([5, 5, 5], dtype=np.int32)
    ids = np.asarray([7, 8, 9], dtype=np.uint64)
    left = remaining(batches_of(lengths, ids, EDGES, 64), ids, np.asarray([8], dtype=np.uint64))
    assert flat(left) == [0, 2]


def test_padding_stays_low_on_realistic_lengths():
    """Log-normal conversation lengths, a budget of 8,192 tokens: under 2 % of what is computed are pads."""
    lengths = np.random.default_rng(0).lognormal(5.8, 0.9, 20_000).clip(8, 3072).astype(np.int32)
    edges = (256, 512, 1024, 2048, 3072)
    batches = batches_of(lengths, np.arange(20_000, dtype=np.uint64), edges, 8192)
    assert pad_share(units_of(batches, lengths, edges, 10_000_000)) < 0.02


@pytest.mark.parametrize(("count", "most"), [(30, 0.1), (300, 0.02), (1500, 0.018)])
def test_padding_stays_low_in_a_small_corpus_too(count, most):
    """All of it would fit into a few batches, of very different lengths."""
    lengths = np.random.default_rng(1).integers(45, 250, count).astype(np.int32)
    batches = batches_of(lengths, ids_of(lengths), (256,), 8192)
    assert pad_share(units_of(batches, lengths, (256,), 10_000_000)) < most


def test_a_plan_of_nothing_is_empty():
    nothing = np.empty(0, dtype=np.int32)
    assert batches_of(nothing, nothing.astype(np.uint64), EDGES, 64) == []
    assert plan_units([], nothing, EDGES, 10, 4) == []
    assert pad_share([]) == 0.0


@pytest.mark.parametrize("size", [2, 8])
def test_units_are_small_enough_to_even_out_the_end(size):
    """Taken one after another by whoever is free, longest first, they keep every rank busy to the end."""
    lengths = np.random.default_rng(0).integers(10, 100, 3000).astype(np.int32)
    batches = batches_of(lengths, ids_of(lengths), (64, 100), 200)
    units = plan_units(batches, lengths, (64, 100), 10**9, size)
    busy = np.zeros(size)
    for unit in units:
        busy[busy.argmin()] += unit.tokens
    assert busy.max() <= 1.1 * busy.mean()
    longest = [int(lengths[unit.batches[0]].max()) for unit in units]
    assert longest == sorted(longest, reverse=True)


def test_pad_share_counts_what_is_computed():
    assert pad_share([Unit((), 90, 100)]) == pytest.approx(0.1)


@given(lengths_, st.integers(1, 100))
def test_the_mixed_order_takes_the_same_units_the_longest_first(lengths, limit):
    units = units_of(batches_of(lengths, ids_of(lengths), EDGES, 64), lengths, EDGES, limit)
    mixed = mixed_order(units, lengths, EDGES)
    assert sorted(map(id, mixed)) == sorted(map(id, units))
    assert mixed[:1] == units[:1]


def test_every_stretch_of_the_mixed_order_holds_all_lengths_in_about_their_shares():
    lengths = np.random.default_rng(0).integers(1, 65, 4000).astype(np.int32)
    units = units_of(batches_of(lengths, ids_of(lengths), EDGES, 64), lengths, EDGES, 200)
    buckets = np.searchsorted(EDGES, lengths)
    whole = np.bincount(buckets, weights=lengths, minlength=3) / lengths.sum()
    mixed = mixed_order(units, lengths, EDGES)
    for start in range(0, len(mixed) - 100, 50):
        rows = np.concatenate([batch for unit in mixed[start : start + 100] for batch in unit.batches])
        share = np.bincount(buckets[rows], weights=lengths[rows], minlength=3) / lengths[rows].sum()
        assert np.abs(share - whole).sum() / 2 < 0.02
    long = [u for u in mixed if lengths[u.batches[0][0]] > 16]  # inside a bucket too, lengths are mixed
    halves = [
        np.mean([lengths[u.batches[0][0]] for u in half])
        for half in (long[: len(long) // 2], long[len(long) // 2 :])
    ]
    assert halves[0] == pytest.approx(halves[1], rel=0.1)
