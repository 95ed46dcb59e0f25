"""Following: the order is the quota's whatever arrives when; each sample comes once; a resume repeats it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from arrivals import ByAndBy, flat, follow, ids_of, planned_of
from corpora import make_corpus
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash.cache.planned import Planned
from dflash.errors import CacheMismatch, CheckpointError, ConfigError
from dflash.train.followed import Starved
from dflash.train.following import FollowConfig
from dflash.train.holdout import sample_draws
from dflash.train.sampler import Corpus, Sampler, SamplerConfig

BOTH = pytest.mark.parametrize("compose", ["mixed", "bucketed"])
CONFIG = SamplerConfig(tokens_per_batch=120, batches_per_step=2, min_ready=2, max_ready=8)


@st.composite
def arrivals(draw, longest: int = 60):
    """A corpus, its rows cut into parts in any order of arrival, and how many parts come unasked."""
    sizes = draw(st.lists(st.integers(0, 40) | st.integers(0, 1), min_size=1, max_size=5).filter(any))
    corpus = make_corpus(sizes, longest, draw(st.integers(0, 2**32)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    order = rng.permutation(len(corpus))
    if draw(st.booleans()):  # one bucket after the other, as extraction in order of length delivers them
        order = order[np.argsort(-corpus.buckets[order], kind="stable")]
    cuts = sorted(rng.integers(0, len(corpus), draw(st.integers(0, 9))).tolist())
    parts = [part.tolist() for part in np.split(order, cuts) if len(part)]
    return corpus, parts, draw(st.integers(0, 2))


@BOTH
@settings(max_examples=60, deadline=None)
@given(case=arrivals())
def test_whatever_arrives_when_the_first_epoch_holds_every_sample_once_and_the_second_is_that_of_any_run(
    compose, case
):
    corpus, parts, ahead = case
    config = replace(CONFIG, compose=compose)
    sampler = follow(ByAndBy(corpus, parts, ahead), config, epochs=2)
    steps = list(sampler)
    drawn = flat(ids_of(sampler, steps))
    assert Counter(drawn) == Counter((row, epoch) for row in range(len(corpus)) for epoch in (0, 1))
    assert sampler.tokens == 2 * int(corpus.lengths.sum()) == sum(step.tokens for step in steps)
    for step in steps:
        assert len(step.batches) == 2
        assert all(sum(int(sampler.lengths[d.row]) for d in b) <= 120 for b in step.batches)
    if compose == "bucketed":
        ordinary = [b for step in Sampler(corpus, config, epochs=2) for b in step.batches]
        mine = [b for step in ids_of(sampler, steps) for b in step]
        assert [b for b in mine if b and b[0][1]] == [
            list(map(tuple, b)) for b in ordinary if b and b[0].epoch
        ]


@settings(max_examples=40, deadline=None)
@given(case=arrivals())
def test_behind_the_first_epoch_the_stream_of_samples_is_that_of_any_run(case):
    corpus, parts, ahead = case
    one_each = replace(CONFIG, tokens_per_batch=60, batches_per_step=1)  # steps hold the stream in its order
    sampler = follow(ByAndBy(corpus, parts, ahead), one_each, epochs=3)
    mine = [draw for draw in flat(ids_of(sampler, list(sampler))) if draw[1]]
    any_run = [tuple(d) for step in Sampler(corpus, one_each, epochs=3) for b in step.batches for d in b]
    assert mine == [draw for draw in any_run if draw[1]]


@BOTH
@settings(max_examples=40, deadline=None)
@given(case=arrivals(), cut=st.integers(0, 60), later=st.integers(0, 9))
def test_a_resume_at_any_step_repeats_what_was_recorded_however_much_has_arrived_since(
    compose, case, cut, later
):
    corpus, parts, ahead = case
    config = replace(CONFIG, compose=compose)
    first = ByAndBy(corpus, parts, ahead)
    sampler = follow(first, config, epochs=2)
    states, steps = [sampler.state()], []
    for step in sampler:
        steps.append(step)
        states.append(sampler.state())
    drawn = ids_of(sampler, steps)
    cut = min(cut, len(steps))
    known = min(cut + later, len(first.recorded))  # steps that were planned ahead of the checkpoint
    second = ByAndBy(corpus, parts, ahead, first.recorded[: max(known, min(cut, len(first.recorded)))])
    resumed = follow(second, config, epochs=2, state=states[cut])
    rest = list(resumed)
    assert [step.index for step in rest] == list(range(cut, len(steps)))
    assert ids_of(resumed, rest) == drawn[cut:]
    assert resumed.state() == states[-1]


@settings(max_examples=40, deadline=None)
@given(case=arrivals())
def test_no_bucket_is_ever_further_from_its_planned_share_than_the_longest_sample(case):
    """Even where one bucket arrives before all others."""
    corpus, parts, ahead = case
    sampler = follow(ByAndBy(corpus, parts, ahead), replace(CONFIG, batches_per_step=1), epochs=1)
    given_ = np.zeros(len(corpus.bucket_edges))
    planned, longest = np.array(sampler.quota), int(corpus.lengths.max())
    for step in sampler:
        for draw in (draw for batch in step.batches for draw in batch):
            bucket = next(b for b, rows in enumerate(sampler._arrived.rows) if draw.row in rows)
            given_[bucket] += sampler.lengths[draw.row]
        # a step leaves out samples of which each is at most the longest
        assert (np.abs(given_ - planned * given_.sum()) <= 3 * longest).all()


@pytest.mark.parametrize("mix", ["uniform", "sqrt", "256:0.9,512:0.1"])
@BOTH
def test_other_mixes_keep_their_shares_and_go_through_a_finished_bucket_again(mix, compose):
    corpus = make_corpus([30, 90], 60, 5)
    parts = [np.flatnonzero(corpus.buckets == 0).tolist()]
    parts += [part.tolist() for part in np.array_split(np.flatnonzero(corpus.buckets == 1), 6)]
    config = replace(CONFIG, mix=mix, compose=compose)
    decider = ByAndBy(corpus, parts)
    sampler = follow(decider, config, epochs=2)
    steps = list(sampler)
    drawn = flat(ids_of(sampler, steps))
    tokens = [sum(int(corpus.lengths[row]) for row, _ in drawn if corpus.buckets[row] == b) for b in (0, 1)]
    assert tokens[0] / sum(tokens) == pytest.approx(sampler.quota[0], abs=0.02)
    times = Counter(row for row, _ in drawn)
    of_bucket = [times[row] for row in range(len(corpus)) if corpus.buckets[row] == 0]
    assert max(of_bucket) - min(of_bucket) <= 1
    for row, count in times.items():
        assert sorted(epoch for r, epoch in drawn if r == row) == list(range(count))


def test_the_gate_stays_shut_before_min_ready_and_until_every_bucket_that_is_due_is_there():
    lengths = np.array([10] * 40 + [50] * 40, np.int32)
    corpus = Corpus(lengths, (lengths > 16).astype(np.int16), (16, 64), "d")
    config = SamplerConfig(tokens_per_batch=100, batches_per_step=1, min_ready=4, max_ready=8)
    long_first = [[40, 41, 42, 43], [44, 45, 46], [47, 48, 49, 50], [0, 1, 2, 3, 4, 5, 6, 7]]
    rest = [row for row in range(80) if row not in {row for part in long_first for row in part}]
    decider = ByAndBy(corpus, [*long_first, rest])
    sampler = follow(decider, config)
    step = sampler.next_step()
    assert [buckets for index, buckets in decider.waits if index == 0] == [(), (), (), (0,)]
    assert {0, 1} == {int(corpus.buckets[row]) for row, _ in flat(ids_of(sampler, [step]))} | {0}
    assert len(sampler.lengths) == 19


def test_the_gate_opens_early_once_all_that_was_planned_is_there():
    corpus = make_corpus([4, 4], 20, 0)
    config = SamplerConfig(tokens_per_batch=100, batches_per_step=1, min_ready=50, max_ready=90)
    decider = ByAndBy(corpus, [list(range(8))])
    sampler = follow(decider, config, epochs=1)
    assert len(flat(ids_of(sampler, list(sampler)))) == 8
    assert decider.waits == [(0, ())]


@BOTH
def test_samples_that_were_planned_but_turned_out_bad_are_not_waited_for_once_the_cache_is_complete(compose):
    corpus = make_corpus([20, 20], 60, 1)
    planned = planned_of(corpus)
    more = replace(planned, samples=(20, 22), tokens=(planned.tokens[0], planned.tokens[1] + 100))
    sampler = follow(ByAndBy(corpus, [list(range(40))]), replace(CONFIG, compose=compose), more, epochs=2)
    drawn = flat(ids_of(sampler, list(sampler)))
    assert Counter(drawn) == Counter((row, epoch) for row in range(40) for epoch in (0, 1))


@BOTH
@settings(max_examples=40, deadline=None)
@given(case=arrivals(), share=st.sampled_from([0.1, 0.5]))
def test_what_is_held_out_is_never_drawn_and_all_the_rest_once_an_epoch(compose, case, share):
    corpus, parts, ahead = case
    kept = np.flatnonzero(sample_draws(np.arange(len(corpus), dtype=np.uint64) * np.uint64(10)) >= share)
    assume(len(kept))
    sampler = follow(ByAndBy(corpus, parts, ahead), replace(CONFIG, compose=compose), holdout=share, epochs=2)
    drawn = flat(ids_of(sampler, list(sampler)))
    assert Counter(drawn) == Counter((row, epoch) for row in kept.tolist() for epoch in (0, 1))


class Aside(ByAndBy):
    """Goes on without bucket 0 in the steps 3 to 5."""

    def decide(self, attempts):
        if 3 <= attempts.index < 6:
            found = type(self.recorded[0])(attempts.index, aside=[0])
            found.chunks = attempts.attempt([0], gated=True)
            self.recorded.append(found)
            return found
        return super().decide(attempts)


def test_a_bucket_that_is_left_out_for_a_while_comes_back_spread_over_the_rest_of_the_epoch():
    corpus = make_corpus([200, 200], 40, 2)
    config = replace(CONFIG, batches_per_step=1)
    sampler = follow(Aside(corpus, [list(range(400))]), config, epochs=1)
    steps = ids_of(sampler, list(sampler))
    shares = [
        sum(int(corpus.lengths[r]) for r, _ in flat([step]) if corpus.buckets[r] == 0)
        / sum(int(corpus.lengths[r]) for r, _ in flat([step]))
        for step in steps
    ]
    assert shares[4:6] == [0.0] * 2  # one sample may have been taken before
    assert max(shares[7:]) < 0.95
    assert min(shares[7:-1]) > 0.2
    assert Counter(flat(steps)) == Counter((row, 0) for row in range(400))


def test_ranks_that_are_told_the_decisions_plan_the_same_steps():
    corpus = make_corpus([30, 20, 10], 60, 3)
    parts = [part.tolist() for part in np.array_split(np.random.default_rng(0).permutation(60), 7)]
    first = ByAndBy(corpus, parts)
    main = follow(first, CONFIG, epochs=2)
    steps = list(main)
    told = follow(ByAndBy(corpus, parts, recorded=first.recorded), CONFIG, epochs=2)
    assert [step.batches for step in told] == [step.batches for step in steps]
    assert told.state() == main.state()


def test_the_state_says_how_far_the_cache_has_got_until_it_is_complete():
    corpus = make_corpus([30, 20], 60, 3)
    parts = [part.tolist() for part in np.array_split(np.arange(50), 5)]
    sampler = follow(ByAndBy(corpus, parts), CONFIG, epochs=2)
    sampler.next_step()
    follow_ = sampler.state()["follow"]
    assert 0 < follow_["committed"] < 1
    assert follow_["ready"] >= 0
    list(sampler)
    assert "follow" not in sampler.state()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "fifo"}, "--follow needs --sampler stratified"),
        ({"supply": 0.5}, "modelled supply"),
        ({"tokens_per_batch": 30}, "use --tokens-per-batch 60"),
        ({"mix": "256:1"}, "bucket 512 holds"),
    ],
)
def test_settings_that_do_not_suit_a_growing_cache_are_refused_in_one_line(changes, message):
    planned = Planned((256, 512), (10, 10), (200, 500), 60)
    corpus = make_corpus([10, 10], 60, 0)
    with pytest.raises(ConfigError, match=message):
        follow(ByAndBy(corpus, []), replace(CONFIG, **changes), planned)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_wait": 0}, "--max-wait is 0"),
        ({"on_starved": "skip"}, "--on-starved skip is not one of error, reweight"),
        ({"on_starved": "reweight"}, "needs --max-wait"),
    ],
)
def test_how_to_wait_is_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        FollowConfig(**values)


def test_a_position_without_its_record_or_of_another_run_is_refused():
    corpus = make_corpus([30, 20], 60, 3)
    parts = [part.tolist() for part in np.array_split(np.arange(50), 5)]
    decider = ByAndBy(corpus, parts)
    sampler = follow(decider, CONFIG)
    for _ in range(3):
        sampler.next_step()
    state = sampler.state()
    with pytest.raises(CheckpointError, match="ends with step 2, the checkpoint is behind step 3"):
        follow(ByAndBy(corpus, parts, recorded=decider.recorded[:2]), CONFIG, state=state)
    with pytest.raises(ConfigError, match="seed: was 0, now 1"):
        follow(ByAndBy(corpus, parts, recorded=decider.recorded), replace(CONFIG, seed=1), state=state)
    with pytest.raises(CacheMismatch, match="corpus"):
        Sampler(corpus, CONFIG, state=state)


def test_an_attempt_that_fails_leaves_no_trace():
    corpus = make_corpus([30, 20], 60, 3)
    sampler = follow(ByAndBy(corpus, [list(range(50))]), CONFIG)
    before = sampler.state()
    with pytest.raises(Starved, match="--min-ready is 240"):
        sampler.attempt([], gated=True)
    assert sampler.state() == before
