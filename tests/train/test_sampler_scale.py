"""The stream at other sizes: other machines behind a stop, and ten million samples."""

from __future__ import annotations

import json
import time
import tracemalloc
from hashlib import sha256

import numpy as np
import pytest
from corpora import COMBINATIONS, for_all, log_normal, quick_and_long, stream_digest
from hypothesis import strategies as st

from dflash.train.sampler import Corpus, Sampler, SamplerConfig, Step, batches_for
from dflash.world import World

STEPS = 12


def merged(step: Step, size: int) -> Step:
    """A step put together again from the parts of `size` ranks."""
    slots = sorted(slot for rank in range(size) for slot in batches_for(step, World(rank, size)))
    return Step(step.index, tuple(slot.draws for slot in slots), step.tokens)


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
@quick_and_long(6, 100)
def test_a_run_stopped_anywhere_goes_on_with_any_number_of_ranks(
    examples: int, policy: str, compose: str
) -> None:
    """The digest of all draws is that of the undisturbed run, whoever drew them."""
    corpus = log_normal(400)
    config = SamplerConfig(policy, compose, tokens_per_batch=4096, batches_per_step=24, max_ready=40)
    sampler = Sampler(corpus, config)
    undisturbed = stream_digest([sampler.next_step() for _ in range(STEPS)])
    sizes = st.sampled_from([1, 2, 3, 4, 8, 24])

    @for_all(examples, st.lists(st.tuples(st.integers(0, 4), sizes), min_size=1, max_size=4), sizes)
    def check(starts: list[tuple[int, int]], last: int) -> None:
        drawn: list[Step] = []
        state = None
        for count, size in [*starts, (STEPS, last)]:
            part = Sampler(corpus, config, state=state)
            drawn += [merged(part.next_step(), size) for _ in range(min(count, STEPS - len(drawn)))]
            state = json.loads(json.dumps(part.state()))
        assert stream_digest(drawn) == undisturbed


def test_sixty_four_ranks_get_one_micro_batch_each_and_all_lengths_alike() -> None:
    """Over an epoch no rank's mean length or work stands out."""
    corpus = log_normal(8000)
    steps = list(Sampler(corpus, SamplerConfig(batches_per_step=64), epochs=3))[:-1]
    tokens, samples = np.zeros(64), np.zeros(64)
    for step in steps:
        for rank in range(64):
            (slot,) = batches_for(step, World(rank, 64))
            tokens[rank] += sum(int(corpus.lengths[draw.row]) for draw in slot.draws)
            samples[rank] += len(slot.draws)
    assert tokens.max() / tokens.mean() < 1.01
    means = tokens / samples
    assert 0.85 < means.min() / means.mean() <= means.max() / means.mean() < 1.15


@pytest.mark.long
@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
def test_ten_million_samples_need_little_memory_and_no_wait(policy: str, compose: str) -> None:
    """Less than 1 GiB with the columns, resume within 50 ms, and 10,000 samples planned a second."""
    rng = np.random.default_rng(0)
    tracemalloc.start()
    buckets = rng.integers(0, 8, 10_000_000).astype(np.int16)
    lengths = (buckets * np.int32(512)) + rng.integers(1, 513, len(buckets), np.int32)
    corpus = Corpus(lengths, buckets, tuple(range(512, 4097, 512)), "ten million")
    config = SamplerConfig(policy, compose)
    sampler = Sampler(corpus, config)
    for _ in range(20):
        sampler.next_step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 30
    saved = json.dumps(sampler.state())
    took, started = [], time.perf_counter()
    drawn = sum(len(batch) for _ in range(200) for batch in sampler.next_step().batches)
    assert drawn / (time.perf_counter() - started) > 10_000
    for _ in range(5):
        start = time.perf_counter()
        Sampler(corpus, config, state=json.loads(saved))
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05


@pytest.mark.long
def test_the_digest_of_a_million_draws_does_not_depend_on_the_ranks() -> None:
    corpus = log_normal(100_000)
    config = SamplerConfig(batches_per_step=192)
    digests = []
    for size in (1, 3, 64):
        state = sha256()
        for step in Sampler(corpus, config, epochs=10):
            rows = [draw.row for batch in merged(step, size).batches for draw in batch]
            state.update(np.array(rows, np.int64).tobytes())
        digests.append(state.hexdigest())
    assert len(set(digests)) == 1
