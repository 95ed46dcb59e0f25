"""The mix that was really consumed, measured draw by draw against the quota."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash.errors import CheckpointError

WINDOWS = (30, 90)
MeterState = dict[str, Any]
"""Numbers and lists of numbers under names, ready for JSON."""


@dataclass(frozen=True)
class Variation:
    """Total variation between mix and quota, 0 (equal) to 1 (disjoint), over the last draws."""

    draws: int
    """Length of the window."""
    last: float
    """Over the latest draws, up to the window's length."""
    mean: float | None
    """Mean over all windows of full length so far; None before the first."""
    worst: float | None
    """The largest of them; None before the first."""


@dataclass(frozen=True)
class MixReport:
    """What `MixMeter` has seen."""

    draws: int
    """Micro-batches consumed."""
    tokens: int
    """Their tokens."""
    shares: tuple[float, ...]
    """Each bucket's share of the tokens, `[buckets]`; all 0 before the first draw."""
    quota: tuple[float, ...]
    """What each bucket is owed, `[buckets]`."""
    variation: tuple[Variation, ...]
    """One for each window length."""
    longest_run: int
    """Most draws in a row that held one and the same bucket and no other."""
    hungriest: int
    """The bucket that has waited longest for its size: the largest age * quota."""
    hungriest_age: int
    """Draws since that bucket was last drawn, or since the start."""

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON-ready value."""
        return asdict(self)


class MixMeter:
    """Watches what a run consumes; feed it every micro-batch, in the order of the stream.

    Args:
        quota: Share of the tokens that each bucket is owed, `[buckets]`, summing to 1.
        windows: Numbers of draws over which the total variation is taken.
        state: What `state()` of a meter with the same quota and windows returned, to go on from there.

    Raises:
        CheckpointError: the state is not that of such a meter.
    """

    def __init__(
        self, quota: Sequence[float], windows: Sequence[int] = WINDOWS, state: MeterState | None = None
    ) -> None:
        self._quota = np.asarray(quota, np.float64)
        self._windows = tuple(windows)
        buckets = len(self._quota)
        # A ring of running totals: the tokens of a window are the difference of two of its rows.
        self._ring = np.zeros((max(self._windows) + 1, buckets), np.int64)
        self._draws = 0
        self._sums = [0.0] * len(self._windows)
        self._worst = [0.0] * len(self._windows)
        self._last_seen = np.zeros(buckets, np.int64)
        self._run_bucket, self._run, self._longest_run = -1, 0, 0
        if state is not None:
            self._restore(state)

    def record(self, tokens: npt.ArrayLike) -> None:
        """Count one micro-batch: its tokens per bucket, `[buckets]`. An empty one is no draw."""
        drawn = np.asarray(tokens, np.int64)
        present = np.flatnonzero(drawn)
        if not present.size:
            return
        size = len(self._ring)
        self._draws += 1
        self._ring[self._draws % size] = self._ring[(self._draws - 1) % size] + drawn
        self._last_seen[present] = self._draws
        self._count_run(int(present[0]) if present.size == 1 else -1)
        for number, window in enumerate(self._windows):
            if self._draws >= window:
                variation = self._variation(window)
                self._sums[number] += variation
                self._worst[number] = max(self._worst[number], variation)

    def record_samples(self, buckets: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Count one micro-batch: the bucket and the tokens of each of its samples, both `[samples]`."""
        drawn = np.zeros(len(self._quota), np.int64)
        np.add.at(drawn, np.asarray(buckets, np.int64), np.asarray(lengths, np.int64))
        self.record(drawn)

    def tokens_by_bucket(self) -> npt.NDArray[np.int64]:
        """Tokens consumed of each bucket, int64 `[buckets]`."""
        totals: npt.NDArray[np.int64] = self._ring[self._draws % len(self._ring)].copy()
        return totals

    def recent_shares(self) -> list[float]:
        """Each bucket's share of the tokens of the last draws, up to the shortest window; 0 before any."""
        tokens = self._recent(min(*self._windows, self._draws))
        return (tokens / max(int(tokens.sum()), 1)).tolist()  # type: ignore[no-any-return]

    def state(self) -> MeterState:
        """All that has been counted, ready for JSON."""
        return {
            "draws": self._draws,
            "ring": self._ring.tolist(),
            "sums": list(self._sums),
            "worst": list(self._worst),
            "last_seen": self._last_seen.tolist(),
            "run": [self._run_bucket, self._run, self._longest_run],
        }

    def report(self) -> MixReport:
        """The figures so far."""
        totals = self.tokens_by_bucket()
        tokens = int(totals.sum())
        ages = self._draws - self._last_seen
        hungriest = int(np.argmax(ages * self._quota))
        return MixReport(
            draws=self._draws,
            tokens=tokens,
            shares=tuple((totals / max(tokens, 1)).tolist()),
            quota=tuple(self._quota.tolist()),
            variation=tuple(self._window_report(number) for number in range(len(self._windows))),
            longest_run=self._longest_run,
            hungriest=hungriest,
            hungriest_age=int(ages[hungriest]),
        )

    def _restore(self, state: MeterState) -> None:
        try:
            ring, last_seen = np.array(state["ring"], np.int64), np.array(state["last_seen"], np.int64)
            if (ring.shape, last_seen.shape) != (self._ring.shape, self._last_seen.shape):
                raise ValueError(f"{ring.shape} and {last_seen.shape} figures")  # noqa: TRY301 - one reason of many
            self._ring[:], self._last_seen[:], self._draws = ring, last_seen, int(state["draws"])
            self._sums = [float(state["sums"][number]) for number in range(len(self._windows))]
            self._worst = [float(state["worst"][number]) for number in range(len(self._windows))]
            self._run_bucket, self._run, self._longest_run = map(int, state["run"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"the saved figures of the mix cannot be read ({error!r})") from error

    def _count_run(self, bucket: int) -> None:
        # A draw of several buckets, -1, belongs to no run.
        self._run = 0 if bucket < 0 else self._run + 1 if bucket == self._run_bucket else 1
        self._run_bucket = bucket
        self._longest_run = max(self._longest_run, self._run)

    def _recent(self, window: int) -> npt.NDArray[np.int64]:
        size = len(self._ring)
        tokens: npt.NDArray[np.int64] = (
            self._ring[self._draws % size] - self._ring[(self._draws - window) % size]
        )
        return tokens

    def _variation(self, window: int) -> float:
        tokens = self._recent(window)
        return float(np.abs(tokens / tokens.sum() - self._quota).sum() / 2)

    def _window_report(self, number: int) -> Variation:
        window = self._windows[number]
        last = self._variation(min(window, self._draws)) if self._draws else 0.0
        full = self._draws - window + 1
        if full < 1:
            return Variation(window, last, None, None)
        return Variation(window, last, self._sums[number] / full, self._worst[number])
