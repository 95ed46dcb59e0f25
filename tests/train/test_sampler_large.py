"""The bounds of the plan over corpora of up to 100,000 samples, through the end of the epoch."""

from __future__ import annotations

from itertools import chain

import numpy as np
from corpora import corpora, for_all, quick_and_long
from hypothesis import strategies as st

from dflash.train.sampler import Corpus, Sampler, SamplerConfig

MOST = 8_333  # in each of up to 12 buckets


@quick_and_long(2, 25)
def test_mixed_steps_stay_within_the_longest_sample_of_every_quota(examples: int) -> None:
    """WF2Q: behind every step |tokens_b - p_b T| is at most the longest sample; each sample comes once."""

    @for_all(examples, corpora(MOST), st.integers(1, 3), st.integers(0, 100))
    def check(corpus: Corpus, room: int, seed: int) -> None:
        longest, buckets = int(corpus.lengths.max()), len(corpus.bucket_edges)
        config = SamplerConfig(tokens_per_batch=room * longest, batches_per_step=1, seed=seed)
        seen, rows = np.zeros(len(corpus), int), []
        for step in Sampler(corpus, config, epochs=1):
            drawn = [draw.row for draw in chain.from_iterable(step.batches)]
            seen[drawn] += 1
            rows.append(np.bincount(corpus.buckets[drawn], corpus.lengths[drawn], buckets))
        assert (seen == 1).all()
        tokens = np.cumsum(rows, axis=0).astype(np.int64).astype(object)  # [steps, buckets]; exact integers
        owed = tokens[-1]
        assert (
            abs(tokens * owed.sum() - owed * tokens.sum(axis=1, keepdims=True)) <= longest * owed.sum()
        ).all()


@quick_and_long(2, 25)
def test_bucketed_draws_stay_within_a_draw_of_every_quota_and_keep_no_bucket_waiting(examples: int) -> None:
    """Tijdeman: |n_b - p_b t| <= 1 - 1/(2K - 2) after every draw, and < 2/p_b others between two of b."""

    @for_all(examples, corpora(MOST), st.integers(1, 3), st.integers(0, 100))
    def check(corpus: Corpus, room: int, seed: int) -> None:
        budget = room * int(corpus.lengths.max())
        config = SamplerConfig("stratified", "bucketed", tokens_per_batch=budget, seed=seed)
        steps = Sampler(corpus, config, epochs=1)
        batches = [batch for step in steps for batch in step.batches if batch]
        assert sorted(draw.row for batch in batches for draw in batch) == list(range(len(corpus)))
        drawn = np.array([corpus.buckets[batch[0].row] for batch in batches])
        names = np.unique(drawn)
        counts = np.cumsum(drawn[:, None] == names, axis=0)  # [draws, K]
        total, made = len(drawn), np.arange(1, len(drawn) + 1)[:, None]
        parts = max(2, 2 * len(names) - 2)
        assert (abs(counts * total - counts[-1] * made) * parts <= (parts - 1) * total).all()
        for name, owed in zip(names, counts[-1], strict=True):
            others = np.diff(np.flatnonzero(drawn == name)) - 1
            assert (others * owed * parts <= 2 * (parts - 1) * total).all()
