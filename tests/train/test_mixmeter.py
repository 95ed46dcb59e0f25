"""The meter's figures equal what a second look at all draws gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from corpora import for_all, quick_and_long
from hypothesis import strategies as st

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
