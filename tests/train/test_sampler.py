"""The stream of steps: every sample once an epoch, the same for every world size, and resumable anywhere."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from corpora import (
    COMBINATIONS,
    configs,
    corpora,
    for_all,
    log_normal,
    make_corpus,
    quick_and_long,
    stream_digest,
)
from hypothesis import strategies as st

from dflash.train.pools import Draw
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, Step, batches_for
from dflash.world import World


def draws_of(step: Step) -> list[Draw]:
    return [draw for batch in step.batches for draw in batch]


def tokens_of(corpus: Corpus, steps: list[Step]) -> np.ndarray:
    """Tokens of each bucket in each micro-batch, `[micro-batches, buckets]`."""
    buckets = len(corpus.bucket_edges)
    table = []
    for batch in (batch for step in steps for batch in step.batches):
        rows = [draw.row for draw in batch]
        table.append(np.bincount(corpus.buckets[rows], corpus.lengths[rows], minlength=buckets))
    return np.array(table)


def variation(tokens: np.ndarray, quota: tuple[float, ...], window: int) -> np.ndarray:
    """Total variation from the quota over every `window` consecutive rows of `tokens`."""
    sums = np.cumsum(np.vstack([np.zeros(tokens.shape[1]), tokens]), axis=0)
    inside = sums[window:] - sums[:-window]
    return np.abs(inside / inside.sum(1, keepdims=True) - quota).sum(1) / 2


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
@quick_and_long(12, 250)
def test_two_epochs_hold_every_sample_twice_and_the_first_comes_first(
    examples: int, policy: str, compose: str
) -> None:
    """Each step is full, within the budget, and its rows are labelled with their epoch."""

    @for_all(examples, corpora(), st.data())
    def check(corpus: Corpus, data: st.DataObject) -> None:
        config = replace(data.draw(configs(corpus, policy, compose)), mix="natural")
        steps = list(Sampler(corpus, config, epochs=2))
        everything = Counter(draw for step in steps for draw in draws_of(step))
        assert everything == Counter(Draw(row, epoch) for row in range(len(corpus)) for epoch in range(2))
        for step in steps:
            assert len(step.batches) == config.batches_per_step
            lengths = [sum(int(corpus.lengths[draw.row]) for draw in batch) for batch in step.batches]
            assert max(lengths) <= config.tokens_per_batch
            assert sum(lengths) == step.tokens
        assert all(all(step.batches) for step in steps[:-1]) or compose == "mixed"
        latest = [{draw.epoch for draw in draws_of(step)} for step in steps]
        assert sum(len(epochs) == 2 for epochs in latest) <= 1, "only one step can straddle the border"


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
@quick_and_long(12, 300)
def test_a_stream_cut_anywhere_and_resumed_is_the_same_stream(
    examples: int, policy: str, compose: str
) -> None:
    """The position passes through JSON, as in a checkpoint."""

    @for_all(examples, corpora(30), st.data(), st.integers(0, 12))
    def check(corpus: Corpus, data: st.DataObject, cut: int) -> None:
        config = data.draw(configs(corpus, policy, compose))
        sampler = Sampler(corpus, config)
        for _ in range(cut):
            sampler.next_step()
        saved = json.dumps(sampler.state())
        resumed = Sampler(corpus, config, state=json.loads(saved))
        assert json.dumps(resumed.state()) == saved
        assert [resumed.next_step() for _ in range(6)] == [sampler.next_step() for _ in range(6)]
        assert resumed.state() == sampler.state()


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
def test_a_resumed_finite_stream_ends_where_the_whole_one_does(policy: str, compose: str) -> None:
    corpus, config = log_normal(400), SamplerConfig(policy, compose)
    whole = list(Sampler(corpus, config, epochs=3))
    for cut in range(len(whole) + 1):
        sampler = Sampler(corpus, config, epochs=3)
        for _ in range(cut):
            sampler.next_step()
        assert list(Sampler(corpus, config, epochs=3, state=sampler.state())) == whole[cut:]


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
def test_a_finite_stream_is_the_beginning_of_the_endless_one(policy: str, compose: str) -> None:
    corpus, config = log_normal(500), SamplerConfig(policy, compose, seed=3)
    finite, endless = list(Sampler(corpus, config, epochs=2)), Sampler(corpus, config)
    assert finite[:-1] == [endless.next_step() for _ in finite[:-1]]


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
@pytest.mark.parametrize("slots", [8, 24, 64])
def test_every_world_size_consumes_the_same_stream(policy: str, compose: str, slots: int) -> None:
    """Put together by place, the ranks' slots are the plan; each rank runs equally many."""
    corpus = log_normal(1500)
    config = SamplerConfig(policy, compose, batches_per_step=slots)
    plan = list(Sampler(corpus, config, epochs=1))
    for size in (size for size in (1, 2, 3, 4, 8, 64) if slots % size == 0):
        merged = []
        for step in Sampler(corpus, config, epochs=1):
            parts = [batches_for(step, World(rank, size)) for rank in range(size)]
            assert {len(part) for part in parts} == {slots // size}
            slots_of_all = sorted((slot for part in parts for slot in part), key=lambda slot: slot.place)
            assert [slot.place for slot in slots_of_all] == list(range(slots))
            merged.append(Step(step.index, tuple(slot.draws for slot in slots_of_all), step.tokens))
        assert merged == plan


@quick_and_long(25, 300)
def test_bucketed_draws_keep_to_the_quota_through_the_end_of_every_epoch(examples: int) -> None:
    """Tijdeman's bound on the real stream: |n_b - p_b t| <= 1 - 1/(2K - 2), with p_b counted afterwards."""

    @for_all(examples, corpora(), st.integers(1, 4), st.integers(0, 100))
    def check(corpus: Corpus, room: int, seed: int) -> None:
        config = SamplerConfig(
            "stratified", "bucketed", "natural", room * int(corpus.lengths.max()), seed=seed
        )
        batches = [batch for step in Sampler(corpus, config, epochs=2) for batch in step.batches if batch]
        assert all(len({int(corpus.buckets[draw.row]) for draw in batch}) == 1 for batch in batches)
        for epoch in range(2):
            drawn = [int(corpus.buckets[batch[0].row]) for batch in batches if batch[0].epoch == epoch]
            counts, owed = Counter[int](), Counter(drawn)
            parts = max(2, 2 * len(owed) - 2)
            for made, bucket in enumerate(drawn, start=1):
                counts[bucket] += 1
                for other, total in owed.items():
                    assert abs(counts[other] * len(drawn) - total * made) * parts <= (parts - 1) * len(drawn)


@quick_and_long(25, 300)
def test_a_mixed_step_is_the_next_part_of_the_sequence(examples: int) -> None:
    """Whatever the size of the steps, the samples come in the same order: what is put back comes first."""

    @for_all(examples, corpora(), st.integers(1, 8), st.integers(0, 100))
    def check(corpus: Corpus, slots: int, seed: int) -> None:
        longest = int(corpus.lengths.max())
        one_by_one = Sampler(
            corpus, SamplerConfig(tokens_per_batch=longest, batches_per_step=1, seed=seed), epochs=1
        )
        sequence = iter(draw for step in one_by_one for draw in draws_of(step))
        config = SamplerConfig(tokens_per_batch=2 * longest, batches_per_step=slots, seed=seed)
        for step in Sampler(corpus, config, epochs=1):
            drawn = draws_of(step)
            assert sorted(drawn) == sorted(next(sequence) for _ in drawn)
        assert next(sequence, None) is None


@pytest.mark.parametrize("seed", [0, 1])
def test_on_log_normal_lengths_mixed_steps_are_full_even_and_true_to_the_mix(seed: int) -> None:
    """Fill >= 0.97, rank cost max/mean <= 1.03 over 8 ranks, total variation 0.03 in a step, 0.002 in 30."""
    corpus, config = log_normal(8000, seed), SamplerConfig()
    sampler = Sampler(corpus, config, epochs=1)
    steps = list(sampler)[:-1]
    capacity = config.batches_per_step * config.tokens_per_batch
    assert sum(step.tokens for step in steps) / (len(steps) * capacity) >= 0.97
    costs = np.array(
        [[cost(corpus, batches_for(step, World(rank, 8))) for rank in range(8)] for step in steps]
    )
    assert (costs.max(1) / costs.mean(1)).mean() <= 1.03
    by_step = tokens_of(corpus, steps).reshape(len(steps), 8, -1).sum(1)
    assert variation(by_step, sampler.quota, 1).mean() <= 0.03
    assert variation(by_step, sampler.quota, 30).mean() <= 0.002


def cost(corpus: Corpus, slots: list) -> float:
    lengths = [float(corpus.lengths[draw.row]) for slot in slots for draw in slot.draws]
    return sum(length + length**2 / 32768 for length in lengths)


@pytest.mark.parametrize("seed", [0, 1])
def test_on_log_normal_lengths_bucketed_ranks_work_equally_hard_and_alike_over_an_epoch(seed: int) -> None:
    """Rank cost max/mean <= 1.05 over 8 ranks, though long micro-batches hold four samples."""
    corpus = log_normal(8000, seed)
    steps = list(Sampler(corpus, SamplerConfig(compose="bucketed"), epochs=2))[:-1]
    parts = [[batches_for(step, World(rank, 8)) for rank in range(8)] for step in steps]
    costs = np.array([[cost(corpus, slots) for slots in step] for step in parts])
    assert (costs.max(1) / costs.mean(1)).mean() <= 1.05
    by_rank = costs.mean(0)
    assert by_rank.max() / by_rank.mean() <= 1.01
    assert sum(step.tokens for step in steps) / (len(steps) * 8 * 16384) >= 0.75


def test_on_log_normal_lengths_bucketed_draws_vary_and_never_bunch() -> None:
    """Total variation over 30 draws at most 0.05 on average, while a queue in corpus order has far more."""
    corpus = log_normal(17_457)  # that of benchmarks/mixing.py
    config = SamplerConfig(compose="bucketed")
    sampler = Sampler(corpus, config, epochs=1)
    ours = variation(tokens_of(corpus, list(sampler)[:-1]), sampler.quota, 30).mean()
    queue = list(Sampler(corpus, replace(config, policy="shuffle"), epochs=1))[:-1]
    theirs = variation(tokens_of(corpus, queue), sampler.quota, 30).mean()
    assert ours <= 0.05
    assert theirs > 2 * ours


def test_no_rank_keeps_getting_the_long_samples() -> None:
    """Mean and longest sample of every rank agree within a few per cent over an epoch."""
    corpus = log_normal(8000)
    steps = list(Sampler(corpus, SamplerConfig(), epochs=1))[:-1]
    longest = np.array(
        [
            np.mean(
                [
                    max(corpus.lengths[d.row] for d in batches_for(step, World(rank, 8))[0].draws)
                    for step in steps
                ]
            )
            for rank in range(8)
        ]
    )
    fixed = np.array(
        [
            np.mean([max(corpus.lengths[d.row] for d in step.batches[slot]) for step in steps])
            for slot in range(8)
        ]
    )
    assert longest.max() / longest.mean() < 1.1
    assert fixed.max() / fixed.mean() > longest.max() / longest.mean()


@pytest.mark.parametrize(("mix", "shares"), [("uniform", [1 / 8] * 8), ("512:0.9,1024:0.1", [0.9, 0.1])])
@pytest.mark.parametrize("compose", ["mixed", "bucketed"])
def test_other_mixes_reach_their_shares_by_reshuffling_the_small_buckets(
    mix: str, shares: list[float], compose: str
) -> None:
    corpus = log_normal(3000)
    if mix != "uniform":
        mix += "".join(f",{edge}:0" for edge in corpus.bucket_edges[2:])
    sampler = Sampler(corpus, SamplerConfig(compose=compose, mix=mix, tokens_per_batch=4096), epochs=2)
    steps = list(sampler)
    tokens = tokens_of(corpus, steps).sum(0)
    assert tokens / tokens.sum() == pytest.approx(shares + [0] * (8 - len(shares)), abs=0.01)
    assert sampler.quota == pytest.approx(shares + [0] * (8 - len(shares)))
    assert 2 * sampler.epoch_tokens <= tokens.sum() < 2.02 * sampler.epoch_tokens
    drawn = [draw for step in steps for draw in draws_of(step)]
    assert len(set(drawn)) == len(drawn), "a row came twice in the same pass"


@pytest.mark.parametrize("compose", ["mixed", "bucketed"])
def test_an_epoch_of_a_given_size_ends_there_and_its_repeats_are_as_announced(compose: str) -> None:
    """A small bucket is gone through three times, each in another order, before a large one is half done."""
    corpus = make_corpus([200, 20], 60, 0)
    config = SamplerConfig(compose=compose, mix="uniform", tokens_per_batch=240, batches_per_step=2)
    size = 6 * corpus.tokens_by_bucket[1]
    sampler = Sampler(corpus, replace(config, epoch_size=size), epochs=1)
    assert sampler.passes == pytest.approx([3 * corpus.tokens_by_bucket[1] / corpus.tokens_by_bucket[0], 3])
    drawn = [draw for step in sampler for draw in draws_of(step)]
    tokens = tokens_of(corpus, [Step(0, (tuple(drawn),), 0)])[0]
    assert size <= tokens.sum() < size + 2 * 240
    assert tokens / corpus.tokens_by_bucket == pytest.approx(sampler.passes, abs=0.5)
    small = [[d.row for d in drawn if corpus.buckets[d.row] == 1 and d.epoch == n] for n in range(3)]
    assert sorted(small[0]) == sorted(small[1]) == sorted(np.flatnonzero(corpus.buckets == 1).tolist())
    assert small[0] != small[1]


def test_the_order_depends_on_seed_and_digest_but_never_on_the_platform() -> None:
    """Two recorded digests guard the order: a change of it breaks the resume of every run in progress."""
    places = np.arange(60)
    buckets = np.where(places % 7 == 0, 2, 0).astype(np.int16)
    buckets[13] = 3
    corpus = Corpus(
        (places * places * 37 % 900 + 1).astype(np.int32), buckets, (256, 512, 768, 1024), "recorded"
    )
    small = SamplerConfig(tokens_per_batch=1000, batches_per_step=4)

    def digest(corpus: Corpus, config: SamplerConfig) -> str:
        return stream_digest(list(Sampler(corpus, config, epochs=2)))

    other = Corpus(corpus.lengths, corpus.buckets, corpus.bucket_edges, "another cache")
    digests = [digest(corpus, small), digest(corpus, replace(small, seed=1)), digest(other, small)]
    assert len(set(digests)) == 3
    assert digests[0].startswith(MIXED)
    assert digest(corpus, replace(small, compose="bucketed")).startswith(BUCKETED)


MIXED, BUCKETED = "4be3140bb052f1b6", "cc1120a22ab367a3"


def test_epochs_differ_in_their_order() -> None:
    corpus = log_normal(2000)
    drawn = [draw for step in Sampler(corpus, SamplerConfig(), epochs=2) for draw in draws_of(step)]
    first, second = ([draw.row for draw in drawn if draw.epoch == epoch] for epoch in range(2))
    assert first != second
    places = np.argsort(first), np.argsort(second)
    assert abs(np.corrcoef(*places)[0, 1]) < 0.1


@pytest.mark.parametrize("compose", ["mixed", "bucketed"])
@pytest.mark.parametrize("samples", [100_000, pytest.param(10_000_000, marks=pytest.mark.long)])
def test_resume_is_immediate_and_its_state_small_at_any_size(samples: int, compose: str) -> None:
    """Less than 50 ms, once the corpus is grouped by bucket."""
    rng = np.random.default_rng(0)
    buckets = rng.integers(0, 8, samples).astype(np.int16)
    edges = tuple(range(512, 4097, 512))
    corpus = Corpus((buckets * 512 + rng.integers(1, 513, samples)).astype(np.int32), buckets, edges, "big")
    sampler = Sampler(corpus, SamplerConfig(compose=compose))
    for _ in range(20):
        sampler.next_step()
    saved = json.dumps(sampler.state())
    assert len(saved) < 2000
    took = []
    for _ in range(3):
        start = time.perf_counter()
        resumed = Sampler(corpus, SamplerConfig(compose=compose), state=json.loads(saved))
        took.append(time.perf_counter() - start)
    assert min(took) < 0.05
    assert resumed.next_step() == sampler.next_step()
