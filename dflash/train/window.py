"""The live queue of earlier pipelines: a gate, a capacity, and a source that fills it at some speed.

Only `shuffle` and `fifo` draw from it. A finished cache keeps it full; a live target that is slower than
training lets it sink to the gate, and then it is `min_ready`, not `max_ready`, that says how much is mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.train.permutation import keyed_below
from dflash.train.pools import Draw, IntArray

StreamState = dict[str, Any]
"""Integers and lists of integers under names, ready for JSON."""


@dataclass(frozen=True)
class WindowShape:
    """Limits of what may wait to be drawn."""

    budget: int
    """Tokens of a micro-batch."""
    min_ready: int
    """The gate, in micro-batches: no draw while fewer are ready, unless the epoch's source is exhausted."""
    max_ready: int
    """The capacity, in micro-batches: nothing arrives while as many are ready."""
    supply: float | None
    """Tokens that arrive for each token drawn; None when arrival is never the slower side."""


def window_level(stream: StreamState, lengths: IntArray, budget: int) -> float | None:
    """How many micro-batches waited to be drawn.

    Args:
        stream: A stream's saved position.
        lengths: Tokens of every sample of the corpus, `[N]`.
        budget: Tokens of a micro-batch.

    Returns:
        Micro-batches, or tokens over `budget` where single samples wait; None for a stream without a queue.
    """
    if "ready" in stream:
        return float(len(stream["ready"]))
    if "window" in stream:
        return float(lengths[[row for row, _ in stream["window"]]].sum()) / budget
    return None


class Supply:
    """How far a source of limited speed has got with samples that have not arrived yet.

    Args:
        rate: Tokens that it delivers for each token drawn; None for a source that is never waited for.
        credit: Thousandths of a token that it has worked ahead.
    """

    def __init__(self, rate: float | None, credit: int) -> None:
        self._rate = None if rate is None else round(rate * 1000)
        self.credit = credit

    def delivers(self, tokens: int) -> bool:
        """Whether a sample of that length is there without waiting."""
        return self._rate is None or self.credit >= tokens * 1000

    def elapse(self, tokens: int) -> None:
        """Time passes: `tokens` were drawn and trained on."""
        self.credit += (self._rate or 0) * tokens

    def spend(self, tokens: int) -> None:
        """A sample of that length arrived; one that had to be waited for leaves no debt."""
        self.credit = max(0, self.credit - tokens * 1000)

    def block(self) -> None:
        """The window is full: a source that cannot deliver does not work ahead."""
        self.credit = 0


class ReadyQueue:
    """Micro-batches that wait to be drawn, and those still open to samples of their bucket.

    Args:
        shape: Its limits.
        buckets: Number of buckets.
        key: Decides which micro-batch is drawn; None draws the oldest.
        state: What `state()` returned, to resume.
    """

    def __init__(
        self, shape: WindowShape, buckets: int, key: bytes | None, state: StreamState | None
    ) -> None:
        saved: StreamState = {"drawn": 0, "ready": [], "open": [[]] * buckets, "filled": [0] * buckets} | (
            state or {}
        )
        self._shape, self._key = shape, key
        self._drawn: int = saved["drawn"]
        self._ready = [[Draw(*draw) for draw in batch] for batch in saved["ready"]]
        self._open = [[Draw(*draw) for draw in batch] for batch in saved["open"]]
        self._filled: list[int] = list(saved["filled"])

    def __len__(self) -> int:
        """Micro-batches that are ready."""
        return len(self._ready)

    @property
    def has_room(self) -> bool:
        """Whether another sample may arrive."""
        return len(self._ready) < self._shape.max_ready

    @property
    def gate_open(self) -> bool:
        """Whether enough is ready for a draw while the source still delivers."""
        return len(self._ready) >= self._shape.min_ready

    def arrive(self, draw: Draw, bucket: int, length: int) -> None:
        """Add a sample to its bucket's open micro-batch, which becomes ready when the sample does not fit."""
        if self._filled[bucket] + length > self._shape.budget:
            self._close(bucket)
        self._open[bucket].append(draw)
        self._filled[bucket] += length

    def flush(self) -> None:
        """The source is exhausted: what is open becomes ready as it is, beyond the capacity if need be."""
        for bucket in range(len(self._open)):
            self._close(bucket)

    def draw(self) -> list[Draw]:
        """Take a micro-batch out; at least one must be ready."""
        chosen = 0 if self._key is None else keyed_below(self._key, self._drawn, len(self._ready))
        self._drawn += 1
        return self._ready.pop(chosen)

    def state(self) -> StreamState:
        """What is ready, what is open, and the number of draws made."""
        return {
            "drawn": self._drawn,
            "ready": [[list(draw) for draw in batch] for batch in self._ready],
            "open": [[list(draw) for draw in batch] for batch in self._open],
            "filled": list(self._filled),
        }

    def _close(self, bucket: int) -> None:
        if self._open[bucket]:
            self._ready.append(self._open[bucket])
        self._open[bucket], self._filled[bucket] = [], 0
