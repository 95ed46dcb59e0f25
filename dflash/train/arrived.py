"""What has arrived of a cache that is still being written, and in which order a bucket of it is drawn.

A bucket's first pass is cut into chunks: each holds what had arrived and was not yet drawn when it was begun,
in a seeded random order. Chunks are recorded, so that the order can be repeated whatever has arrived
meanwhile. Once the cache is complete and the first pass over, a bucket goes on as in any other run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash.train.holdout import sample_draws
from dflash.train.permutation import Permutation, derive_key
from dflash.train.pools import BucketPool, Draw, IntArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.cache.planned import Planned

_AHEAD = 256


@dataclass(frozen=True)
class Source:
    """What is followed."""

    planned: Planned
    """What the finished cache will hold."""
    identity: str
    """Digest of the cache's identity."""
    holdout: float = 0.0
    """Share of the samples that are never trained on."""


class Chunk(NamedTuple):
    """A stretch of a bucket's samples, in order of arrival, that is drawn in an order of its own."""

    first: int
    stop: int
    epoch: int
    """How often each of them was drawn before."""


class Arrived:
    """What has been committed, and which order it is drawn in.

    Args:
        source: What is followed.
        seed: Another seed is another order.
        repeats: Whether a bucket whose samples have all arrived may be passed through again at once;
            otherwise that waits until the cache is complete.
    """

    def __init__(self, source: Source, seed: int, *, repeats: bool) -> None:
        self.planned, self.repeats = source.planned, repeats
        self._holdout, self._key = source.holdout, (source.identity, seed)
        buckets = len(self.planned.edges)
        self.ids: np.ndarray = np.empty(0, np.uint64)
        self.lengths: IntArray = np.empty(0, np.int32)
        self.rows: list[IntArray] = [np.empty(0, np.int64)] * buckets
        self.tokens = [0] * buckets
        self.chunks: list[list[Chunk]] = [[] for _ in range(buckets)]
        self.digest: str | None = None
        """That of the finished cache's content; None while it is being written."""
        self._seen = [0] * buckets  # samples, those that are held out among them

    @property
    def targets(self) -> list[int]:
        """Tokens of one pass by bucket: as planned, and as they are once all have arrived."""
        trained = 1 - self._holdout
        return [
            here if self.finished(bucket) else round(planned * trained)
            for bucket, (here, planned) in enumerate(zip(self.tokens, self.planned.tokens, strict=True))
        ]

    @property
    def exhausted(self) -> bool:
        """Whether nothing more will arrive."""
        return all(self.finished(bucket) for bucket in range(len(self.rows)))

    def finished(self, bucket: int) -> bool:
        """Whether nothing more of this bucket will arrive."""
        return self.digest is not None or self._seen[bucket] >= self.planned.samples[bucket]

    def extend(self, ids: np.ndarray, buckets: IntArray, lengths: IntArray) -> None:
        """Add samples, `[n]` each, behind all others; those that are held out are never drawn."""
        first, held_out = len(self.lengths), sample_draws(ids) < self._holdout
        self.ids = np.concatenate([self.ids, ids])
        self.lengths = np.concatenate([self.lengths, lengths])
        for bucket in range(len(self.rows)):
            here = np.flatnonzero(buckets == bucket)
            self._seen[bucket] += len(here)
            here = here[~held_out[here]]
            if len(here):
                self.rows[bucket] = np.concatenate([self.rows[bucket], here + first])
                self.tokens[bucket] += int(lengths[here].sum(dtype=np.int64))

    def key_of(self, bucket: int, chunk: Chunk) -> bytes:
        """Decides the order within a chunk."""
        return derive_key("follow", *self._key, bucket, chunk.first, chunk.epoch)

    def ordinary(self, bucket: int, position: int) -> BucketPool:
        """The bucket behind so many samples, as any run draws it from the finished cache."""
        rows = self.rows[bucket]
        by_id = rows[np.argsort(self.ids[rows])]  # the finished cache's own order of rows
        return BucketPool(by_id, self.lengths, (str(self.digest), self._key[-1], bucket), position)

    def marks(self) -> list[int]:
        """How many chunks each bucket has."""
        return [len(chunks) for chunks in self.chunks]

    def go_back(self, marks: Sequence[int]) -> None:
        """Forget chunks that were begun since `marks`."""
        for chunks, count in zip(self.chunks, marks, strict=True):
            del chunks[count:]

    def begun_since(self, marks: Sequence[int]) -> list[list[int]]:
        """Chunks that were begun since `marks`: bucket, first, stop, epoch of each."""
        return [
            [bucket, *chunk]
            for bucket, (chunks, count) in enumerate(zip(self.chunks, marks, strict=True))
            for chunk in chunks[count:]
        ]


class FollowedPool:
    """One bucket's samples in the order of its chunks, and then as in any other run.

    Args:
        arrived: What there is.
        bucket: Which bucket.
        position: Samples already taken.
    """

    def __init__(self, arrived: Arrived, bucket: int, position: int) -> None:
        self.position = position
        self._arrived, self._bucket = arrived, bucket
        self._ordinary: BucketPool | None = None
        self._rows: list[int] = []
        self._cursor = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """How often the next sample was drawn before; only where it is there (`ready`)."""
        return self._epoch if self._ordinary is None else self._ordinary.epoch

    def ready(self) -> bool:
        """Whether the next sample has arrived."""
        return self._ordinary is not None or self._cursor < len(self._rows) or self._load()

    def peek(self) -> int:
        """Tokens of the next sample, which must have arrived."""
        if self._ordinary is not None:
            return self._ordinary.peek()
        return int(self._arrived.lengths[self._rows[self._cursor]])

    def take(self) -> Draw:
        """The next sample, which must have arrived."""
        self.position += 1
        if self._ordinary is not None:
            return self._ordinary.take()
        self._cursor += 1
        return Draw(self._rows[self._cursor - 1], self._epoch)

    def _load(self) -> bool:
        found = self._chunk()
        if found is None:
            return False
        if self._ordinary is not None:
            return True
        chunk, offset = found
        size = chunk.stop - chunk.first
        order = Permutation(size, self._arrived.key_of(self._bucket, chunk))
        places = order.slice(offset, min(offset + _AHEAD, size)) + chunk.first
        self._rows = self._arrived.rows[self._bucket][places].tolist()
        self._cursor, self._epoch = 0, chunk.epoch
        return True

    def _chunk(self) -> tuple[Chunk, int] | None:
        """The chunk that the next sample is in, and its place there; begins one where that is possible."""
        chunks = self._arrived.chunks[self._bucket]
        until = sum(chunk.stop - chunk.first for chunk in chunks)
        # Behind a complete cache's digest chunks are not recorded: on a resume they are begun anew, the same.
        while self.position >= until:
            begun = self._begin(chunks)
            if begun is None or self._ordinary is not None:
                return begun and (begun, 0)
            until += begun.stop - begun.first
        for chunk in reversed(chunks):
            until -= chunk.stop - chunk.first
            if self.position >= until:
                return chunk, self.position - until
        raise AssertionError("a position is never negative")

    def _begin(self, chunks: list[Chunk]) -> Chunk | None:
        here = len(self._arrived.rows[self._bucket])
        drawn = max((chunk.stop for chunk in chunks), default=0)
        epoch = chunks[-1].epoch + 1 if chunks else 0
        if drawn < here:
            chunk = Chunk(drawn, here, 0)
        elif not here or not self._arrived.finished(self._bucket):
            return None
        elif self._arrived.digest is not None:
            self._ordinary = self._arrived.ordinary(self._bucket, self.position)
            return chunks[-1]
        elif self._arrived.repeats:
            chunk = Chunk(0, here, epoch)
        else:
            return None
        chunks.append(chunk)
        return chunk


def lower_edges(edges: Sequence[int]) -> list[int]:
    """Tokens that a sample of each bucket exceeds."""
    return [0, *edges[:-1]]
