"""Quotas over a cache that is still being written: whose turn it is never depends on what has arrived.

The schedule is WF2Q, as in any other run, counted from an origin that moves when the quotas change: weights
are then what is left of each bucket in this epoch, so that all run out together again. A bucket whose turn it
is but of which nothing has arrived ends the attempt (`Starved`); the caller waits and tries again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash.train.arrived import Arrived, FollowedPool, lower_edges
from dflash.train.batch_streams import QuotaBatches
from dflash.train.levels import choose_caps
from dflash.train.packing import Packing
from dflash.train.quota import EarliestDeadline

if TYPE_CHECKING:
    from dflash.train.pools import Draw
    from dflash.train.window import StreamState

Mix = Callable[[Sequence[int]], list[int]]
"""From the tokens that each bucket holds to weights, integers in proportion to the shares."""


class Starved(Exception):  # noqa: N818 - no error: the answer to an attempt
    """Nothing can be drawn before more has arrived.

    Args:
        why: For people.
        buckets: Those that are due and empty; none where it is not a matter of single buckets.
    """

    def __init__(self, why: str, buckets: Sequence[int] = ()) -> None:
        super().__init__(why)
        self.buckets = tuple(buckets)


class FollowedQuota(ABC):
    """Which bucket's item comes next; subclasses say what an item is.

    Args:
        arrived: What there is.
        mix: Shares that do not depend on what is left; None for the natural mix.
        state: What `state()` returned, to resume.
    """

    def __init__(self, arrived: Arrived, mix: Mix | None, state: StreamState | None) -> None:
        none = [0] * len(arrived.rows)
        fresh = {"positions": none, "given": none, "tokens": none, "weights": none, "targets": none}
        saved: StreamState = fresh | {"aside": [], "epoch": 0} | (state or {})
        self._arrived, self._mix = arrived, mix
        self._pools = [FollowedPool(arrived, b, position) for b, position in enumerate(saved["positions"])]
        self._given, self._tokens, self._weights = (
            list(saved[key]) for key in ("given", "tokens", "weights")
        )
        self._targets, self._aside, self._epoch = list(saved["targets"]), list(saved["aside"]), saved["epoch"]
        self._offer_all()

    def adjust(self, aside: Sequence[int]) -> None:
        """Take note of the buckets that are left out for now, and of whether the cache is complete."""
        targets = self._arrived.targets
        if targets != self._targets or list(aside) != self._aside:
            self._targets, self._aside = targets, list(aside)
            self._restart()

    def check_gate(self, window: int) -> None:
        """Go on only while the next `window` tokens can be drawn as they are due.

        Raises:
            Starved: less than that is ready, or a bucket that is due in it is empty.
        """
        if self._arrived.exhausted:
            return
        ready = self.ready_tokens
        if ready < window:
            raise Starved(f"{ready:,} tokens are ready, --min-ready is {window:,}")
        total, clock = sum(self._weights), sum(self._tokens)
        empty = [
            bucket
            for bucket in self._active
            if self._lengths[bucket] is None
            and (self._tokens[bucket] + self._least(bucket)) * total
            <= self._weights[bucket] * (clock + window)
        ]
        if empty:
            raise self._starved(empty)

    @property
    def ready_tokens(self) -> int:
        """Tokens that have arrived and are not drawn; of a bucket in a later pass, all that it holds."""
        pairs = zip(self._arrived.tokens, self._given, strict=True)
        return sum(here - given if given <= here else here for here, given in pairs)

    def state(self) -> StreamState:
        """Samples and tokens that each bucket has given, and the schedule since its origin."""
        return {
            "positions": self._positions(),
            "given": list(self._given),
            "tokens": list(self._tokens),
            "weights": list(self._weights),
            "targets": list(self._targets),
            "aside": list(self._aside),
            "epoch": self._epoch,
        }

    def _positions(self) -> list[int]:
        return [pool.position for pool in self._pools]

    @abstractmethod
    def _length(self, bucket: int) -> int | None:
        """Tokens of the bucket's next item, or None where it has not arrived."""

    @abstractmethod
    def _least(self, bucket: int) -> int:
        """Tokens that an item of this bucket has at least."""

    def _pick(self) -> int:
        if self._mix is None and sum(self._tokens) >= sum(self._weights):
            self._end_epoch()
        bucket = self._active[self._queue.pick(sum(self._tokens))] if self._active else -1
        if bucket < 0 or self._lengths[bucket] is None:
            raise self._starved([bucket] if bucket >= 0 else self._aside)
        return bucket

    def _give(self, bucket: int, tokens: int) -> None:
        self._given[bucket] += tokens
        self._tokens[bucket] += tokens
        self._offer(self._active.index(bucket), bucket)

    def _end_epoch(self) -> None:
        if self._aside:
            raise self._starved(self._aside)
        if self._arrived.digest is None:
            raise Starved("all that was planned is drawn, the extraction has yet to finish")
        self._restart()

    def _restart(self) -> None:
        if self._mix is not None:
            weights = self._mix(self._targets)
        else:
            due = [(self._epoch + 1) * target for target in self._targets]
            weights = [max(whole - given, 0) for whole, given in zip(due, self._given, strict=True)]
            if not any(weights):
                self._epoch, weights = self._epoch + 1, list(self._targets)
        self._weights = [0 if bucket in self._aside else weight for bucket, weight in enumerate(weights)]
        self._tokens = [0] * len(self._weights)
        self._offer_all()

    def _offer_all(self) -> None:
        self._active = [bucket for bucket, weight in enumerate(self._weights) if weight]
        self._queue = EarliestDeadline([self._weights[bucket] for bucket in self._active])
        self._lengths: list[int | None] = [None] * len(self._weights)
        for place, bucket in enumerate(self._active):
            self._offer(place, bucket)

    def _offer(self, place: int, bucket: int) -> None:
        # While the next item's length is unknown, the shortest possible gives the earliest possible deadline.
        self._lengths[bucket] = length = self._length(bucket)
        received = self._tokens[bucket]
        self._queue.offer(place, received, received + (length or self._least(bucket)))

    def _starved(self, buckets: Sequence[int]) -> Starved:
        edges = self._arrived.planned.edges
        names = ", ".join(str(edges[bucket]) for bucket in buckets)
        if len(buckets) == 1:
            return Starved(f"bucket {names} is due, but too little of it is committed", buckets)
        return Starved(f"buckets {names} are due, but too little of them is committed", buckets)


class FollowedSamples(FollowedQuota):
    """Mixed composition: an item is a sample."""

    def take(self) -> Draw:
        """The next sample.

        Raises:
            Starved: it has not arrived.
        """
        bucket = self._pick()
        pool = self._pools[bucket]
        length = pool.peek()
        draw = pool.take()
        self._give(bucket, length)
        return draw

    def _length(self, bucket: int) -> int | None:
        return self._pools[bucket].peek() if self._pools[bucket].ready() else None

    def _least(self, bucket: int) -> int:
        return lower_edges(self._arrived.planned.edges)[bucket] + 1


class FollowedBatches(FollowedQuota):
    """Bucketed composition: an item is a micro-batch of one bucket.

    In the natural mix, epochs behind the first are planned as in any other run.

    Args:
        arrived: What there is.
        mix: As in `FollowedQuota`.
        packing: How a step is divided.
        state: What `state()` returned, to resume.
    """

    def __init__(
        self, arrived: Arrived, mix: Mix | None, packing: Packing, state: StreamState | None
    ) -> None:
        self._packing, self._budget = packing, packing.budget
        self._open: list[tuple[list[Draw], int]] = [([], 0) for _ in arrived.rows]
        super().__init__(arrived, mix, state)
        later = (state or {}).get("later")
        self._later = None if later is None else self._ordinary(later["positions"], later)

    def take(self) -> tuple[list[Draw], int]:
        """The next micro-batch and its tokens.

        Raises:
            Starved: it has not arrived.
        """
        if self._later is None:
            bucket = self._pick()
        if self._later is not None:
            return self._later.take()
        draws, tokens = self._open[bucket]
        self._open[bucket] = ([], 0)
        self._give(bucket, tokens)
        return draws, tokens

    def state(self) -> StreamState:
        """As in `FollowedQuota`; behind the first epoch also that of the ordinary plan."""
        later = {} if self._later is None else {"later": self._later.state()}
        return super().state() | later

    def _positions(self) -> list[int]:
        return [pool.position - len(o[0]) for pool, o in zip(self._pools, self._open, strict=True)]

    def _end_epoch(self) -> None:
        super()._end_epoch()
        positions = [at for at, target in zip(self._positions(), self._targets, strict=True) if target]
        self._later = self._ordinary(positions, None)

    def _ordinary(self, positions: Sequence[int], state: StreamState | None) -> QuotaBatches:
        buckets = [bucket for bucket, target in enumerate(self._targets) if target]
        pools = [self._arrived.ordinary(b, at) for b, at in zip(buckets, positions, strict=True)]
        held = [self._targets[b] for b in buckets]
        # An ordinary run has chosen them at its beginning.
        caps = choose_caps([self._arrived.ordinary(b, 0) for b in buckets], held, self._packing)
        return QuotaBatches(pools, held, None, self._packing, state, caps)

    def _length(self, bucket: int) -> int | None:
        pool, (draws, tokens) = self._pools[bucket], self._open[bucket]
        epoch = draws[0].epoch if draws else None
        whole = False
        while pool.ready():
            if draws and (pool.epoch != epoch or tokens + pool.peek() > self._budget):
                whole = True
                break
            epoch = pool.epoch
            tokens += pool.peek()
            draws.append(pool.take())
        self._open[bucket] = (draws, tokens)
        return tokens if whole or (draws and self._arrived.finished(bucket)) else None

    def _least(self, bucket: int) -> int:
        # A sample that does not fit ends a micro-batch, or the end of the pass does.
        target = self._arrived.targets[bucket]
        left = target - self._given[bucket] % target if target else 1
        return max(1, min(self._budget - self._arrived.planned.edges[bucket] + 1, left))
