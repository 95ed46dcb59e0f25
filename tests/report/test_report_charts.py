"""Axes, curves and drawings of a report."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_pages import parse

from dflash.report.axes import Axis, axis, number, round_values, tick_text
from dflash.report.charts import HEIGHT, WIDTH, AreaChart, LineChart
from dflash.report.figure import areas, lines
from dflash.report.series import MOST_POINTS, MOST_ROWS, Curve, floats, running_mean, thinned

FINITE = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-6)


def chart(curves: list[Curve], **changes) -> LineChart:
    return LineChart("c", "A title", "step", "loss", curves, **changes)


def curve(values: list[float | None], **changes) -> Curve:
    return Curve("a", np.arange(1.0, len(values) + 1), floats(values), **changes)


@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans())
def test_every_value_and_tick_lies_inside_the_axis(values, zero) -> None:
    found = axis(values, 200.0, 10.0, zero=zero)
    for value in [*values, *found.ticks()]:
        assert 9.9 <= found.at(value) <= 200.1
    assert 1 <= len(found.ticks()) <= 12
    if zero:
        assert found.low <= 0


@given(st.floats(1e-6, 1e6), st.floats(1.3, 1e9))
def test_a_logarithmic_axis_has_ticks_inside_at_any_scale(low, factor) -> None:
    found = axis([low, low * factor], 0.0, 100.0, log=True)
    assert found.ticks()
    assert all(-0.1 <= found.at(tick) <= 100.1 for tick in found.ticks())


def test_ticks_are_round() -> None:
    assert round_values(0, 10) == [0, 2, 4, 6, 8, 10]
    assert round_values(0.13, 0.47) == pytest.approx([0.2, 0.3, 0.4])
    assert Axis(2, 70, 0, 1, log=True).ticks() == pytest.approx([3, 10, 30])
    assert [tick_text(v) for v in (0, 0.0005, 0.25, 1500, 15000, 2e6)] == [
        "0",
        "5e-4",
        "0.25",
        "1500",
        "15k",
        "2M",
    ]


def test_numbers_are_written_for_people() -> None:
    assert [number(v) for v in (None, float("nan"), 3, 1234567, 0.123456, 2345.6)] == [
        "-",
        "-",
        "3",
        "1,234,567",
        "0.1235",
        "2,346",
    ]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=80), st.integers(1, 25))
def test_the_running_mean_is_that_of_the_last_values(values, width) -> None:
    expected = [np.mean(values[max(0, n + 1 - width) : n + 1]) for n in range(len(values))]
    assert running_mean(np.array(values), width) == pytest.approx(expected, abs=1e-9)


def test_the_running_mean_passes_over_values_that_are_missing() -> None:
    found = running_mean(floats([None, 1.0, None, 3.0, None, None]), 2)
    assert found[1:5].tolist() == [1, 1, 3, 3]
    assert np.isnan(found[[0, 5]]).all()


@given(st.integers(1, 5000), st.integers(0, 4999))
def test_a_long_curve_is_thinned_without_losing_its_peaks(length, peak) -> None:
    values = np.sin(np.arange(length) / 50)
    values[peak % length] = 9.0
    x, y = thinned(Curve("a", np.arange(length, dtype=float), values))
    assert len(x) <= MOST_POINTS
    assert (y.max(), x[y.argmax()]) == (9.0, peak % length)
    assert (np.diff(x) > 0).all()


def test_a_run_of_a_million_steps_makes_a_small_figure() -> None:
    made = lines(chart([Curve("a", np.arange(1e6), np.random.default_rng(0).normal(size=10**6))]))
    assert len(made) < 20_000
    assert len(list(parse(made).root.all("tr"))) == MOST_ROWS + 1


def test_everything_is_drawn_inside_the_picture() -> None:
    curves = [curve([3.0, None, 1e-3, 2e4]), curve([1.0, 2.0], dots=True, colour=1)]
    for log in (False, True):
        svg = next(parse(lines(chart(curves, log=log, levels=[("limit", 7.0)]))).root.all("svg"))
        places = [
            (float(x), float(y))
            for path in svg.all("path")
            for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attributes["d"])
        ]
        assert len(places) == 5
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_a_line_is_broken_where_a_value_is_missing() -> None:
    (path,) = parse(lines(chart([curve([1.0, 2.0, None, 3.0, 4.0])]))).root.all("path")
    assert re.sub(r"[\d. ]", "", path.attributes["d"]) == "MLML"


def test_a_figure_without_values_says_so() -> None:
    assert lines(chart([curve([None, None])])) == '<p class="note">A title: nothing recorded.</p>'


def test_curves_that_stand_for_runs_differ_in_more_than_their_colour() -> None:
    made = parse(lines(chart([curve([1.0, 2.0], colour=n) for n in range(6)])))
    kinds = [path.attributes["class"] for path in made.root.all("path")]
    assert len(set(kinds)) == 6
    assert {kind.split()[1] for kind in kinds} == {"d0", "d1", "d2"}
    assert [key.attributes["class"].split()[1:] for key in made.root.classed("key")] == [
        kind.split()[:0:-1] for kind in kinds
    ]


def test_areas_fill_the_height_and_quota_stands_on_their_borders() -> None:
    shares = np.array([[0.25, 0.75], [0.5, 0.5]])
    made = parse(
        areas(AreaChart("m", "Mix", "step", "share", np.array([1.0, 2.0]), shares, shares[1], ["s", "l"]))
    )
    first, second = [path.attributes["d"] for path in made.root.all("path")]
    corners = [re.findall(r"[\d.]+ ([\d.]+)", d) for d in (first, second)]
    assert corners[0][:2] == corners[1][:1:-1]  # the upper edge of one is the lower edge of the other
    assert corners[0][2:] == [str(HEIGHT - 44.0)] * 2
    assert corners[1][:2] == ["12.0"] * 2
    (quota,) = made.root.classed("quota")
    assert quota.attributes["y1"] == corners[0][1]
