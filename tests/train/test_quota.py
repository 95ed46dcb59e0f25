"""The bounds of both schedules hold after every single item, exactly, for any weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
from corpora import corpora, for_all, quick_and_long
from hypothesis import strategies as st

from dflash.train.mix import bucket_weights
from dflash.train.pools import BucketPool
from dflash.train.quota import Chairman
from dflash.train.sampler import Corpus
from dflash.train.streams import QuotaStream

WEIGHTS = st.lists(st.integers(1, 10_000), min_size=1, max_size=12)  # shares down to 1e-4 and below


def pools_of(corpus: Corpus) -> dict[int, BucketPool]:
    return {
        bucket: BucketPool(rows, corpus.lengths, ("test", bucket))
        for bucket, rows in enumerate(corpus.rows_by_bucket)
        if len(rows)
    }


@quick_and_long(60, 800)
def test_no_bucket_is_a_whole_draw_from_its_quota(examples: int) -> None:
    """Tijdeman: |n_b - p_b t| <= 1 - 1/(2K - 2) after every draw t, in integers."""

    @for_all(examples, WEIGHTS, st.integers(1, 600))
    def check(weights: list[int], draws: int) -> None:
        chairman, total, parts = Chairman(weights), sum(weights), max(2, 2 * len(weights) - 2)
        for drawn in range(1, draws + 1):
            chairman.pick()
            for count, weight in zip(chairman.counts, weights, strict=True):
                assert abs(count * total - weight * drawn) * parts <= (parts - 1) * total


@quick_and_long(40, 500)
def test_fewer_others_than_two_over_its_share_come_between_two_draws_of_a_bucket(examples: int) -> None:
    """Its distance from the quota can fall by 2 - 1/(K - 1) at most, and by p_b with each of the others."""

    @for_all(examples, WEIGHTS, st.integers(1, 1500))
    def check(weights: list[int], draws: int) -> None:
        chairman, total, parts = Chairman(weights), sum(weights), max(2, 2 * len(weights) - 2)
        ages = [0] * len(weights)
        for _ in range(draws):
            chosen = chairman.pick()
            ages = [0 if bucket == chosen else age + 1 for bucket, age in enumerate(ages)]
            for age, weight in zip(ages, weights, strict=True):
                assert age * weight * parts <= 2 * (parts - 1) * total


def test_the_others_are_counted_not_the_draws_from_one_to_the_next() -> None:
    """The last of these shares is 0.789: two others do come in a row, though 2/0.789 is less than three."""
    weights = [1, 277, 1452, 6476]
    chairman = Chairman(weights)
    picks = [chairman.pick() for _ in range(sum(weights))]
    places = [place for place, pick in enumerate(picks) if pick == 3]
    assert max(after - before - 1 for before, after in pairwise(places)) == 2


@quick_and_long(40, 250)
def test_a_whole_round_gives_every_bucket_exactly_its_weight(examples: int) -> None:
    @for_all(examples, st.lists(st.integers(1, 60), min_size=1, max_size=12))
    def check(weights: list[int]) -> None:
        chairman = Chairman(weights)
        for _ in range(2 * sum(weights)):
            chairman.pick()
        assert chairman.counts == [2 * weight for weight in weights]


def test_a_resumed_sequence_continues_the_same() -> None:
    whole, first = Chairman([5, 3, 1, 7]), Chairman([5, 3, 1, 7])
    for _ in range(23):
        assert whole.pick() == first.pick()
    resumed = Chairman([5, 3, 1, 7], first.counts)
    assert [resumed.pick() for _ in range(100)] == [whole.pick() for _ in range(100)]


@quick_and_long(60, 800)
def test_tokens_never_stray_from_the_natural_mix_by_more_than_the_longest_sample(examples: int) -> None:
    """WF2Q over two epochs: after every sample the bound holds, and each epoch holds every sample once."""

    @for_all(examples, corpora())
    def check(corpus: Corpus) -> None:
        pools = pools_of(corpus)
        weights = [corpus.tokens_by_bucket[bucket] for bucket in pools]
        stream = QuotaStream(list(pools.values()), weights, None)
        for epoch in range(2):
            drawn = follow(stream, corpus, dict(zip(pools, weights, strict=True)), len(corpus))
            assert sorted(drawn) == [(row, epoch) for row in range(len(corpus))]


@quick_and_long(40, 500)
def test_tokens_never_stray_from_any_other_mix_either(examples: int) -> None:
    """The same bound for shares down to 1e-4, while small buckets are passed through again and again."""

    @for_all(examples, corpora(), st.data())
    def check(corpus: Corpus, data: st.DataObject) -> None:
        pools = pools_of(corpus)
        shares = st.lists(st.integers(1, 10_000), min_size=len(pools), max_size=len(pools))
        weights = data.draw(
            shares
            | st.just([w for w in bucket_weights("sqrt", corpus.bucket_edges, corpus.tokens_by_bucket) if w])
        )
        stream = QuotaStream(list(pools.values()), weights, None)
        drawn = follow(stream, corpus, dict(zip(pools, weights, strict=True)), 300)
        assert len(set(drawn)) == len(drawn), "a sample came twice in the same pass"


def follow(
    stream: QuotaStream, corpus: Corpus, weights: dict[int, int], samples: int
) -> list[tuple[int, int]]:
    """Take samples and check the bound after each; the stream must be where all quotas are met."""
    total, longest, clock = sum(weights.values()), int(corpus.lengths.max()), 0
    tokens = dict.fromkeys(weights, 0)
    drawn = []
    for _ in range(samples):
        row, epoch = stream.take()
        drawn.append((row, epoch))
        length = int(corpus.lengths[row])
        tokens[int(corpus.buckets[row])] += length
        clock += length
        for bucket, weight in weights.items():
            assert abs(tokens[bucket] * total - weight * clock) <= longest * total
    return drawn


@pytest.mark.parametrize("weights", [[1], [1, 1], [10_000, 1], [1] * 12, [10_000] + [1] * 11])
def test_extreme_weights_keep_the_order_fair(weights: list[int]) -> None:
    chairman = Chairman(weights)
    picks = [chairman.pick() for _ in range(sum(weights))]
    assert [picks.count(bucket) for bucket in range(len(weights))] == weights
