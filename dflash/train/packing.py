"""Dealing a step's samples into its micro-batches: equal work for all ranks, hardly a token of room lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

_SCALE = 1 << 30
_RETRY_STEPS = 400


@dataclass(frozen=True)
class Packing:
    """How a step is divided."""

    slots: int
    """Micro-batches of a step."""
    budget: int
    """Most tokens that a micro-batch holds."""
    linear: float
    """Cost of a token by itself (projections, MLP)."""
    quadratic: float
    """Cost of a token for each token of its sample (attention)."""

    @property
    def capacity(self) -> int:
        """Most tokens that a step holds."""
        return self.slots * self.budget

    @cached_property
    def _rates(self) -> tuple[int, int]:
        return round(self.linear * _SCALE), round(self.quadratic * _SCALE)

    def work(self, length: int) -> int:
        """Cost of a sample as an integer: sums are the same in any order and on any platform."""
        linear, quadratic = self._rates
        return (linear + quadratic * length) * length

    def with_slots(self, slots: int) -> Packing:
        """The same for another number of micro-batches."""
        return replace(self, slots=slots)


def deal(lengths: Sequence[int], packing: Packing) -> list[list[int]] | None:
    """Deal samples into the slots: the costliest first, each to the cheapest slot with room (LPT).

    Args:
        lengths: Tokens of each sample.
        packing: Slots, their token budget, and the cost `linear * L + quadratic * L**2` of a sample.

    Returns:
        For each slot the ascending indices into `lengths`, or None when a sample finds no slot with room.
    """
    linear, quadratic = round(packing.linear * _SCALE), round(packing.quadratic * _SCALE)  # as `work`
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    dealt: list[list[int]] = [[] for _ in range(packing.slots)]
    heap = [(0, slot, packing.budget) for slot in range(packing.slots)]
    heapify(heap)
    for index in order:
        length = lengths[index]
        full = []
        while heap and heap[0][2] < length:
            full.append(heappop(heap))
        if not heap:
            return None
        cost, slot, room = heappop(heap)
        dealt[slot].append(index)
        heappush(heap, (cost + (linear + quadratic * length) * length, slot, room - length))
        for entry in full:  # a shorter sample may still fit there
            heappush(heap, entry)
    return [sorted(slot) for slot in dealt]


def deal_prefix(lengths: Sequence[int], packing: Packing) -> list[list[int]]:
    """Deal as many of the first samples as fit; the rest comes first in the next step.

    Every sample must fit into an empty slot. The result names a prefix of `lengths`, each index once.
    """
    count, total = 0, 0
    while count < len(lengths) and total + lengths[count] <= packing.capacity:
        total += lengths[count]
        count += 1
    limit = packing.capacity
    while (dealt := deal(lengths[:count], packing)) is None:
        # Give up room in small steps until the dealing succeeds: two or three tries are usual.
        limit -= -(-packing.capacity // _RETRY_STEPS)
        count -= 1
        total -= lengths[count]
        while total > limit and count > 1:
            count -= 1
            total -= lengths[count]
    return dealt
