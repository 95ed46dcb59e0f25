"""Bucketed composition: an endless sequence of micro-batches, each of samples of one bucket.

`QuotaBatches` sequences the buckets by quota. `QueueBatches` is the live queue of earlier pipelines, kept for
comparison: micro-batches form in order of arrival and wait in a queue of limited depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Protocol

from dflash.train.evening import EvenBatches
from dflash.train.levels import choose_caps
from dflash.train.packing import Packing
from dflash.train.pools import Arrivals, BucketPool, Draw, IntArray
from dflash.train.quota import Chairman
from dflash.train.window import ReadyQueue, StreamState, Supply


class BatchStream(Protocol):
    """An endless sequence of micro-batches whose position can be saved."""

    def take(self) -> tuple[list[Draw], int]:
        """The next micro-batch, never empty, and its tokens."""

    def state(self) -> StreamState:
        """What `take` will need to go on from here."""


class QuotaBatches:
    """Buckets in Tijdeman's order: after every draw, no bucket is a whole draw away from its quota.

    With `shares` None (the natural mix), bucket b is owed M_b of an epoch's draws, M_b being the number of
    micro-batches that its samples fill, and the epoch ends with every bucket used up. Otherwise it is owed a
    share of the tokens; its share of the draws follows from its average micro-batch in the first pass.
    The micro-batches of all buckets cost about the same: see `dflash.train.levels` and `.evening`.

    Args:
        pools: The buckets that are drawn from.
        tokens: Tokens that each holds.
        shares: Their shares of the tokens, as positive integers.
        packing: How a step is divided, and what a sample costs.
        state: What `state()` returned, to resume.
        caps: Tokens that a micro-batch of each bucket may hold; by default chosen from the pools.
    """

    def __init__(
        self,
        pools: Sequence[BucketPool],
        tokens: Sequence[int],
        shares: Sequence[int] | None,
        packing: Packing,
        state: StreamState | None,
        caps: Sequence[int] | None = None,
    ) -> None:
        self._tokens, self._shares = tokens, shares
        # Planning a pass looks at every sample of it, so a resume takes the numbers as saved.
        if state is not None:
            caps = state["caps"]
        caps = caps or choose_caps(pools, shares or tokens, packing)
        passes = [None] * len(pools) if state is None else state["passes"]
        self._buckets = [
            EvenBatches(pool, packing, cap, saved)
            for pool, cap, saved in zip(pools, caps, passes, strict=True)
        ]
        self._due: list[int] = self._counts() if state is None else list(state["batches"])
        self._chairman = Chairman(self._weights(), None if state is None else state["counts"])

    def take(self) -> tuple[list[Draw], int]:
        """The next micro-batch and its tokens."""
        if self._shares is None and self._chairman.counts == self._due:
            for bucket in self._buckets:
                bucket.plan()
            self._due = self._counts()
            self._chairman = Chairman(self._weights())
        return self._buckets[self._chairman.pick()].take()

    def state(self) -> StreamState:
        """Per bucket: samples taken, draws made, draws due in the epoch or first pass, cap, place."""
        passes = [bucket.state() for bucket in self._buckets]
        return {
            "positions": [begin for begin, *_ in passes],
            "counts": list(self._chairman.counts),
            "batches": list(self._due),
            "caps": [bucket.cap for bucket in self._buckets],
            "passes": passes,
        }

    def _counts(self) -> list[int]:
        return [bucket.count for bucket in self._buckets]

    def _weights(self) -> list[int]:
        if self._shares is None:
            return self._due
        everything = 1
        for held in self._tokens:
            everything *= held
        weights = [
            share * count * (everything // held)
            for share, count, held in zip(self._shares, self._due, self._tokens, strict=True)
        ]
        divisor = gcd(*weights)
        return [weight // divisor for weight in weights]


class QueueBatches:
    """A live queue fed from the corpus in order of its rows.

    An epoch is drained before the next one enters, so that each holds every sample once.

    Args:
        arrivals: The source.
        lengths: Tokens of every sample of the corpus, `[N]`.
        buckets: Bucket of every sample, `[N]`.
        queue: What waits to be drawn.
        supply: How fast the source delivers.
    """

    def __init__(
        self, arrivals: Arrivals, lengths: IntArray, buckets: IntArray, queue: ReadyQueue, supply: Supply
    ) -> None:
        self._arrivals, self._lengths, self._buckets = arrivals, lengths, buckets
        self._queue, self._supply = queue, supply

    def take(self) -> tuple[list[Draw], int]:
        """The next micro-batch and its tokens."""
        if self._arrivals.within_epoch or not len(self._queue):
            self._fill()
        batch = self._queue.draw()
        tokens = sum(int(self._lengths[draw.row]) for draw in batch)
        self._supply.elapse(tokens)
        return batch, tokens

    def state(self) -> StreamState:
        """How many have arrived, the source's lead, and the queue."""
        return {"position": self._arrivals.position, "credit": self._supply.credit, **self._queue.state()}

    def _fill(self) -> None:
        while self._queue.has_room:
            length = self._arrivals.peek()
            if self._queue.gate_open and not self._supply.delivers(length):
                return
            draw = self._arrivals.take()
            self._queue.arrive(draw, int(self._buckets[draw.row]), length)
            self._supply.spend(length)
            if not self._arrivals.within_epoch:
                self._queue.flush()
                return
        self._supply.block()


class BucketedSteps:
    """Takes a step's micro-batches off a stream, one after another."""

    def __init__(self, stream: BatchStream, slots: int) -> None:
        self._stream, self._slots = stream, slots

    def next_batches(self, limit: int | None) -> tuple[list[list[Draw]], int]:
        """The next step's micro-batches and their tokens; all are empty when nothing is left.

        Args:
            limit: Tokens after which the stream ends, counted from here; None for never.
        """
        batches: list[list[Draw]] = []
        total = 0
        for _ in range(self._slots):
            if limit is not None and total >= limit:
                batches.append([])
                continue
            batch, tokens = self._stream.take()
            batches.append(batch)
            total += tokens
        return batches, total

    def state(self) -> StreamState:
        """The stream's state."""
        return self._stream.state()
