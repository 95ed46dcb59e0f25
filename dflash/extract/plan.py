"""What extraction still has to run: batches under a token budget, in units that are committed whole.

1. Samples are sorted by length, longest first, so that trouble with memory shows in the first minute, and cut
   into batches of neighbours: near-equal lengths need little padding. A batch never mixes buckets.
2. Batches whose samples are committed are left out. Batches depend on the corpus alone, so a resumed run, on
   any number of ranks, computes the same ones as an undisturbed run, and with them the same numbers.
3. Neighbouring batches of one bucket make a unit of about one shard. A rank that is free takes the next unit,
   so the longest are taken first and the shortest even out the end. The order `mixed` takes units of all
   buckets in turn instead, each as often as it is owed, for training that follows the cache.

Pure numpy: a plan of ten million samples takes seconds and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_UNIT_SAMPLES = 1 << 19
"""Keeps a unit within one index fragment."""
# In a small corpus the budget alone would put all lengths of a bucket into one batch. One large enough
# to keep the device busy, a sixteenth of the budget, ends before more than this share of it is padding.
_MOST_PADDING = 0.018
_EVEN_AFTER = 16
_UNITS_PER_RANK = 16
"""At least, where there is that much work: at the end no rank waits for more than a sixteenth of a share."""


@dataclass(frozen=True)
class Unit:
    """Batches that are committed together."""

    batches: tuple[np.ndarray, ...]
    """Each int64 rows of the corpus, longest sample first."""
    tokens: int
    padded_tokens: int
    """What is computed: samples of a batch count as long as its longest."""


def batches_of(lengths: np.ndarray, ids: np.ndarray, edges: Sequence[int], budget: int) -> list[np.ndarray]:
    """All batches of a corpus.

    Args:
        lengths: int [N], tokens of each sample; none above the last edge.
        ids: uint64 [N]; decide the order among equal lengths, so that the order of the data does not.
        edges: Ascending bucket edges.
        budget: Most tokens of a batch, padding included; a longer sample is a batch of its own.

    Returns:
        int64 arrays of rows, longest first; every row is in exactly one.
    """
    order = np.lexsort((ids, -lengths.astype(np.int64)))
    sorted_lengths = lengths[order].tolist()
    buckets = np.searchsorted(np.asarray(edges), lengths[order]).tolist()
    starts: list[int] = []
    longest, tokens, bucket = 0, 0, -1
    for place, length in enumerate(sorted_lengths):
        padded = (place - starts[-1] + 1) * longest if starts else 0
        uneven = tokens * _EVEN_AFTER >= budget and tokens + length < (1 - _MOST_PADDING) * padded
        if buckets[place] != bucket or padded > budget or uneven:
            starts.append(place)
            longest, tokens, bucket = length, 0, buckets[place]
        tokens += length
    return np.split(order, starts[1:]) if starts else []


def units_of(
    batches: Sequence[np.ndarray], lengths: np.ndarray, edges: Sequence[int], limit: int
) -> list[Unit]:
    """Group neighbouring batches of one bucket.

    Args:
        batches: As `batches_of` gives them, any of them left out.
        lengths: int [N].
        edges: Ascending bucket edges.
        limit: Tokens of a unit; it ends with the batch that reaches them.
    """
    units: list[Unit] = []
    current: list[np.ndarray] = []
    tokens = samples = 0
    for number, batch in enumerate(batches):
        current.append(batch)
        tokens, samples = tokens + int(lengths[batch].sum()), samples + len(batch)
        following = batches[number + 1] if number + 1 < len(batches) else None
        if (
            following is None
            or tokens >= limit
            or samples + len(following) > MAX_UNIT_SAMPLES
            or _bucket(following, lengths, edges) != _bucket(batch, lengths, edges)
        ):
            padded = sum(len(part) * int(lengths[part].max()) for part in current)
            units.append(Unit(tuple(current), tokens, padded))
            current, tokens, samples = [], 0, 0
    return units


def remaining(batches: Sequence[np.ndarray], ids: np.ndarray, committed: np.ndarray) -> list[np.ndarray]:
    """Batches without the samples that are committed.

    Args:
        batches: int64 rows each.
        ids: uint64 [N], ids of the rows.
        committed: uint64 [M].
    """
    missing = ~np.isin(ids, committed)
    left = [batch[missing[batch]] for batch in batches]
    return [batch for batch in left if len(batch)]


def plan_units(
    batches: Sequence[np.ndarray], lengths: np.ndarray, edges: Sequence[int], limit: int, ranks: int
) -> list[Unit]:
    """Units for this many ranks: of about `limit` tokens, smaller where some rank would not get several."""
    if ranks > 1:
        total = sum(int(lengths[batch].sum()) for batch in batches)
        limit = max(min(limit, total // (_UNITS_PER_RANK * ranks)), 1)
    return units_of(batches, lengths, edges, limit)


def mixed_order(units: Sequence[Unit], lengths: np.ndarray, edges: Sequence[int]) -> list[Unit]:
    """Units in an order of which every stretch holds about the mix of the whole; the longest stays first.

    Args:
        units: Longest first, as `plan_units` gives them.
        lengths: int [N].
        edges: Ascending bucket edges.

    Returns:
        The same units. Those of one bucket come in a fixed random order, so that no stretch has its longest.
    """
    of_bucket: dict[int, list[Unit]] = {}
    for unit in units[1:]:
        of_bucket.setdefault(_bucket(unit.batches[0], lengths, edges), []).append(unit)
    due: list[tuple[float, int, Unit]] = []
    for bucket, members in of_bucket.items():
        total, given = sum(unit.tokens for unit in members), 0
        for place in np.random.default_rng(len(members)).permutation(len(members)).tolist():
            unit = members[place]
            due.append(((given + unit.tokens / 2) / total, -bucket, unit))
            given += unit.tokens
    return [*units[:1], *(unit for _, _, unit in sorted(due, key=lambda entry: entry[:2]))]


def pad_share(units: Sequence[Unit]) -> float:
    """Share of the computed tokens that is padding."""
    padded = sum(unit.padded_tokens for unit in units)
    return 1 - sum(unit.tokens for unit in units) / padded if padded else 0.0


def _bucket(batch: np.ndarray, lengths: np.ndarray, edges: Sequence[int]) -> int:
    return int(np.searchsorted(np.asarray(edges), lengths[batch[0]]))
