"""Simulated figures: the same that a run measures, and that producers and policies change as they must."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from corpora import COMBINATIONS, log_normal, make_corpus

from dflash.errors import ConfigError
from dflash.train.compare import Trace, figures, roughness, simulate, window_shares
from dflash.train.mixmeter import MixMeter
from dflash.train.producer import PRODUCERS, arrange, cost_speeds, thin
from dflash.train.sampler import Sampler, SamplerConfig, batches_for
from dflash.world import World


@pytest.mark.parametrize(("policy", "compose"), COMBINATIONS)
def test_figures_are_those_that_a_run_of_these_settings_measures(policy: str, compose: str) -> None:
    """Mix by `MixMeter`, work by `batches_for`, over several epochs of a small corpus."""
    corpus, ranks = log_normal(700), 4
    config = SamplerConfig(policy, compose, tokens_per_batch=8192, min_ready=3, max_ready=9)
    trace, quota = simulate(corpus, config, draws=160, ranks=ranks)
    found = figures(trace, quota)
    meter, costs = MixMeter(quota), []
    for step in islice(Sampler(corpus, config), 20):
        for batch in step.batches:
            rows = [draw.row for draw in batch]
            meter.record_samples(corpus.buckets[rows], corpus.lengths[rows])
        rows_of = [
            [draw.row for slot in batches_for(step, World(rank, ranks)) for draw in slot.draws]
            for rank in range(ranks)
        ]
        costs.append([sum(n + n * n / 32768 for n in corpus.lengths[rows].tolist()) for rows in rows_of])
    expected = meter.report()
    assert (found.draws, found.longest_run) == (expected.draws, expected.longest_run)
    for spread, variation in zip((found.tv30_draws, found.tv90_draws), expected.variation, strict=True):
        assert spread == pytest.approx((variation.mean, variation.worst))
    by_rank = np.array(costs)
    assert found.rank_cost == pytest.approx((by_rank.max(1) / by_rank.mean(1)).mean())
    assert found.step_tokens * found.steps == expected.tokens
    assert 0 < found.fill <= 1
    assert 0 <= found.padding < 1


def test_runs_waits_and_padding_on_a_sequence_by_hand() -> None:
    draws = np.array([[4, 0], [4, 0], [0, 4], [2, 2], [4, 0], [4, 0], [4, 0], [4, 0]])
    found = figures(
        Trace(draws, np.array([[1.0, 3.0], [2.0, 2.0]]), 64, 20), np.array([0.5, 0.5]), [1.0, 3.0]
    )
    assert (found.longest_run, found.oldest_bucket, found.oldest_age) == (4, 1, 4)
    assert (found.rank_cost, found.fill, found.padding) == (1.25, 0.8, 0.5)
    assert found.tv1_step == pytest.approx((0.3125, 0.5))
    assert found.tv30_draws is None
    assert found.roughness is None  # two steps have one change


def test_predicted_roughness_is_that_of_the_mix_times_the_losses() -> None:
    draws = np.array([[2, 0], [0, 2], [1, 1], [2, 0]])
    found = figures(Trace(draws, np.ones((4, 1)), 8, 2), np.array([0.5, 0.5]), [1.0, 3.0])
    assert found.roughness == pytest.approx(np.std([2, -1, -1]))
    assert roughness([1.0, 3.0, 2.0, 1.0]) == found.roughness


@pytest.mark.parametrize(("arrival", "factor"), [("longest-first", 5), ("mixed", 1.5), ("corpus", 1)])
def test_a_queue_suffers_from_its_producer_and_the_quota_does_not(arrival: str, factor: float) -> None:
    corpus = arrange(log_normal(6000), arrival)

    def variation(policy: str) -> float:
        config = SamplerConfig(policy, "bucketed", min_ready=10, max_ready=60)
        spread = figures(*simulate(corpus, config, draws=300, ranks=8)).tv30_draws
        assert spread is not None
        return spread.mean

    # Whole micro-batches: the bound over W draws is K (1 - 1/(2K - 2)) / W, and the mean about a fifth of it.
    buckets = len(corpus.bucket_edges)
    assert variation("stratified") < 0.25 * buckets * (1 - 1 / (2 * buckets - 2)) / 30
    assert variation("fifo") > factor * variation("stratified")


@pytest.mark.parametrize("producer", PRODUCERS)
def test_producers_deliver_every_sample_once(producer: str) -> None:
    corpus = make_corpus([30, 0, 7, 1], 200, 0)
    arranged = arrange(corpus, producer)
    pairs = list(zip(corpus.buckets.tolist(), corpus.lengths.tolist(), strict=True))
    assert sorted(zip(arranged.buckets.tolist(), arranged.lengths.tolist(), strict=True)) == sorted(pairs)
    if producer != "corpus":
        assert arranged.digest != corpus.digest
    sign = {"longest-first": -1, "shortest-first": 1}.get(producer)
    if sign:
        assert (np.diff(arranged.lengths) * sign >= 0).all()


def test_parallel_producers_deliver_at_the_speed_of_their_bucket() -> None:
    corpus = make_corpus([300, 300], 1, 1)
    first = arrange(corpus, "mixed", [3.0, 1.0]).buckets[:200]
    assert 0.24 < first.mean() < 0.26
    assert arrange(corpus, "mixed", [3.0, 1.0]).buckets[-150:].all()  # the fast one has run out
    assert np.ptp(cost_speeds(corpus)) == 0


def test_an_unknown_producer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--producer random .*longest-first"):
        arrange(make_corpus([3], 5, 0), "random")


def test_a_thinned_corpus_keeps_the_mix_and_no_bucket_is_lost() -> None:
    corpus = log_normal(8000)
    thinned = thin(corpus, sum(corpus.tokens_by_bucket) // 4)
    whole, part = (np.array(c.tokens_by_bucket) / sum(c.tokens_by_bucket) for c in (corpus, thinned))
    assert len(thinned) == pytest.approx(2000, abs=8)
    assert np.abs(whole - part).max() < 0.01
    assert thin(corpus, 1 << 40) is corpus
    assert all(thin(make_corpus([1, 1, 500], 9, 0), 5).tokens_by_bucket)


def test_shares_over_a_window_are_those_of_its_rows() -> None:
    draws = np.array([[1, 3], [3, 1], [4, 0]])
    assert window_shares(draws, 2).tolist() == [[0.5, 0.5], [0.875, 0.125]]
