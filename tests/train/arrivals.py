"""A cache that arrives by and by, without a disk: what a sampler that follows it sees, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash.cache.planned import Planned
from dflash.train.arrived import Source
from dflash.train.follow_log import Decision
from dflash.train.followed import Starved
from dflash.train.following import FollowSampler
from dflash.train.sampler import Corpus, SamplerConfig, Step

IDENTITY = "identity"


class ByAndBy:
    """Decides as a follower does: waits for parts of the corpus until the step can be planned.

    Args:
        corpus: The finished cache; its rows are sorted by id, and ids are rows times 10.
        parts: Rows in the order of their arrival.
        ahead: Parts that arrive before each step without being waited for.
        recorded: Decisions of an earlier run, which are repeated.
    """

    def __init__(
        self, corpus: Corpus, parts: list[list[int]], ahead: int = 0, recorded: list[Decision] | None = None
    ) -> None:
        self.corpus, self.parts, self.ahead = corpus, parts, ahead
        self.recorded = list(recorded or [])
        self.waits: list[tuple[int, tuple[int, ...]]] = []
        self._shown = 0

    def history(self, steps: int) -> list[Decision]:
        return self.recorded[:steps]

    def rows(self, parts: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = np.concatenate([np.sort(self.parts[int(name)]) for names in parts for name in names])
        self._shown += sum(map(len, parts))
        return rows.astype(np.uint64) * 10, self.corpus.buckets[rows], self.corpus.lengths[rows]

    def decide(self, attempts: Any) -> Decision:
        if attempts.index < len(self.recorded):
            known = self.recorded[attempts.index]
            attempts.arrive(known.parts, known.digest)
            assert attempts.attempt(known.aside, gated=False) == known.chunks
            return known
        found = Decision(attempts.index)
        for _ in range(self.ahead):
            self._arrive(attempts, found)
        while True:
            try:
                found.chunks = attempts.attempt(found.aside, gated=True)
            except Starved as starved:
                self.waits.append((attempts.index, starved.buckets))
                self._arrive(attempts, found)
                continue
            self.recorded.append(found)
            return found

    def _arrive(self, attempts: Any, found: Decision) -> None:
        if found.digest is not None:
            assert self.ahead, "starved though everything is there"
            return
        new = [[str(self._shown)]] if self._shown < len(self.parts) else []
        if not new:
            found.digest = self.corpus.digest
        found.parts += new
        attempts.arrive(new, found.digest)


def planned_of(corpus: Corpus) -> Planned:
    """The plan that extraction would have left."""
    samples = tuple(len(rows) for rows in corpus.rows_by_bucket)
    tokens = tuple(corpus.tokens_by_bucket)
    return Planned(corpus.bucket_edges, samples, tokens, int(corpus.lengths.max()))


def follow(
    decider: ByAndBy,
    config: SamplerConfig,
    planned: Planned | None = None,
    holdout: float = 0.0,
    **options: Any,
) -> FollowSampler:
    """The sampler of a run that follows these arrivals."""
    source = Source(planned or planned_of(decider.corpus), IDENTITY, holdout)
    return FollowSampler(decider, source, config, **options)


def ids_of(sampler: FollowSampler, steps: list[Step]) -> list[list[list[tuple[int, int]]]]:
    """Row in the finished cache and epoch of every draw, by step and micro-batch."""
    rows = (sampler._arrived.ids // np.uint64(10)).tolist()
    return [[[(rows[draw.row], draw.epoch) for draw in batch] for batch in step.batches] for step in steps]


def flat(drawn: list[list[list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """All draws in their order."""
    return [draw for step in drawn for batch in step for draw in batch]
