"""Micro-batches of one bucket with equal work, so that no rank of a step waits for another.

A pass over a bucket is first cut in order: each micro-batch takes the next samples while they fit a limit.
That fixes how many there are, whatever happens next. Runs of `BLOCK` of them, a block, are then divided anew:
dealt by cost, or the longest in groups of few beside the shortest in groups of more, whichever is more even;
what remains uneven is levelled by exchanging samples. Where nothing else fits the budget, the cut stands.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from dflash.train.packing import Packing, deal
from dflash.train.permutation import Permutation, derive_key
from dflash.train.pools import BucketPool, Draw

BLOCK = 32
"""Micro-batches that are dealt together."""
_CLOSE = 250  # a gap of 1 / 250 of the work is even enough
_ROUNDS = 2  # exchanges for each group
Groups = list[list[int]]
Member = tuple[int, int]
"""Work and index of a sample."""


class EvenBatches:
    """The micro-batches of one bucket, pass after pass.

    Args:
        pool: The bucket's samples; its position is that of a block's beginning.
        packing: The budget, and what a sample costs.
        cap: Tokens that a micro-batch of the cut may hold, at most the budget.
        saved: What `state()` returned, to resume.
    """

    def __init__(
        self, pool: BucketPool, packing: Packing, cap: int, saved: Sequence[int] | None = None
    ) -> None:
        self._pool, self._packing, self.cap = pool, packing, cap
        self._waiting: list[tuple[list[Draw], int]] = []
        if saved is None:
            self.plan()
        else:
            _, self.count, self._limit, self._block, self._taken = saved
        self._begin = pool.position

    def plan(self) -> None:
        """Begin a pass."""
        self.count, self._limit = self._pool.plan_pass(self.cap)
        self._block = self._taken = 0

    def take(self) -> tuple[list[Draw], int]:
        """The next micro-batch and its tokens; a pass that is used up is followed by the next."""
        if not self._waiting:
            if self._block == self._blocks and not self._taken:
                self.plan()
            self._load()
        self._taken += 1
        batch = self._waiting.pop()
        if not self._waiting:
            self._block, self._taken = self._block + 1, 0
            self._begin = self._pool.position
        return batch

    def state(self) -> list[int]:
        """Samples before the current block, micro-batches of the pass and their limit, block, drawn of it."""
        return [self._begin, self.count, self._limit, self._block, self._taken]

    @property
    def _blocks(self) -> int:
        return -(-self.count // BLOCK)

    def _load(self) -> None:
        begin, blocks = self._pool.position, self._blocks
        size = (self._block + 1) * self.count // blocks - self._block * self.count // blocks
        cut, lengths = list[list[Draw]](), list[int]()
        for _ in range(size):
            draws, tokens = self._pool.take_batch(self._limit)
            cut.append(draws)
            lengths += tokens
        samples = [draw for draws in cut for draw in draws]
        groups = even_groups(lengths, [len(draws) for draws in cut], self._packing)
        order = Permutation(size, derive_key("block", *self._pool.key, begin))
        self._waiting = []
        for place in range(size):
            group = groups[order[place]]
            self._waiting.append(([samples[index] for index in group], sum(lengths[i] for i in group)))
        del self._waiting[size - self._taken :]


def even_groups(lengths: Sequence[int], cut: Sequence[int], packing: Packing) -> Groups:
    """Divide a block's samples so that the groups' work is as equal as simple means make it.

    Args:
        lengths: Tokens of each sample, in order.
        cut: How many of them each group holds when they are taken in order; that fits the budget.
        packing: The budget and the cost of a sample.

    Returns:
        For each group the ascending indices into `lengths`; no group exceeds the budget.
    """
    work = [packing.work(length) for length in lengths]
    ends = [0]
    for size in cut:
        ends.append(ends[-1] + size)
    options: list[Groups | None] = [[list(range(begin, end)) for begin, end in pairwise(ends)]]
    if len(cut) > 1:
        options += [_split(lengths, len(cut), packing.budget), deal(lengths, packing.with_slots(len(cut)))]
    found = [groups for groups in options if groups]
    best = min(found, key=lambda groups: max(sum(work[index] for index in group) for group in groups))
    return _level(best, lengths, work, packing.budget)


def _split(lengths: Sequence[int], count: int, budget: int) -> Groups | None:
    """The longest in groups of k, the shortest in groups of k + 1, to and fro; None if one is too full."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    smaller, more = divmod(len(lengths), count)
    few = count - more
    groups: Groups = [[] for _ in range(count)]
    for members, first, width in ((order[: few * smaller], 0, few), (order[few * smaller :], few, more)):
        for place, index in enumerate(members):
            row, column = divmod(place, width)
            groups[first + (column if row % 2 == 0 else width - 1 - column)].append(index)
    fits = all(sum(lengths[index] for index in group) <= budget for group in groups)
    return groups if fits else None


def _level(groups: Groups, lengths: Sequence[int], work: Sequence[int], budget: int) -> Groups:
    """Exchange samples, or hand one over, between the group with most work and the one with least."""
    members = [sorted((work[index], index) for index in group) for group in groups]
    sums = [sum(cost for cost, _ in group) for group in members]
    rooms = [budget - sum(lengths[index] for index in group) for group in groups]
    for _ in range(_ROUNDS * len(groups)):
        most, least = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[most] - sums[least]
        if gap * _CLOSE <= sums[most]:
            break
        found = _exchange(members[most], members[least], gap, rooms[least], lengths)
        if found is None:
            break
        for moved, source, target in ((found[0], most, least), (found[1], least, most)):
            if moved is not None:
                members[source].remove(moved)
                insort(members[target], moved)
                sums[source], sums[target] = sums[source] - moved[0], sums[target] + moved[0]
                rooms[source] += lengths[moved[1]]
                rooms[target] -= lengths[moved[1]]
    return [sorted(index for _, index in group) for group in members]


def _exchange(
    most: Sequence[Member], least: Sequence[Member], gap: int, room: int, lengths: Sequence[int]
) -> tuple[Member, Member | None] | None:
    """What to move from `most` to `least`, and back, so that the gap between them is about halved."""
    best: tuple[Member, Member | None] | None = None
    best_left = gap
    for down in most:
        at = bisect_left(least, (down[0] - gap // 2, -1))
        partners: list[Member | None] = [None, *least[max(at - 1, 0) : at + 1]]
        for up in partners:
            moved = down[0] - (up[0] if up else 0)
            needed = lengths[down[1]] - (lengths[up[1]] if up else 0)
            left = abs(gap - 2 * moved)
            if left < best_left and needed <= room:
                best, best_left = (down, up), left
    return best
