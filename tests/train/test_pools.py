"""A bucket's passes: how they divide into micro-batches."""

from __future__ import annotations

import numpy as np
from corpora import for_all, quick_and_long
from hypothesis import strategies as st

from dflash.train.pools import BucketPool


def fill_batches(pool: BucketPool, limit: int) -> list[int]:
    """Tokens of each micro-batch of the pool's first pass."""
    tokens = []
    while pool.epoch == 0:
        tokens.append(sum(pool.take_batch(limit)[1]))
    return tokens


@quick_and_long(60, 1000)
def test_a_planned_pass_takes_as_few_micro_batches_as_any_and_the_smallest_limit_for_that(
    examples: int,
) -> None:
    @for_all(examples, st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
    def check(lengths: list[int], budget: int) -> None:
        def pool() -> BucketPool:
            return BucketPool(np.arange(len(lengths)), np.array(lengths), ("pool",))

        count, limit = pool().plan_pass(budget)
        assert max(lengths) <= limit <= budget
        assert len(fill_batches(pool(), budget)) == count
        assert len(fill_batches(pool(), limit)) == count
        assert limit == max(lengths) or len(fill_batches(pool(), limit - 1)) > count


def test_the_last_micro_batch_of_a_pass_is_about_as_full_as_the_others() -> None:
    """Next fit under the budget alone would leave the last one with a twentieth of it."""
    lengths = np.full(41, 10)
    pool = BucketPool(np.arange(41), lengths, ("pool",))
    assert fill_batches(BucketPool(np.arange(41), lengths, ("pool",)), 200) == [200, 200, 10]
    assert fill_batches(pool, pool.plan_pass(200)[1]) == [140, 140, 130]
