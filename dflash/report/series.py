"""Curves of bounded length: a run of a hundred thousand steps must not make a page of a hundred megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
MOST_POINTS = 400
"""Of a curve."""
MOST_ROWS = 30
"""Of a table beside a curve."""
_SMOOTH = 20


@dataclass(frozen=True, eq=False)
class Curve:
    """Points of one curve, x ascending."""

    label: str
    x: FloatArray
    y: FloatArray
    """NaN where there is none."""
    colour: int = 0
    """Of the run or bucket that it belongs to."""
    faint: bool = False
    """Drawn lightly, behind the others, and left out of legend and table."""
    dots: bool = False
    """Each point is marked."""

    @property
    def empty(self) -> bool:
        """Whether no point has a value."""
        return not np.isfinite(self.y).any()


def floats(values: Sequence[float | None]) -> FloatArray:
    """Figures of which some may be missing: NaN there."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


def running_mean(values: FloatArray, width: int | None = None) -> FloatArray:
    """Mean of each value and those before it, up to `width` of them; without NaN, unless all are NaN.

    Args:
        values: `[N]`.
        width: By default 20, fewer for a short curve.
    """
    width = width or min(_SMOOTH, 1 + len(values) // 10)
    known = np.isfinite(values)
    counts, sums = (
        running_sum(known.astype(np.float64), width),
        running_sum(np.where(known, values, 0), width),
    )
    means: FloatArray = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
    return means


def running_sum(values: FloatArray, width: int) -> FloatArray:
    """Sum of each row and those before it, up to `width` of them, along the first axis."""
    totals: FloatArray = np.cumsum(values, axis=0)
    totals[width:] -= totals[:-width].copy()
    return totals


def thinned(curve: Curve) -> tuple[FloatArray, FloatArray]:
    """At most about `MOST_POINTS` points: of each stretch the lowest and the highest, in their order."""
    if len(curve.x) <= MOST_POINTS:
        return curve.x, curve.y
    kept: list[int] = []
    for part in np.array_split(np.arange(len(curve.x)), MOST_POINTS // 2):
        known = part[np.isfinite(curve.y[part])]
        if known.size:
            values = curve.y[known]
            kept += sorted({int(known[values.argmin()]), int(known[values.argmax()])})
    return curve.x[kept], curve.y[kept]


def table_places(curves: Sequence[Curve]) -> FloatArray:
    """Some x of these curves, from the first to the last, at most `MOST_ROWS`."""
    every = np.unique(np.concatenate([np.zeros(0), *(curve.x for curve in curves)]))
    if len(every) <= MOST_ROWS:
        return every
    found: FloatArray = every[np.unique(np.linspace(0, len(every) - 1, MOST_ROWS).round().astype(int))]
    return found


def value_at(curve: Curve, x: float) -> float:
    """The curve's value at one of its own x; NaN elsewhere."""
    place = int(np.searchsorted(curve.x, x))
    return float(curve.y[place]) if place < len(curve.x) and curve.x[place] == x else float("nan")
