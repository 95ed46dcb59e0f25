"""How many tokens to draft: as many as pay, by what cycles have cost and kept so far.

With n drafts a cycle adds `1 + a_1 + a_1 a_2 + ... + a_1..a_n` tokens, a_k being how often draft k is right
where those before it were. The n with the most tokens a second is taken; 0 means that drafting pauses. A
paused drafter gets a chance again after a number of plain cycles that doubles each time it does not pay.

What was drafted never depends on what is about to be drafted, so output keeps its distribution.
"""

from __future__ import annotations

from collections import deque
from statistics import median

REMEMBERED = 9
"""Cycles of each size whose median says what that size costs."""
FADING = 0.95
"""Weight of what is known of acceptance, for each cycle that comes after it."""
FIRST_PAUSE = 8
"""Plain cycles before a paused drafter is tried again."""
LONGEST_PAUSE = 64
STALE = 0.25
"""Weight of what was known of acceptance before a pause: the text has moved on."""
PLAIN_EVERY = 64
"""Cycles with drafts between two without: what those cost changes too, with the length of the context."""


class Pace:
    """Decides, and learns from each cycle. One may serve many prompts: costs stay what they are.

    Args:
        slots: Drafts of a full block, B - 1.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seconds: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(slots + 1)]
        self._right = [1.0] * slots
        self._tried = [2.0] * slots
        self._since_plain = 0
        self._pause, self._left = FIRST_PAUSE, 0

    def choose(self) -> int:
        """Drafts of the next cycle, 0 to B - 1."""
        if not self._seconds[self._slots]:
            return self._slots
        if not self._seconds[0] or self._since_plain >= PLAIN_EVERY:
            return 0
        if self._left > 0:
            return 0
        rates = self.rates()
        best = max(range(len(rates)), key=rates.__getitem__)
        if best > 0:
            self._pause = FIRST_PAUSE
            return best
        # Drafting does not pay: once more what would pay best, then a pause.
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._right = [STALE * right for right in self._right]
        self._tried = [STALE * tried for tried in self._tried]
        return max(range(1, len(rates)), key=rates.__getitem__)

    def record(self, drafted: int, kept: int, seconds: float) -> None:
        """Learn from a cycle.

        Args:
            drafted: Drafts that were verified.
            kept: Those that were right, one after another from the first.
            seconds: Wall time of the cycle.
        """
        self._seconds[drafted].append(seconds)
        self._since_plain = self._since_plain + 1 if drafted else 0
        if not drafted:
            self._left = max(self._left - 1, 0)
        elif self._left and (kept + 1) * median(self._seconds[0]) > seconds:
            self._left, self._pause = 0, FIRST_PAUSE  # the trial paid: another one right away
        for slot in range(min(kept + 1, drafted)):  # nothing is known of drafts behind a wrong one
            self._right[slot] = FADING * self._right[slot] + (slot < kept)
            self._tried[slot] = FADING * self._tried[slot] + 1

    def rates(self) -> list[float]:
        """Expected tokens a second of cycles with 0 .. B-1 drafts, once none and a full block were tried."""
        added, chance, expected = 1.0, 1.0, [1.0]
        for right, tried in zip(self._right, self._tried, strict=True):
            chance *= right / tried
            added += chance
            expected.append(added)
        return [tokens / cost for tokens, cost in zip(expected, self._costs(), strict=True)]

    def _costs(self) -> list[float]:
        """Seconds of a cycle by its drafts; sizes never used lie on the line between their neighbours."""
        known = {n: median(seconds) for n, seconds in enumerate(self._seconds) if seconds}
        costs = []
        for n in range(self._slots + 1):
            low = max(m for m in known if m <= n)
            high = min(m for m in known if m >= n)
            # Too low where a first draft costs the most: then this size is tried, and known from there on.
            share = (n - low) / (high - low) if high > low else 0.0
            costs.append(known[low] + share * (known[high] - known[low]))
        return costs
