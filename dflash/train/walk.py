"""The serving walk from the cache: what a server would accept, without running the target.

In greedy serving the target's own tokens are what the cache holds, so one drafting pass from every position
of a response says how many drafts each anchor would have kept. A server does not see the average over all
anchors: it walks, the next anchor standing behind the last accepted draft. Easy stretches are skipped in long
strides and hard ones visited token by token, which is why the walk is lower than the average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.cache.reader import CacheReader
from dflash.drafter import Drafter
from dflash.head import TargetHead
from dflash.train.batches import BlockShape, Document, PackedBatch, pack

LOGIT_ROWS = 512
"""Positions whose logits exist at once."""


@dataclass
class WalkSums:
    """Counts of one group of samples; sums of groups are sums of counts."""

    cycles: int = 0
    tokens: int = 0
    """Tokens that these cycles added."""
    anchors: int = 0
    anchor_tokens: int = 0
    """Accepted drafts + 1, summed over all anchors."""

    @property
    def walk_tau(self) -> float:
        """Tokens a cycle adds on the walk; 1.0 without any."""
        return self.tokens / self.cycles if self.cycles else 1.0

    @property
    def anchor_tau(self) -> float:
        """The average over all anchors; 1.0 without any."""
        return self.anchor_tokens / self.anchors if self.anchors else 1.0

    def add(self, accepted: np.ndarray) -> None:
        """Count one response.

        Args:
            accepted: Tokens a cycle from each of its anchors would add, int `[n]`; at most what is left.
        """
        strides = walk(accepted)
        self.cycles += len(strides)
        self.tokens += sum(strides)
        self.anchors += len(accepted)
        self.anchor_tokens += int(accepted.sum())


def walk(accepted: np.ndarray) -> list[int]:
    """Tokens that each cycle adds when the walk starts at the first anchor.

    Args:
        accepted: For every position of a response but its last, tokens a cycle from there adds, >= 1.
    """
    strides, position = [], 0
    while position < len(accepted):
        strides.append(int(accepted[position]))
        position += strides[-1]
    return strides


def response_runs(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end of each supervised run of two tokens or more: the responses of one sample."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2) if end - begin >= 2]


@torch.no_grad()
def walk_samples(
    drafter: Drafter, head: TargetHead, reader: CacheReader, rows: Sequence[int], device: torch.device
) -> Iterator[tuple[int, np.ndarray]]:
    """Draft from every position of every response of these samples.

    Args:
        drafter: Any dtype, on `device`.
        head: On `device`, in the dtype to compute logits in.
        reader: The cache.
        rows: Rows of its index.
        device: Where to compute.

    Yields:
        The row, and for each of its responses the tokens a cycle from each anchor would add, int64 `[n]`.
    """
    shape = BlockShape(drafter.config.block_size, drafter.config.mask_token_id)
    for row in rows:
        (sample,) = reader.read([row])
        for begin, end in response_runs(sample.loss_mask):
            anchors = np.arange(begin, end - 1)
            batch = pack([Document(sample, anchors, 0)], shape).to(device)
            hits = _hits(drafter, head, batch)
            # drafts behind the response's end are known to nobody, so they are not accepted
            inside = batch.block_positions[:, 1:] < end
            accepted = (hits & inside).long().cumprod(dim=1).sum(dim=1).cpu().numpy()
            yield row, np.minimum(accepted + 1, end - 1 - anchors)


def _hits(drafter: Drafter, head: TargetHead, batch: PackedBatch) -> Tensor:
    """Whether each slot k = 1..B-1 drafts the token that is there, bool `[A, B-1]`."""
    dtype = head.lm_head.dtype
    with torch.autocast(batch.block_ids.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = drafter(
            head.embed(batch.block_ids).float(),
            batch.block_positions,
            batch.features.float(),
            batch.context_positions,
            batch.layout,
        )
    rows = hidden[:, 1:].flatten(0, 1).to(dtype)  # [A, B-1, H] -> [P, H]
    drafts = torch.cat([head.logits(part).argmax(dim=-1) for part in rows.split(LOGIT_ROWS)])
    return drafts.view_as(batch.labels) == batch.labels


def pooled(walks: Iterable[np.ndarray]) -> WalkSums:
    """Sums over responses."""
    sums = WalkSums()
    for accepted in walks:
        sums.add(accepted)
    return sums
