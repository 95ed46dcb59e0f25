"""The meter's figures equal what a second look at all draws gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from corpora import for_all, quick_and_long
from hypothesis import strategies as st

from dflash.errors import CheckpointError
from dflash.train.mixmeter import MixMeter


def by_hand(draws: list[list[int]], quota: np.ndarray, window: int) -> list[float]:
    """Total variation over each full window."""
    sums = [np.sum(draws[end - window : end], axis=0) for end in range(window, len(draws) + 1)]
    return [float(np.abs(total / total.sum() - quota).sum() / 2) for total in sums]


@quick_and_long(50, 800)
def test_variation_is_that_of_every_window(examples: int) -> None:
    draws = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=25)

    @for_all(examples, draws)
    def check(draws: list[list[int]]) -> None:
        quota = np.array([0.2, 0.3, 0.5])
        meter = MixMeter(quota.tolist(), windows=(4, 9))
        for draw in draws:
            meter.record(draw)
        report = meter.report()
        assert report.draws == len(draws)
        assert report.tokens == np.sum(draws)
        assert report.shares == pytest.approx(np.sum(draws, axis=0) / np.sum(draws))
        for found in report.variation:
            windows = by_hand(draws, quota, found.draws)
            assert found.last == pytest.approx(by_hand(draws, quota, min(found.draws, len(draws)))[-1])
            assert found.mean == (pytest.approx(np.mean(windows)) if windows else None)
            assert found.worst == (pytest.approx(max(windows)) if windows else None)


def test_runs_count_draws_of_one_bucket_and_end_at_a_mixed_draw() -> None:
    meter = MixMeter([0.5, 0.5])
    for draw in ([4, 0], [4, 0], [0, 4], [4, 0], [4, 0], [4, 0], [2, 2], [4, 0]):
        meter.record(draw)
    assert meter.report().longest_run == 3


def test_the_hungriest_bucket_is_the_one_whose_age_is_large_for_its_quota() -> None:
    """Ten draws without a bucket of 1 % are nothing; four without one of 60 % are."""
    meter = MixMeter([0.39, 0.6, 0.01])
    meter.record([1, 1, 1])
    for _ in range(6):
        meter.record([1, 1, 0])
    for _ in range(4):
        meter.record([1, 0, 0])
    report = meter.report()
    assert (report.hungriest, report.hungriest_age) == (1, 4)


def test_samples_are_summed_by_bucket_and_empty_slots_are_no_draws() -> None:
    meter = MixMeter([0.5, 0.5])
    meter.record_samples([0, 1, 0], [5, 7, 6])
    meter.record_samples([], [])
    assert meter.report().draws == 1
    assert meter.report().shares == pytest.approx((11 / 18, 7 / 18))


def test_a_report_is_ready_for_json_even_before_the_first_draw() -> None:
    report = MixMeter([0.25, 0.75]).report()
    assert json.loads(json.dumps(report.to_json()))["quota"] == [0.25, 0.75]
    assert report.variation[0].last == 0
    assert report.variation[0].mean is None


@quick_and_long(30, 400)
def test_a_meter_put_back_from_json_goes_on_as_if_it_had_never_stopped(examples: int) -> None:
    draws = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=30)

    @for_all(examples, draws, st.integers(0, 30))
    def check(draws: list[list[int]], cut: int) -> None:
        whole, first = (MixMeter([0.4, 0.6], windows=(3, 7)) for _ in range(2))
        for draw in draws:
            whole.record(draw)
        for draw in draws[:cut]:
            first.record(draw)
        resumed = MixMeter([0.4, 0.6], windows=(3, 7), state=json.loads(json.dumps(first.state())))
        for draw in draws[cut:]:
            resumed.record(draw)
        assert resumed.report() == whole.report()
        assert resumed.recent_shares() == whole.recent_shares()


def test_recent_shares_are_those_of_the_last_draws() -> None:
    meter = MixMeter([0.5, 0.5], windows=(2, 5))
    assert meter.recent_shares() == [0, 0]
    for draw in ([9, 0], [1, 0], [0, 3]):
        meter.record(draw)
    assert meter.recent_shares() == [0.25, 0.75]


@pytest.mark.parametrize(
    "change", [{"ring": [[1, 2]]}, {"run": [1]}, {"sums": []}, {"draws": "x"}, {"last_seen": None}]
)
def test_figures_that_cannot_be_put_back_are_refused(change: dict) -> None:
    state = MixMeter([0.5, 0.5]).state() | change
    with pytest.raises(CheckpointError, match="figures of the mix"):
        MixMeter([0.5, 0.5], state=state)
