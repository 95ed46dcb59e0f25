"""`shuffle` and `fifo` behave like a live queue: order of arrival, gate, capacity, a source with a speed."""

from __future__ import annotations

from itertools import islice

import pytest
from corpora import for_all, log_normal, make_corpus, quick_and_long
from hypothesis import strategies as st

from dflash.train.pools import Draw
from dflash.train.sampler import Sampler, SamplerConfig
from dflash.train.window import ReadyQueue, Supply, WindowShape, window_level

STEP = {"batches_per_step": 1, "tokens_per_batch": 4096}


def rows(sampler: Sampler, steps: int | None = None) -> list[int]:
    return [draw.row for step in islice(sampler, steps) for batch in step.batches for draw in batch]


def test_fifo_draws_in_order_of_arrival() -> None:
    corpus = log_normal(200)
    assert rows(Sampler(corpus, SamplerConfig("fifo", **STEP), epochs=2)) == [*range(200), *range(200)]


def test_bucketed_fifo_draws_micro_batches_in_the_order_they_were_filled() -> None:
    """A bucket's rows stay in order, and micro-batches come by the row that closed them."""
    corpus = log_normal(600)
    config = SamplerConfig("fifo", "bucketed", tokens_per_batch=8192)
    batches = [batch for step in Sampler(corpus, config, epochs=1) for batch in step.batches if batch]
    buckets = [int(corpus.buckets[batch[0].row]) for batch in batches]
    for bucket in set(buckets):
        mine = [
            draw.row for batch, name in zip(batches, buckets, strict=True) if name == bucket for draw in batch
        ]
        assert mine == sorted(mine)
    first_of_next = [
        next(
            (
                later[0].row
                for later, other in zip(batches[at + 1 :], buckets[at + 1 :], strict=True)
                if other == name
            ),
            600,
        )
        for at, name in enumerate(buckets)
    ]
    assert first_of_next == sorted(first_of_next)


@quick_and_long(40, 500)
def test_shuffle_never_draws_beyond_what_its_window_holds(examples: int) -> None:
    """What arrived and what was drawn differ by the capacity at most; with a slow source, by the gate."""

    @for_all(examples, st.integers(1, 4), st.integers(0, 6), st.sampled_from([None, 0.1]), st.integers(0, 99))
    def check(low: int, more: int, supply: float | None, seed: int) -> None:
        corpus = make_corpus([40, 20], 300, seed)
        config = SamplerConfig("shuffle", "mixed", "natural", 300, 1, low, low + more, supply, seed)
        sampler = Sampler(corpus, config, epochs=1)
        limit = (low if supply else low + more) * 300 + (300 if supply else 0)
        drawn, newest = 0, -1
        for row in rows(sampler):
            newest = max(newest, row)
            assert int(corpus.lengths[: newest + 1].sum()) - drawn <= limit
            drawn += int(corpus.lengths[row])


def test_a_full_window_mixes_more_than_one_that_a_slow_source_leaves_at_the_gate() -> None:
    corpus = log_normal(1000)

    def displacement(supply: float | None) -> float:
        config = SamplerConfig("shuffle", min_ready=2, max_ready=40, supply=supply, **STEP)
        order = rows(Sampler(corpus, config, epochs=1))
        return sum(abs(row - place) for place, row in enumerate(order)) / len(order)

    assert displacement(None) > 3 * displacement(0.5)
    assert displacement(3.0) > displacement(0.5)


def test_shuffle_draws_every_place_of_its_window_equally_often() -> None:
    """With equal lengths and a window of four, each newcomer is as likely to be drawn as the others."""
    corpus = make_corpus([4000], 1, 0)
    config = SamplerConfig("shuffle", tokens_per_batch=1, batches_per_step=1, min_ready=1, max_ready=4)
    order = rows(Sampler(corpus, config, epochs=1))
    waits = [place - max(0, row - 3) for place, row in enumerate(order)]
    assert min(waits) == 0
    assert 0.23 < waits.count(0) / len(waits) < 0.27
    assert 0.16 < waits.count(1) / len(waits) < 0.21


def test_the_queue_opens_at_its_gate_and_closes_at_its_capacity() -> None:
    queue = ReadyQueue(WindowShape(10, 2, 3, None), 2, None, None)
    for row in range(4):
        queue.arrive(Draw(row, 0), 0, 10)
        assert (len(queue), queue.gate_open, queue.has_room) == (row, row >= 2, row < 3)
    queue.arrive(Draw(4, 0), 1, 3)
    queue.flush()
    assert [queue.draw() for _ in range(5)] == [[Draw(row, 0)] for row in range(5)]


@pytest.mark.parametrize(("supply", "level"), [(None, 12), (0.2, 3), (5.0, 12)])
def test_the_speed_of_the_source_decides_where_the_queue_settles(supply: float | None, level: int) -> None:
    """Faster than training it stands at max-ready, slower at min-ready."""
    corpus = log_normal(3000)
    config = SamplerConfig("fifo", "bucketed", min_ready=3, max_ready=12, supply=supply, **STEP)
    sampler = Sampler(corpus, config)
    rows(sampler, 100)
    assert len(sampler.state()["stream"]["ready"]) == level - 1  # one was just drawn


def test_a_source_works_ahead_only_while_there_is_room() -> None:
    supply = Supply(0.5, 0)
    supply.elapse(101)
    assert supply.delivers(50)
    assert not supply.delivers(51)
    supply.spend(50)
    assert supply.credit == 500
    supply.spend(1000)  # waited for
    assert supply.credit == 0
    supply.elapse(100)
    supply.block()
    assert not supply.delivers(1)


@pytest.mark.parametrize(
    ("policy", "compose", "level"),
    [
        ("fifo", "bucketed", 12),
        ("shuffle", "bucketed", 12),
        ("shuffle", "mixed", 12),
        ("fifo", "mixed", None),
        ("stratified", "mixed", None),
        ("stratified", "bucketed", None),
    ],
)
def test_the_level_of_the_window_is_counted_in_micro_batches(policy: str, compose: str, level: int) -> None:
    """Streams that draw by quota, or straight from the corpus, have no queue."""
    corpus = log_normal(3000)
    sampler = Sampler(corpus, SamplerConfig(policy, compose, min_ready=3, max_ready=12, **STEP))
    rows(sampler, 20)
    found = window_level(sampler.state()["stream"], corpus.lengths, 4096)
    assert found is None if level is None else level - 2 < found <= level
