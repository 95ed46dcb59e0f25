"""How full the micro-batches of each bucket should be, so that all of them cost about the same.

At equal tokens a micro-batch of long samples costs more than one of short samples, and one that holds four
samples cannot be filled as exactly as one that holds fifty. So each bucket gets a cap of its own: some are
tried on the first samples of its first pass, and those are taken which keep the busiest micro-batch of a
step close to the mean without wasting room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash.train.evening import BLOCK, even_groups
from dflash.train.packing import Packing
from dflash.train.pools import BucketPool, even_limit

_TRIED = 1024  # samples of a bucket
_EVENNESS = 10  # one per cent of the work of a step's busiest rank weighs as much as ten of the room
_PARTS, _LEAST = 32, 22  # caps of 22/32 to 32/32 of the budget


class Trial(NamedTuple):
    """What a cap does to a bucket."""

    cap: int
    work: list[int]
    """Of each micro-batch."""
    tokens: int
    """Of all of them."""

    @property
    def mean(self) -> int:
        """Mean work of a micro-batch."""
        return sum(self.work) // len(self.work)


def choose_caps(pools: Sequence[BucketPool], shares: Sequence[int], packing: Packing) -> list[int]:
    """Tokens that a micro-batch of each bucket may hold, `[buckets]`, at most the budget.

    Args:
        pools: The buckets, each at its beginning.
        shares: Share of the tokens that each is owed, as positive integers.
        packing: The budget, the micro-batches of a step, and the cost of a sample.
    """
    if len(pools) == 1 or packing.slots == 1:
        return [packing.budget] * len(pools)
    trials = [_trials(pool, packing) for pool in pools]
    best: tuple[float, list[int]] | None = None
    for level in sorted({trial.mean for rows in trials for trial in rows}):
        chosen = [min(rows, key=lambda trial: abs(trial.mean - level)) for rows in trials]
        excess, tokens = _expect(chosen, shares, packing.slots)
        value = tokens / packing.budget - _EVENNESS * excess
        if best is None or value >= best[0]:  # of equals the fuller
            best = value, [trial.cap for trial in chosen]
    assert best is not None  # every bucket has a trial
    return best[1]


def _trials(pool: BucketPool, packing: Packing) -> list[Trial]:
    lengths = pool.pass_lengths(_TRIED)
    longest = pool.longest
    trials: dict[int, Trial] = {}
    for part in range(_LEAST, _PARTS + 1):
        cap = max(packing.budget * part // _PARTS, longest)
        count, limit = even_limit(lengths, cap)
        if count not in trials or part == _PARTS:
            trials[count] = Trial(cap, _work(lengths.tolist(), limit, packing), int(lengths.sum()))
    return list(trials.values())


def _work(lengths: list[int], limit: int, packing: Packing) -> list[int]:
    """Work of the micro-batches that these samples fill, dealt in blocks as `EvenBatches` does."""
    cut, room = list[int](), 0
    for length in lengths:
        if length > room:
            cut.append(0)
            room = limit
        cut[-1] += 1
        room -= length
    blocks, begin, work = -(-len(cut) // BLOCK), 0, list[int]()
    for block in range(blocks):
        sizes = cut[block * len(cut) // blocks : (block + 1) * len(cut) // blocks]
        part = lengths[begin : begin + sum(sizes)]
        begin += sum(sizes)
        groups = even_groups(part, sizes, packing)
        work += [sum(packing.work(part[index]) for index in group) for group in groups]
    return work


def _expect(chosen: Sequence[Trial], shares: Sequence[int], slots: int) -> tuple[float, float]:
    """Expected work of the busiest of `slots` random micro-batches over the mean, and mean tokens.

    Only additions, multiplications and divisions in a fixed order, so that every platform finds the same.
    """
    # a bucket is drawn from in proportion to share / tokens of a micro-batch: so much for each of its trial's
    weights = np.concatenate(
        [np.full(len(trial.work), share / trial.tokens) for trial, share in zip(chosen, shares, strict=True)]
    )
    work = np.concatenate([np.array(trial.work, np.float64) for trial in chosen])
    order = np.argsort(work, kind="stable")
    below = np.cumsum(weights[order])  # in order, unlike `sum`
    until = np.ones(len(below))
    for _ in range(slots):
        until *= below / below[-1]
    busiest = np.cumsum(work[order] * np.diff(until, prepend=0.0))[-1]
    mean = np.cumsum(work[order] * weights[order])[-1] / below[-1]
    return float(busiest / mean), float(sum(shares) / below[-1])
