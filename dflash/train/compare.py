"""Settings of the sampler beside each other: what each would draw, from sample lengths alone.

`simulate` runs a sampler over a corpus and keeps what each micro-batch held; `MixFigures` are its figures.
Total variation is half the sum over buckets of |share - quota|, over so many micro-batches (draws) or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash.train.packing import Packing
from dflash.train.pools import IntArray
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, check_world
from dflash.world import World

FloatArray = npt.NDArray[np.float64]
WINDOW = 30


class Spread(NamedTuple):
    """Of a figure over all windows."""

    mean: float
    worst: float


@dataclass(frozen=True, eq=False)
class Trace:
    """What a sequence of steps held."""

    draws: npt.NDArray[np.int64]
    """Tokens by micro-batch and bucket, `[steps * slots, buckets]`."""
    costs: FloatArray
    """Work by step and rank, `[steps, ranks]`."""
    padded: int
    """Tokens if each micro-batch were padded to its longest sample."""
    capacity: int
    """Most tokens of a step."""

    @property
    def by_step(self) -> npt.NDArray[np.int64]:
        """Tokens by step and bucket, `[steps, buckets]`."""
        steps: npt.NDArray[np.int64] = self.draws.reshape(len(self.costs), -1, self.draws.shape[1]).sum(
            axis=1
        )
        return steps


@dataclass(frozen=True)
class MixFigures:
    """Figures of a trace; a total variation is None where the trace is shorter than its window."""

    steps: int
    draws: int
    tv30_draws: Spread | None
    tv90_draws: Spread | None
    tv30_steps: Spread | None
    tv1_step: Spread | None
    longest_run: int
    """Most draws in a row that held one and the same bucket and no other."""
    oldest_bucket: int
    """The bucket that once waited longest for its size."""
    oldest_age: int
    """Most draws in a row without it."""
    rank_cost: float
    """Work of the busiest rank over the mean, mean over steps."""
    fill: float
    """Tokens over what the steps could hold."""
    padding: float
    """Share of padding, if micro-batches were padded; they are not."""
    step_tokens: float
    """Mean tokens of a step."""
    step_tokens_spread: float
    """Their standard deviation."""
    roughness: float | None
    """Predicted standard deviation of the step-to-step change of the loss, if each bucket kept its loss."""

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON-ready value, a spread as `{"mean": ..., "worst": ...}`."""
        return {
            name: value._asdict() if isinstance(value, Spread) else value
            for name, value in vars(self).items()
        }


def simulate(corpus: Corpus, config: SamplerConfig, *, draws: int, ranks: int) -> tuple[Trace, FloatArray]:
    """The first `draws` micro-batches (rounded up to whole steps) and the quota, `[buckets]`.

    Raises:
        ConfigError: settings that do not suit the corpus, or a step that does not divide among the ranks.
    """
    check_world(config, World(0, ranks))
    sampler = Sampler(corpus, config)
    steps = islice(sampler, -(-draws // config.batches_per_step))
    rows = ([[draw.row for draw in batch] for batch in step.batches] for step in steps)
    return trace(rows, corpus, config.packing, ranks), np.array(sampler.quota)


def trace(steps: Iterable[Sequence[Sequence[int]]], corpus: Corpus, packing: Packing, ranks: int) -> Trace:
    """Trace any sequence of steps, each of `packing.slots` micro-batches, each of rows of the corpus.

    The ranks take the slots as in `dflash.train.sampler.batches_for`.
    """
    lengths = corpus.lengths.astype(np.int64)
    work = packing.linear * lengths + packing.quadratic * lengths.astype(np.float64) ** 2
    draws, costs, padded = [], [], 0
    for index, batches in enumerate(steps):
        rows = np.array([row for batch in batches for row in batch], np.int64)
        slots = np.repeat(np.arange(packing.slots), [len(batch) for batch in batches])
        draws.append(_tokens(slots, corpus.buckets[rows], lengths[rows], packing, len(corpus.bucket_edges)))
        costs.append(np.bincount((slots + index) % ranks, work[rows], ranks))
        padded += sum(len(batch) * int(lengths[list(batch)].max()) for batch in batches if len(batch))
    return Trace(np.concatenate(draws), np.array(costs), padded, packing.capacity)


def figures(trace: Trace, quota: FloatArray, losses: Sequence[float] | None = None) -> MixFigures:
    """The figures of a trace.

    Args:
        trace: What was drawn.
        quota: Share of the tokens that each bucket is owed, `[buckets]`.
        losses: Mean loss of each bucket, `[buckets]`, for the roughness.
    """
    draws, steps = trace.draws, trace.by_step
    totals = steps.sum(axis=1)
    oldest, age = _oldest(draws, quota)
    predicted = None if losses is None else roughness(steps / totals[:, None] @ np.asarray(losses))
    return MixFigures(
        steps=len(steps),
        draws=int((draws.sum(axis=1) > 0).sum()),
        tv30_draws=_spread(draws, quota, WINDOW),
        tv90_draws=_spread(draws, quota, 3 * WINDOW),
        tv30_steps=_spread(steps, quota, WINDOW),
        tv1_step=_spread(steps, quota, 1),
        longest_run=_longest_run(draws),
        oldest_bucket=oldest,
        oldest_age=age,
        rank_cost=float((trace.costs.max(axis=1) / trace.costs.mean(axis=1)).mean()),
        fill=float(totals.mean() / trace.capacity),
        padding=1 - int(totals.sum()) / trace.padded,
        step_tokens=float(totals.mean()),
        step_tokens_spread=float(totals.std()),
        roughness=predicted,
    )


def window_shares(draws: IntArray, window: int) -> FloatArray:
    """Each bucket's share of the tokens in all `window` consecutive rows, `[rows - window + 1, buckets]`."""
    sums = np.cumsum(np.vstack([np.zeros_like(draws[:1]), draws]), axis=0)
    inside = sums[window:] - sums[:-window]
    shares: FloatArray = inside / inside.sum(axis=1, keepdims=True)
    return shares


def roughness(losses: Sequence[float] | FloatArray) -> float | None:
    """Standard deviation of the change from one step to the next; None for fewer than three steps."""
    return float(np.std(np.diff(losses))) if len(losses) > 2 else None


def _tokens(
    slots: IntArray, buckets: IntArray, lengths: IntArray, packing: Packing, count: int
) -> npt.NDArray[np.int64]:
    cells = np.bincount(slots * count + buckets, lengths, packing.slots * count)
    return cells.reshape(packing.slots, count).astype(np.int64)  # floats are exact up to 2**53


def _spread(draws: IntArray, quota: FloatArray, window: int) -> Spread | None:
    if len(draws) < window:
        return None
    variation = np.abs(window_shares(draws, window) - quota).sum(axis=1) / 2
    return Spread(float(variation.mean()), float(variation.max()))


def _longest_run(draws: IntArray) -> int:
    # A draw of several buckets belongs to no run.
    present = draws > 0
    bucket = np.where(present.sum(axis=1) == 1, present.argmax(axis=1), -1)
    ends = np.flatnonzero(np.diff(bucket, append=-2))
    runs = np.diff(ends, prepend=-1)
    return int(runs[bucket[ends] >= 0].max(initial=0))


def _oldest(draws: IntArray, quota: FloatArray) -> tuple[int, int]:
    """The bucket with the largest wait * quota, and its wait."""
    ages = []
    for bucket in range(len(quota)):
        drawn = np.flatnonzero(draws[:, bucket])
        ages.append(int(np.diff(drawn, prepend=-1, append=len(draws)).max()) - 1)
    oldest = int(np.argmax(np.array(ages) * quota))
    return oldest, ages[oldest]
