"""Whose turn it is: the earliest deadline among those whose turn has begun, in exact integers.

Bucket b is owed the share p_b = weight_b / sum(weights) of a resource. Its next item may be taken once the
clock reaches `start / p_b` and should be taken by `finish / p_b`. With two choices of start and finish this
one rule is two classical schedules:

- WF2Q (Bennett and Zhang, 1996): the clock counts tokens; start is what the bucket has received, finish is
  that plus the length of its next sample. After every sample, no bucket's tokens differ from p_b * clock by
  more than the longest sample.
- Tijdeman's chairman assignment (1980): the clock counts draws, in units of 1 / D of a draw where
  D = 2K - 2; start is n_b + 1/D, finish n_b + 1 - 1/D. After every draw |n_b - p_b * clock| <= 1 - 1/D.

Weights, clocks and items are Python integers and fractions are compared by cross-multiplication, so that the
bounds hold exactly and the order is the same on every platform.
"""

from __future__ import annotations

from collections.abc import Sequence


class EarliestDeadline:
    """Chooses among buckets with the given positive weights."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = list(weights)
        self._total = sum(self.weights)
        self._starts = [0] * len(self.weights)
        self._finishes = [0] * len(self.weights)

    def offer(self, bucket: int, start: int, finish: int) -> None:
        """Set the bucket's next item: its start and finish in the bucket's own resource."""
        # The clock is an integer, so `start / p_b <= clock` is the same as `ceil(start / p_b) <= clock`.
        self._starts[bucket] = -(-start * self._total // self.weights[bucket])
        self._finishes[bucket] = finish

    def pick(self, clock: int) -> int:
        """The bucket whose turn it is at `clock`; ties go to the lower bucket.

        At least one bucket is always due: what all have received sums to the clock, so not all can be ahead.
        """
        best, best_finish, best_weight = -1, 0, 1
        for bucket, start in enumerate(self._starts):
            if start > clock:
                continue
            finish, weight = self._finishes[bucket], self.weights[bucket]
            if best < 0 or finish * best_weight < best_finish * weight:
                best, best_finish, best_weight = bucket, finish, weight
        return best


class Chairman:
    """Tijdeman's sequence: which of K buckets each draw goes to.

    Args:
        weights: Positive integers; bucket b is owed the share weight_b / sum(weights) of the draws.
        counts: Draws that each bucket has already received, to resume.
    """

    def __init__(self, weights: Sequence[int], counts: Sequence[int] | None = None) -> None:
        self.counts = [0] * len(weights) if counts is None else list(counts)
        self.total = sum(weights)
        # With one bucket D would be 0; any D will do there, since every draw is its own.
        self._parts = max(2, 2 * len(weights) - 2)
        self._queue = EarliestDeadline(weights)
        self._drawn = sum(self.counts)
        for bucket in range(len(weights)):
            self._offer(bucket)

    def pick(self) -> int:
        """The bucket of the next draw, which is counted as made."""
        self._drawn += 1
        bucket = self._queue.pick(self._drawn * self._parts)
        self.counts[bucket] += 1
        self._offer(bucket)
        return bucket

    def _offer(self, bucket: int) -> None:
        received = self.counts[bucket] * self._parts
        self._queue.offer(bucket, received + 1, received + self._parts - 1)
