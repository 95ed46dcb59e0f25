"""Mixed composition: one endless sequence of samples, and the steps that are cut from it.

A stream decides the order (`QuotaStream`, `ShuffleStream`, `ArrivalStream`); `MixedSteps` takes a prefix of
what is left of it and deals that into the step's micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dflash.train.packing import Packing, deal_prefix
from dflash.train.permutation import keyed_below
from dflash.train.pools import Arrivals, BucketPool, Draw, IntArray
from dflash.train.quota import EarliestDeadline
from dflash.train.window import StreamState, Supply, WindowShape


class SampleStream(Protocol):
    """An endless sequence of samples whose position can be saved."""

    def take(self) -> Draw:
        """The next sample."""

    def state(self) -> StreamState:
        """What `take` will need to go on from here."""


class QuotaStream:
    """Buckets interleaved by tokens (WF2Q): no bucket is ever further from its quota than the longest sample.

    Args:
        pools: The buckets that are drawn from.
        weights: Their shares of the tokens, as positive integers.
        tokens: Tokens that each has already given, to resume.
    """

    def __init__(
        self, pools: Sequence[BucketPool], weights: Sequence[int], tokens: Sequence[int] | None
    ) -> None:
        self._pools = pools
        self._tokens = [0] * len(pools) if tokens is None else list(tokens)
        self._clock = sum(self._tokens)
        self._queue = EarliestDeadline(weights)
        for bucket in range(len(pools)):
            self._offer(bucket)

    def take(self) -> Draw:
        """The next sample."""
        bucket = self._queue.pick(self._clock)
        pool = self._pools[bucket]
        length = pool.peek()
        self._clock += length
        self._tokens[bucket] += length
        draw = pool.take()
        self._offer(bucket)
        return draw

    def state(self) -> StreamState:
        """Samples and tokens that each bucket has given."""
        return {"positions": [pool.position for pool in self._pools], "tokens": list(self._tokens)}

    def _offer(self, bucket: int) -> None:
        # In the natural mix a bucket's first sample of the next epoch starts exactly when every bucket has
        # used up this one: epochs follow each other without a rule of their own.
        received = self._tokens[bucket]
        self._queue.offer(bucket, received, received + self._pools[bucket].peek())


class ArrivalStream:
    """Samples in order of arrival."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def take(self) -> Draw:
        """The next sample."""
        return self._arrivals.take()

    def state(self) -> StreamState:
        """How many have arrived."""
        return {"position": self._arrivals.position}


class ShuffleStream:
    """Samples drawn uniformly from a window that is filled in order of arrival, up to a number of tokens.

    The window runs empty at the end of an epoch before the next epoch enters it, so that an epoch holds each
    sample once.

    Args:
        arrivals: The source.
        lengths: Tokens of every sample of the corpus, `[N]`.
        shape: The window's limits.
        key: Decides which sample is drawn.
        state: What `state()` returned, to resume.
    """

    def __init__(
        self, arrivals: Arrivals, lengths: IntArray, shape: WindowShape, key: bytes, state: StreamState | None
    ) -> None:
        saved: StreamState = {"drawn": 0, "window": [], "credit": 0} | (state or {})
        self._arrivals, self._lengths, self._shape, self._key = arrivals, lengths, shape, key
        self._drawn: int = saved["drawn"]
        self._window = [Draw(*entry) for entry in saved["window"]]
        self._held = sum(int(lengths[draw.row]) for draw in self._window)
        self._supply = Supply(shape.supply, saved["credit"])

    def take(self) -> Draw:
        """The next sample."""
        if self._arrivals.within_epoch or not self._window:
            self._fill()
        chosen = keyed_below(self._key, self._drawn, len(self._window))
        self._drawn += 1
        # The last entry takes the place of the drawn one; order inside the window means nothing.
        self._window[chosen], self._window[-1] = self._window[-1], self._window[chosen]
        draw = self._window.pop()
        length = int(self._lengths[draw.row])
        self._held -= length
        self._supply.elapse(length)
        return draw

    def state(self) -> StreamState:
        """How many have arrived and been drawn, the source's lead, and what the window holds."""
        return {
            "position": self._arrivals.position,
            "drawn": self._drawn,
            "credit": self._supply.credit,
            "window": [list(draw) for draw in self._window],
        }

    def _fill(self) -> None:
        gate, capacity = (
            self._shape.min_ready * self._shape.budget,
            self._shape.max_ready * self._shape.budget,
        )
        while self._held + (length := self._arrivals.peek()) <= capacity:
            if self._held >= gate and not self._supply.delivers(length):
                return
            self._window.append(self._arrivals.take())
            self._held += length
            self._supply.spend(length)
            if not self._arrivals.within_epoch:
                return
        self._supply.block()


class MixedSteps:
    """Cuts a stream of samples into steps.

    Args:
        stream: The order of the samples.
        lengths: Tokens of every sample of the corpus, `[N]`.
        packing: How a step is divided.
        pending: Samples that were taken from the stream but are not yet part of a step, to resume.
    """

    def __init__(
        self, stream: SampleStream, lengths: IntArray, packing: Packing, pending: Sequence[Sequence[int]]
    ) -> None:
        self._stream, self._lengths, self._packing = stream, lengths, packing
        self._pending = [Draw(*entry) for entry in pending]

    def next_batches(self, limit: int | None) -> tuple[list[list[Draw]], int]:
        """The next step's micro-batches and their tokens; all are empty when nothing is left.

        Args:
            limit: Tokens after which the stream ends, counted from here; None for never.
        """
        pending, capacity = self._pending, self._packing.capacity
        lengths = [int(self._lengths[draw.row]) for draw in pending]
        total = sum(lengths)
        wanted = capacity if limit is None else min(capacity, limit - 1)
        while total <= wanted:
            draw = self._stream.take()
            pending.append(draw)
            lengths.append(int(self._lengths[draw.row]))
            total += lengths[-1]
        dealt = deal_prefix(lengths, self._packing)
        batches = [[pending[index] for index in slot] for slot in dealt]
        used = sum(map(len, batches))
        self._pending = pending[used:]
        return batches, sum(lengths[:used])

    def state(self) -> StreamState:
        """The stream's state, and the few samples that were taken from it and put back."""
        return {**self._stream.state(), "pending": [list(draw) for draw in self._pending]}
