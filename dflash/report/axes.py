"""Numbers along an axis: where they stand, which of them are written, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass

NONE = "-"
"""Where there is no figure."""


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` at places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Place of a value, to a tenth."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """About five round values inside the axis, at least one."""
        return _log_ticks(self.low, self.high) if self.log else round_values(self.low, self.high)


def axis(values: list[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Axis:
    """An axis that holds these values, with some room around them where they are not its natural end.

    Args:
        values: Finite; without any the axis is that from 0 to 1.
        start: Place of its lower end.
        end: Place of its upper end.
        log: Logarithmic; all values must be above 0.
        zero: Whether it begins at 0.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if log:
        return Axis(low / 1.1, high * 1.1, start, end, log=True)
    low = min(low, 0.0) if zero else low
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(low if zero and low == 0 else low - room, high + room, start, end)


def round_values(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, about `count` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(ticks) >= 3:
            return ticks
    return round_values(low, high)


def number(value: float | None) -> str:
    """A figure for people: four digits that matter, thousands apart; a dash for none."""
    if value is None or not math.isfinite(value):
        return NONE
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def tick_text(value: float) -> str:
    """A number on an axis, short: `15k`, `20M`, `5e-4`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 10 or (abs(value) >= size and unit != "k"):
            return f"{value / size:.4g}{unit}"
    if 0 < abs(value) < 0.01:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        return f"{value / 10.0**power:.4g}e{power}"
    return f"{value:.6g}"
