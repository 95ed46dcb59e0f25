"""The serving walk over held-out samples, in the middle of a run: what a server would see of the drafter now.

1. Held-out samples are divided into forward passes by their lengths alone, so every rank knows them all.
2. Ranks take passes in turn, the same number each; who has none left repeats the last and counts nothing.
3. Counts are summed over ranks, then divided.

The best walk so far is remembered, for `--keep-best`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash.dist import sum_over_ranks
from dflash.train.faults import read_sound
from dflash.train.walk import Walked, WalkSums, walk_passes, walk_samples

if TYPE_CHECKING:
    from dflash.cache.reader import CacheReader
    from dflash.drafter import Drafter
    from dflash.head import TargetHead
    from dflash.world import World


@dataclass
class Best:
    """The best walk so far."""

    evaluated: int = 0
    """Step of the last evaluation; 0 before the first."""
    step: int = 0
    """Step of the best walk; 0 before the first."""
    walk_tau: float = 0.0

    def see(self, step: int, walk_tau: float) -> bool:
        """Take an evaluation into account; whether it is the best so far (the first among equals stays)."""
        self.evaluated = step
        if walk_tau <= self.walk_tau:
            return False
        self.step, self.walk_tau = step, walk_tau
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint; `Best(**state)` goes on from there."""
        return asdict(self)


class WalkCounts:
    """Counts over responses, by length bucket and by place in the block; counts of ranks add up.

    Args:
        buckets: Number of length buckets.
        slots: B - 1.
    """

    def __init__(self, buckets: int, slots: int) -> None:
        self.by_bucket = [WalkSums() for _ in range(buckets)]
        self.reached = np.zeros(slots, np.int64)
        self.right = np.zeros(slots, np.int64)
        self.responses = 0

    def add(self, walked: Walked, bucket: int) -> None:
        """Count one response."""
        self.by_bucket[bucket].add(walked.accepted)
        places = np.arange(1, len(self.right) + 1)
        self.right += (walked.drafts[:, None] >= places).sum(axis=0)
        # a slot is reached when all before it were right and it lies inside the response
        reached = (walked.drafts[:, None] >= places - 1) & (walked.possible[:, None] >= places)
        self.reached += reached.sum(axis=0)
        self.responses += 1

    def over_ranks(self, device: torch.device) -> WalkCounts:
        """The sum of all ranks' counts."""
        own = [[s.cycles, s.tokens, s.anchors, s.anchor_tokens] for s in self.by_bucket]
        parts = [np.ravel(own), self.reached, self.right, np.array([self.responses])]
        values = torch.from_numpy(np.concatenate(parts)).to(device)
        totals = sum_over_ranks(values).cpu().numpy()
        buckets, slots = len(self.by_bucket), len(self.right)
        result = WalkCounts(buckets, slots)
        result.by_bucket = [WalkSums(*map(int, row)) for row in totals[: 4 * buckets].reshape(-1, 4)]
        result.reached, result.right = totals[4 * buckets : -1].reshape(2, slots)
        result.responses = int(totals[-1])
        return result

    def figures(self) -> dict[str, Any]:
        """What an evaluation's line in `metrics.jsonl` holds; docs/training.md explains each."""
        whole = WalkSums(
            *(sum(getattr(s, name) for s in self.by_bucket) for name in WalkSums.__annotations__)
        )
        return {
            "walk_tau": whole.walk_tau,
            "walk_tau_by_bucket": [s.walk_tau if s.cycles else None for s in self.by_bucket],
            "heldout_anchor_tau": whole.anchor_tau,
            "heldout_anchor_tau_by_bucket": [s.anchor_tau if s.anchors else None for s in self.by_bucket],
            "heldout_accuracy": [
                right / reached if reached else None
                for right, reached in zip(self.right.tolist(), self.reached.tolist(), strict=True)
            ],
            "walk_cycles": whole.cycles,
            "walk_tokens": whole.tokens,
            "heldout_responses": self.responses,
        }


class Evaluator:
    """Walks through held-out samples.

    Args:
        reader: The held-out samples and no others.
        head: On the device, in the dtype to compute in.
        world: Which passes are this rank's.
        device: Where to compute.
        skip_corrupt: Go without samples that are damaged, instead of ending with the first one.
    """

    def __init__(
        self,
        reader: CacheReader,
        head: TargetHead,
        world: World,
        device: torch.device,
        *,
        skip_corrupt: bool = False,
    ) -> None:
        self._reader, self._head, self._world, self._device = reader, head, world, device
        self._skip_corrupt = skip_corrupt

    def __len__(self) -> int:
        """Held-out samples."""
        return len(self._reader.index)

    def walk(self, drafter: Drafter) -> dict[str, Any]:
        """Figures of the drafter as it is now, the same on every rank; all ranks call it together."""
        started = time.perf_counter()
        index, size = self._reader.index, self._world.size
        buckets = len(self._reader.manifest.identity.bucket_edges)
        counts = WalkCounts(buckets, drafter.config.block_size - 1)
        passes = walk_passes(index.supervised, drafter.config.block_size)
        for first in range(0, len(passes), size):
            mine = first + self._world.rank
            # every rank runs the same number of passes: with sharded weights each is a collective
            rows = self._sound(passes[min(mine, len(passes) - 1)])
            for walked in walk_samples(drafter, self._head, self._reader, rows, self._device):
                if mine < len(passes):
                    counts.add(walked, int(index.buckets[walked.row]))
        figures = counts.over_ranks(self._device).figures()
        return figures | {"heldout_samples": len(self), "walk_seconds": time.perf_counter() - started}

    def _sound(self, rows: list[int]) -> list[int]:
        if not self._skip_corrupt:
            return rows
        damaged = {sample.row for sample in read_sound(self._reader, rows)[1]}
        return [row for row in rows if row not in damaged]
