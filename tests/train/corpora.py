"""Corpora for the sampler's tests: strategies for hypothesis, and log-normal lengths like conversations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.train.sampler import Corpus, SamplerConfig, Step

COMBINATIONS = [
    pytest.param(policy, compose, id=f"{policy}-{compose}")
    for policy in ("stratified", "shuffle", "fifo")
    for compose in ("mixed", "bucketed")
]


def quick_and_long(quick: int, long: int) -> pytest.MarkDecorator:
    """Parametrizes `examples`: a few in every run, many in `make test-long`."""
    marks = [pytest.mark.long, pytest.mark.timeout(1800)]
    return pytest.mark.parametrize("examples", [quick, pytest.param(long, marks=marks, id="long")])


def for_all(examples: int, *strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], None]:
    """Runs the decorated property at once, on that many examples."""

    def run(check: Callable[..., None]) -> None:
        limits = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        limits(given(*strategies)(check))()

    return run


def make_corpus(sizes: list[int], longest: int, seed: int) -> Corpus:
    """`sizes[b]` samples in bucket b, of lengths up to `longest` spread over the decades, in random order."""
    rng = np.random.default_rng(seed)
    buckets = rng.permutation(np.repeat(np.arange(len(sizes), dtype=np.int16), sizes))
    lengths = np.exp(rng.uniform(0, np.log(longest + 1), len(buckets))).astype(np.int32)
    edges = tuple(256 * (bucket + 1) for bucket in range(len(sizes)))
    return Corpus(lengths.clip(1, longest), buckets, edges, f"digest-{seed}")


def corpora(most_samples: int = 60) -> st.SearchStrategy[Corpus]:
    """1 to 12 buckets, empty ones and ones with one sample among them, lengths of 1 to 100,000."""
    sizes = st.lists(st.integers(0, most_samples) | st.integers(0, 1), min_size=1, max_size=12).filter(any)
    longest = st.integers(1, 100_000) | st.integers(1, 60)
    return st.builds(make_corpus, sizes, longest, st.integers(0, 2**32))


def configs(corpus: Corpus, policy: str, compose: str) -> st.SearchStrategy[SamplerConfig]:
    """Small steps and windows that fit the corpus, and its natural mix or others."""
    longest = int(corpus.lengths.max())
    # With other mixes a bucket of one short sample fills its share by that sample alone: keep steps small.
    mixable = policy == "stratified" and longest <= 60
    mixes = st.sampled_from(["natural", "uniform", "sqrt"]) if mixable else st.just("natural")
    return st.builds(
        lambda budget, slots, low, more, supply, seed, mix: SamplerConfig(
            policy, compose, mix, budget, slots, low, low + more, supply, seed
        ),
        st.integers(longest, 4 * longest),
        st.integers(1, 8),
        st.integers(1, 4),
        st.integers(0, 6),
        st.none() | st.floats(0.1, 4),
        st.integers(0, 2**63),
        mixes,
    )


def log_normal(samples: int = 4000, seed: int = 0) -> Corpus:
    """Median 600 tokens, longest 4,096, 8 buckets of equal width."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(600), 0.9, samples)).astype(np.int32).clip(16, 4096)
    edges = tuple(range(512, 4097, 512))
    buckets = np.array([bisect_left(edges, length) for length in lengths], np.int16)
    return Corpus(lengths, buckets, edges, f"log-normal-{seed}")


def stream_digest(steps: list[Step]) -> str:
    """Sha256 of every draw, slot by slot."""
    return sha256(
        repr([[tuple(map(tuple, batch)) for batch in step.batches] for step in steps]).encode()
    ).hexdigest()
