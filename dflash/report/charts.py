"""Charts as inline SVG: lines, and areas on top of each other. Colours are classes, so they follow the page.

Places are in the units of the view box, `WIDTH` x `HEIGHT`; the page scales it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.report.axes import Axis, axis, number, tick_text
from dflash.report.colours import RUNS
from dflash.report.markup import Html, join, tag
from dflash.report.series import Curve, FloatArray, thinned

WIDTH, HEIGHT = 440, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 12, 44


@dataclass(frozen=True, eq=False)
class LineChart:
    """Curves over each other."""

    name: str
    """Of its element, unique in the page."""
    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_names: Sequence[str] = ()
    """Written at 0, 1, ... in the place of numbers."""
    levels: Sequence[tuple[str, float]] = ()
    """Values that are drawn as dashed lines, with their names."""
    log: bool = False
    """Logarithmic, where the values allow it."""
    zero: bool = False

    @property
    def shown(self) -> list[Curve]:
        """Curves with a value."""
        return [curve for curve in self.curves if not curve.empty]


@dataclass(frozen=True, eq=False)
class AreaChart:
    """Shares on top of each other."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: FloatArray
    """[N]."""
    shares: FloatArray
    """[N, buckets], each row summing to 1."""
    owed: FloatArray
    """[buckets]: where the borders should be; drawn as dashed lines."""
    labels: Sequence[str]


@dataclass(frozen=True)
class _Frame:
    """Where the axes of a chart are."""

    x: Axis
    y: Axis
    x_names: Sequence[str] = ()


def line_svg(chart: LineChart, marks: FloatArray) -> Html:
    """Draw the curves; `marks` are x that a reader can step through."""
    frame = _line_frame(chart)
    faint = [_curve(curve, frame) for curve in chart.shown if curve.faint]
    strong = [_curve(curve, frame) for curve in chart.shown if not curve.faint]
    levels = [_level(name, value, frame) for name, value in chart.levels]
    body = [_grid(frame), faint, levels, strong, _labels(chart, frame)]
    return _svg(chart, _line_summary(chart), body, [frame.x.at(float(x)) for x in marks])


def area_svg(chart: AreaChart, marks: FloatArray) -> Html:
    """Draw the shares; `marks` are x that a reader can step through."""
    frame = _Frame(_x_axis(chart.x.tolist()), Axis(0.0, 1.0, HEIGHT - _BOTTOM, _TOP))
    edges = np.concatenate([np.zeros((len(chart.x), 1)), np.cumsum(chart.shares, axis=1)], axis=1)
    areas = [
        tag("path", class_=f"area c{n % RUNS}", d=_band(frame, chart.x, edges[:, n], edges[:, n + 1]))
        for n in range(chart.shares.shape[1])
    ]
    places = np.cumsum(chart.owed)[:-1].tolist()
    borders = [[_across(frame, place, kind) for kind in ("halo", "quota")] for place in places]
    summary = "; ".join(
        f"{label}: {share:.1%} at the end, {owed:.1%} owed"
        for label, share, owed in zip(chart.labels, chart.shares[-1], chart.owed, strict=True)
    )
    body = [areas, _grid(frame), borders, _labels(chart, frame)]
    return _svg(chart, summary, body, [frame.x.at(float(x)) for x in marks])


def _svg(chart: LineChart | AreaChart, summary: str, body: object, marks: Sequence[float]) -> Html:
    title, described = f"{chart.name}-title", f"{chart.name}-desc"
    return tag(
        "svg",
        tag("title", chart.title, id=title),
        tag("desc", f"{chart.y_label} over {chart.x_label}. {summary}", id=described),
        body,
        tag("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=HEIGHT - _BOTTOM),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{title} {described}",
        data_marks=" ".join(map(str, marks)),
    )


def _line_frame(chart: LineChart) -> _Frame:
    points = [(x, y) for curve in chart.shown for x, y in zip(*_lists(curve), strict=True) if np.isfinite(y)]
    values = [y for _, y in points] + [value for _, value in chart.levels]
    log = chart.log and bool(values) and min(values) > 0 and max(values) > 5 * min(values)
    y = axis(values, HEIGHT - _BOTTOM, _TOP, log=log, zero=chart.zero)
    places = [x for x, _ in points]
    if chart.x_names:
        places = [-0.4, len(chart.x_names) - 0.6]
    return _Frame(_x_axis(places), y, chart.x_names)


def _x_axis(places: Sequence[float]) -> Axis:
    low, high = (min(places), max(places)) if places else (0.0, 1.0)
    return (
        Axis(low, high, _LEFT, WIDTH - _RIGHT)
        if high > low
        else Axis(low - 1, low + 1, _LEFT, WIDTH - _RIGHT)
    )


def _lists(curve: Curve) -> tuple[list[float], list[float]]:
    x, y = thinned(curve)
    return x.tolist(), y.tolist()


def _curve(curve: Curve, frame: _Frame) -> Html:
    kind = "faint" if curve.faint else f"curve d{curve.colour // 2 % 3}"
    x, y = _lists(curve)
    line = tag("path", class_=f"{kind} c{curve.colour % RUNS}", d=_path(frame, x, y))
    if not curve.dots:
        return line
    dots = [
        tag("circle", class_=f"dot c{curve.colour % RUNS}", cx=frame.x.at(a), cy=frame.y.at(b), r=3)
        for a, b in zip(x, y, strict=True)
        if np.isfinite(b)
    ]
    return join([line, dots])


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float]) -> str:
    """A line that is broken where a value is missing."""
    parts, drawing = [], False
    for a, b in zip(x, y, strict=True):
        if not np.isfinite(b):
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{frame.x.at(a)} {frame.y.at(b)}")
        drawing = True
    return "".join(parts)


def _band(frame: _Frame, x: FloatArray, low: FloatArray, high: FloatArray) -> str:
    there = [f"{frame.x.at(a)} {frame.y.at(b)}" for a, b in zip(x.tolist(), high.tolist(), strict=True)]
    back = [f"{frame.x.at(a)} {frame.y.at(b)}" for a, b in zip(x.tolist(), low.tolist(), strict=True)]
    return f"M{'L'.join([*there, *reversed(back)])}Z"


def _across(frame: _Frame, value: float, kind: str) -> Html:
    place = frame.y.at(value)
    return tag("line", class_=kind, x1=_LEFT, x2=WIDTH - _RIGHT, y1=place, y2=place)


def _level(name: str, value: float, frame: _Frame) -> Html:
    label = tag(
        "text", name, class_="level", x=WIDTH - _RIGHT - 4, y=frame.y.at(value) - 4, text_anchor="end"
    )
    return join([_across(frame, value, "quota"), label])


def _grid(frame: _Frame) -> Html:
    """Lines and numbers of both axes."""
    rows = [
        (
            _across(frame, value, "grid"),
            tag("text", tick_text(value), x=_LEFT - 6, y=frame.y.at(value) + 4, text_anchor="end"),
        )
        for value in frame.y.ticks()
    ]
    columns = [
        tag("text", name, x=frame.x.at(value), y=HEIGHT - _BOTTOM + 17, text_anchor="middle")
        for value, name in _x_ticks(frame)
    ]
    return tag("g", rows, columns, class_="axes")


def _x_ticks(frame: _Frame) -> list[tuple[float, str]]:
    if frame.x_names:
        every = -(-len(frame.x_names) // 8)
        return [(float(n), name) for n, name in enumerate(frame.x_names) if n % every == 0]
    return [(value, tick_text(value)) for value in frame.x.ticks() if value.is_integer()]


def _labels(chart: LineChart | AreaChart, frame: _Frame) -> Html:
    x, y = (frame.x.start + frame.x.end) / 2, (frame.y.start + frame.y.end) / 2
    return tag(
        "g",
        tag("text", chart.x_label, x=x, y=HEIGHT - 7, text_anchor="middle"),
        tag("text", chart.y_label, x=17, y=y, text_anchor="middle", transform=f"rotate(-90 17 {y})"),
        class_="labels",
    )


def _line_summary(chart: LineChart) -> str:
    parts = []
    for curve in chart.shown:
        values = curve.y[np.isfinite(curve.y)]
        if not curve.faint:
            first, last, low, high = map(number, (values[0], values[-1], values.min(), values.max()))
            parts.append(f"{curve.label}: from {first} to {last}, lowest {low}, highest {high}")
    return "; ".join(parts)
