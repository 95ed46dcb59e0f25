"""The serving walk from the cache: what a server would accept, without running the target.

In greedy serving the target's own tokens are what the cache holds, so one drafting pass from every position
of a response says how many drafts each anchor would have kept. A server does not see the average over all
anchors: it walks, the next anchor standing behind the last accepted draft. Easy stretches are skipped in long
strides and hard ones visited token by token, which is why the walk is lower than the average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.cache.reader import CacheReader
from dflash.drafter import Drafter
from dflash.head import TargetHead
from dflash.train.batches import BlockShape, Document, PackedBatch, pack
from dflash.train.padding import multiples_for, padded

LOGIT_ROWS = 512
"""Positions whose logits exist at once."""
PASS_SLOTS = 1 << 14
"""Slots of all blocks of one forward pass; a sample with more is a pass of its own."""


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


class Walked(NamedTuple):
    """What drafting from every position of one response gave; n positions, its last one left out."""

    row: int
    """Row of the cache's index."""
    accepted: np.ndarray
    """Tokens that a cycle from each position would add, int64 `[n]`; at most what is left."""
    drafts: np.ndarray
    """Leading right drafts, int64 `[n]`."""
    possible: np.ndarray
    """Drafts that lie inside the response, int64 `[n]`; what is behind its end is known to nobody."""


@torch.no_grad()
def walk_samples(
    drafter: Drafter, head: TargetHead, reader: CacheReader, rows: Sequence[int], device: torch.device
) -> Iterator[Walked]:
    """Draft from every position of every response of these samples, all in one forward pass.

    Args:
        drafter: Any dtype, on `device`.
        head: On `device`, in the dtype to compute logits in.
        reader: The cache.
        rows: Rows of its index; `walk_passes` divides many.
        device: Where to compute.

    Yields:
        Each response that has two tokens or more, in the order of the rows.
    """
    shape = BlockShape(drafter.config.block_size, drafter.config.mask_token_id)
    responses = [
        (row, begin, end, sample)
        for row, sample in zip(rows, reader.read(rows), strict=True)
        for begin, end in response_runs(sample.loss_mask)
    ]
    docs = [Document(sample, np.arange(begin, end - 1), 0) for _, begin, end, sample in responses]
    left = [end - 1 - doc.anchors for doc, (_, _, end, _) in zip(docs, responses, strict=True)]
    possible = [np.minimum(part, shape.size - 1) for part in left]
    batch = pack(docs, shape)
    if device.type == "cuda":  # kernels are compiled for new shapes; on a CPU padding takes longer than that
        batch = padded(batch, multiples_for(device))
    limits = np.zeros(batch.blocks, np.int64)  # blocks of the padding have nothing to look at
    count = sum(map(len, possible))
    limits[:count] = np.concatenate([limits[:0], *possible])
    hits = _leading_hits(drafter, head, batch.to(device), torch.from_numpy(limits).to(device))
    drafts = hits[:count].cpu().numpy()
    ends = np.cumsum([len(doc.anchors) for doc in docs])[:-1]
    for (row, *_), most, reach, right in zip(responses, left, possible, np.split(drafts, ends), strict=False):
        yield Walked(row, np.minimum(right + 1, most), right, reach)


def walk_passes(supervised: np.ndarray, block_size: int) -> list[list[int]]:
    """Divide samples into forward passes of about `PASS_SLOTS` slots, similar lengths together.

    Args:
        supervised: Supervised tokens of each sample, `[N]`: no more positions are drafted from.
        block_size: B.
    """
    passes: list[list[int]] = []
    room = 0
    for row in np.argsort(supervised, kind="stable").tolist():
        slots = int(supervised[row]) * block_size
        if slots > room or not passes:
            passes.append([])
            room = PASS_SLOTS
        passes[-1].append(row)
        room -= slots
    return passes


def _leading_hits(drafter: Drafter, head: TargetHead, batch: PackedBatch, limits: Tensor) -> Tensor:
    """How many of each block's slots from the first on draft the token that is there, int64 `[A]`.

    Slot by slot, so that only blocks whose slots before were right reach the `lm_head`.

    Args:
        drafter: The network.
        head: The target's head.
        batch: A blocks.
        limits: Slots to look at, int64 `[A]`.
    """
    count = torch.zeros_like(limits)
    if not batch.blocks:
        return count
    dtype = head.lm_head.dtype
    device = batch.block_ids.device.type
    with torch.autocast(device, torch.bfloat16) if dtype == torch.bfloat16 else nullcontext():
        hidden = drafter(
            head.embed(batch.distinct_ids).float(),
            batch.block_positions,
            batch.features[:, : len(drafter.config.target_layer_ids) * drafter.config.hidden_size].to(dtype),
            batch.context_positions,
            batch.layout,
        )
    right = torch.arange(batch.blocks, device=limits.device)  # blocks that are looked at: all right so far
    for slot in range(batch.labels.shape[1]):
        # which ones is all that is read from a device before the end, once a slot
        right = right[(count[right] == slot) & (limits[right] > slot)]
        rows = hidden[right, slot + 1].to(dtype)  # slot 0 is the anchor
        drafts = [head.logits(part).argmax(dim=-1) for part in rows.split(LOGIT_ROWS)]
        count.index_add_(0, right, (torch.cat(drafts) == batch.labels[right, slot]).to(count.dtype))
    return count


def pooled(walks: Iterable[np.ndarray]) -> WalkSums:
    """Sums over responses."""
    sums = WalkSums()
    for accepted in walks:
        sums.add(accepted)
    return sums
