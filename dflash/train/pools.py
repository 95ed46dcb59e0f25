"""Where samples come from: one bucket in a seeded order, or the whole corpus in order of arrival."""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash.train.permutation import Permutation, derive_key

IntArray = npt.NDArray[np.integer[Any]]
_CHUNK = 1024
_PLANNING_CHUNK = 1 << 16  # fits the processor's cache
_EVEN_AT_MOST = 1 << 12  # micro-batches of a pass; among more, a single small one does not matter


class Draw(NamedTuple):
    """One sample of the stream."""

    row: int
    """Row of the sample in the corpus."""
    epoch: int
    """How often this sample was drawn before; with the natural mix that is the epoch."""


class BucketPool:
    """The samples of one bucket without end: pass after pass, each in an order of its own.

    Args:
        rows: Corpus rows of the bucket, `[n]` with n >= 1.
        lengths: Tokens of every sample of the corpus, `[N]`.
        key: Parts that, with the pass, decide the order: corpus digest, seed, bucket.
        position: Samples already taken, over all passes.
    """

    def __init__(
        self, rows: IntArray, lengths: IntArray, key: tuple[str | int, ...], position: int = 0
    ) -> None:
        self.position = position
        self.key = key
        self._rows, self._lengths = rows, lengths
        self._chunk_rows: list[int] = []
        self._chunk_lengths: list[int] = []
        self._cursor = 0

    @property
    def epoch(self) -> int:
        """The pass that the next sample belongs to."""
        return self.position // len(self._rows)

    def __len__(self) -> int:
        """Samples of the bucket."""
        return len(self._rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self._lengths[self._rows].max())

    def peek(self) -> int:
        """Tokens of the next sample."""
        if self._cursor >= len(self._chunk_rows):
            self._load()
        return self._chunk_lengths[self._cursor]

    def take(self) -> Draw:
        """The next sample."""
        if self._cursor >= len(self._chunk_rows):
            self._load()
        draw = Draw(self._chunk_rows[self._cursor], self.epoch)
        self._cursor += 1
        self.position += 1
        return draw

    def take_batch(self, budget: int) -> tuple[list[Draw], list[int]]:
        """The next samples of this pass for as long as they fit into `budget` tokens, and their lengths."""
        epoch, rows, lengths, total = self.epoch, list[int](), list[int](), 0
        while self.epoch == epoch and total + (length := self.peek()) <= budget:
            total += length
            lengths.append(length)
            rows.append(self._chunk_rows[self._cursor])
            self._cursor += 1
            self.position += 1
        return list(map(Draw._make, zip(rows, repeat(epoch), strict=False))), lengths

    def plan_pass(self, budget: int) -> tuple[int, int]:
        """How the current pass divides into micro-batches of at most `budget` tokens.

        Returns:
            How many `take_batch(budget)` it takes to use up the pass from its beginning, and the smallest
            limit with which it takes no more of them: then the last is hardly smaller than the rest.
        """
        return even_limit(self.pass_lengths(len(self._rows)), budget)

    def pass_lengths(self, count: int) -> npt.NDArray[np.int64]:
        """Tokens of the first `count` samples of the current pass, int64 `[min(count, n)]`."""
        order = self._permutation()
        lengths = np.empty(min(count, len(self._rows)), np.int64)
        for start in range(0, len(lengths), _PLANNING_CHUNK):
            stop = min(start + _PLANNING_CHUNK, len(lengths))
            lengths[start:stop] = self._lengths[self._rows[order.slice(start, stop)]]
        return lengths

    def _permutation(self) -> Permutation:
        return Permutation(len(self._rows), derive_key("order", *self.key, self.epoch))

    def _load(self) -> None:
        # A chunk ends with its pass: the next pass has another permutation.
        start = self.position % len(self._rows)
        stop = min(start + _CHUNK, len(self._rows))
        rows = self._rows[self._permutation().slice(start, stop)]
        self._chunk_rows = rows.tolist()
        self._chunk_lengths = self._lengths[rows].tolist()
        self._cursor = 0


def even_limit(lengths: npt.NDArray[np.int64], budget: int) -> tuple[int, int]:
    """How many micro-batches of `budget` tokens these samples fill in turn, and the least such budget."""
    ends = np.cumsum(lengths)
    count = _count_batches(ends, budget)
    if count > _EVEN_AT_MOST:
        return count, budget
    low, high = max(int(lengths.max()), int(ends[-1]) // count), budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _count_batches(ends, middle) == count else (middle + 1, high)
    return count, high


def _count_batches(ends: npt.NDArray[np.int64], limit: int) -> int:
    """Micro-batches of at most `limit` tokens that a pass fills in turn; `ends` are its running sums."""
    count, start, used = 0, 0, 0
    while start < len(ends):
        start = int(ends.searchsorted(used + limit, side="right"))
        used = int(ends[start - 1])
        count += 1
    return count


class Arrivals:
    """The corpus in order of its rows, epoch after epoch: the order in which a live source delivers.

    Args:
        lengths: Tokens of every sample of the corpus, `[N]`.
        position: Samples already taken, over all epochs.
    """

    def __init__(self, lengths: IntArray, position: int = 0) -> None:
        self.position = position
        self._lengths = lengths

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to."""
        return self.position // len(self._lengths)

    @property
    def within_epoch(self) -> bool:
        """Whether the current epoch has begun and still has samples to deliver."""
        return self.position % len(self._lengths) > 0

    def peek(self) -> int:
        """Tokens of the next sample."""
        return int(self._lengths[self.position % len(self._lengths)])

    def take(self) -> Draw:
        """The next sample."""
        epoch, row = divmod(self.position, len(self._lengths))
        self.position += 1
        return Draw(row, epoch)
