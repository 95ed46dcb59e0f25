"""The loader hands each rank its part of every step, ahead of time, and fails where the trainer sees it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from hashlib import sha256

import numpy as np
import pytest
import torch
from support import MASK, write_cache
from tiny_runs import LENGTHS

from dflash.cache.reader import CacheReader
from dflash.errors import CacheCorrupt
from dflash.train.batches import AnchorConfig, BlockShape, documents, pack
from dflash.train.loader import TWO_STEPS, BlockPlan, DeviceFeed, StepLoader
from dflash.train.padding import multiples_for, padded
from dflash.train.ready import ReadyLimits
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, batches_for
from dflash.world import World

CPU = torch.device("cpu")
ALONE = World()
PLAN = BlockPlan(AnchorConfig(64, 0.5, seed=4), BlockShape(4, MASK))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("loader") / "cache", LENGTHS)


@pytest.fixture
def reader(cache):
    with CacheReader(cache) as reader:
        yield reader


def make_sampler(reader: CacheReader, epochs: int | None = 2, state=None) -> Sampler:
    index, edges = reader.index, reader.manifest.identity.bucket_edges
    config = SamplerConfig(tokens_per_batch=64, batches_per_step=4, min_ready=1, max_ready=8)
    corpus = Corpus(index.lengths, index.buckets, edges, index.digest())
    return Sampler(corpus, config, epochs=epochs, state=state)


def load(reader: CacheReader, world: World = ALONE, **settings):
    with StepLoader(reader, make_sampler(reader, **settings), PLAN, world, CPU) as loader:
        return list(loader)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_divide_every_step_of_the_sampler_among_them(reader, size):
    steps = list(make_sampler(reader))
    by_rank = [load(reader, World(rank, size)) for rank in range(size)]
    assert [len(loaded) for loaded in by_rank] == [len(steps)] * size
    for rank, loaded_steps in enumerate(by_rank):
        for step, loaded in zip(steps, loaded_steps, strict=True):
            assert len(loaded.batches) == 4 // size
            for slot, batch in zip(batches_for(step, World(rank, size)), loaded.batches, strict=True):
                rows = [draw.row for draw in slot.draws]
                docs = documents(
                    reader.read(rows),
                    [draw.epoch for draw in slot.draws],
                    reader.index.buckets[rows].tolist(),
                    PLAN.anchors,
                )
                multiples = multiples_for(torch.device("cpu"))
                expected = padded(pack(docs, PLAN.shape, multiple=multiples.rows), multiples)
                assert batch.samples == expected.samples
                for name in ("features", "block_ids", "labels", "counted", "block_positions", "buckets"):
                    assert torch.equal(getattr(batch, name), getattr(expected, name))


@pytest.mark.parametrize("workers", [1, 4])
def test_reading_ahead_in_threads_never_changes_the_order(reader, workers):
    """Sha256 of all ids by step and slot: without a thread, with one, with one for each of four ranks."""

    def digest(steps):
        return sha256(repr(steps).encode()).hexdigest()

    planned = [
        [[int(reader.index.ids[draw.row]) for draw in batch] for batch in step.batches]
        for step in make_sampler(reader)
    ]
    worlds = [World(rank, workers) for rank in range(workers)]
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(StepLoader(reader, make_sampler(reader), PLAN, world, CPU))
            for world in worlds
        ]
        read = []
        for plan, *parts in zip(make_sampler(reader), *loaders, strict=True):
            slots = {
                slot.place: list(batch.samples)
                for world, part in zip(worlds, parts, strict=True)
                for slot, batch in zip(batches_for(plan, world), part.batches, strict=True)
            }
            read.append([slots[place] for place in range(4)])
    assert digest(read) == digest(planned)


def test_every_rank_knows_what_the_whole_step_drew(reader):
    totals = [sum(loaded.draws.sum(0) for loaded in load(reader, World(rank, 2))) for rank in range(2)]
    index = reader.index
    expected = [2 * int(index.lengths[index.buckets == bucket].sum()) for bucket in range(3)]
    assert totals[0].tolist() == totals[1].tolist() == expected


def test_going_on_from_the_state_of_a_step_gives_the_steps_behind_it(reader):
    whole = load(reader)
    rest = load(reader, state=whole[1].state)
    assert [b.samples for s in rest for b in s.batches] == [b.samples for s in whole[2:] for b in s.batches]
    for ours, expected in zip(rest, whole[2:], strict=True):
        assert ours.state == expected.state
        assert np.array_equal(ours.draws, expected.draws)


def test_leaving_early_ends_the_thread_and_reads_no_further_than_a_few_steps_ahead(reader):
    sampler = make_sampler(reader, epochs=None)
    with StepLoader(reader, sampler, PLAN, World(), CPU) as loader:
        next(iter(loader))
    assert "step-loader" not in {thread.name for thread in threading.enumerate()}
    assert sampler.state()["steps"] <= 1 + TWO_STEPS.steps + 1
    assert loader.waited > 0


def test_every_step_says_whether_the_trainer_had_to_wait_for_it(reader):
    with StepLoader(reader, make_sampler(reader), PLAN, World(), CPU) as loader:
        steps = list(loader)
    assert sum(step.waited for step in steps) <= loader.waited
    assert all(0 <= step.ready <= TWO_STEPS.steps for step in steps)


@pytest.mark.parametrize(("steps", "room"), [(1, 1000), (3, 1000), (9, 130)])
def test_the_look_ahead_never_exceeds_its_steps_or_bytes_and_changes_nothing(reader, steps, room):
    """130 tokens' worth of bytes is less than the window's steps would need."""
    limit = room * reader.manifest.identity.bytes_per_token
    limits = ReadyLimits(gate=1, steps=steps, limit_bytes=limit)
    with StepLoader(reader, make_sampler(reader), PLAN, World(0, 2), CPU, limits) as loader:
        loaded = list(loader)
    assert [batch.samples for step in loaded for batch in step.batches] == [
        batch.samples for step in load(reader, World(0, 2)) for batch in step.batches
    ]
    assert loader.window.most_steps <= steps
    assert 0 < loader.window.most_bytes <= limit


def test_a_damaged_sample_fails_in_the_trainers_thread(tmp_path):
    cache = write_cache(tmp_path / "cache", LENGTHS)
    shard = next((cache / "shards").glob("*/*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with CacheReader(cache) as reader, pytest.raises(CacheCorrupt, match=str(shard)):
        load(reader)
    assert "step-loader" not in {thread.name for thread in threading.enumerate()}


def test_batches_stay_in_order_on_the_cpu(reader):
    step = load(reader)[0]
    assert [id(batch) for batch in DeviceFeed(CPU).batches(step)] == [id(batch) for batch in step.batches]


def test_a_step_tells_the_first_batch_of_the_next_one_if_that_is_ready(reader):
    limits = ReadyLimits(gate=2, steps=2, limit_bytes=1 << 30, patience=60)
    with StepLoader(reader, make_sampler(reader), PLAN, ALONE, CPU, limits) as loader:
        steps = iter(loader)
        following = next(steps).following()
        rest = list(steps)
    assert following is rest[0].batches[0]
    assert rest[-1].following() is None
