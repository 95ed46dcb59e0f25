"""Padding micro-batches, so that few shapes occur: kernels are compiled for each new one.

On CUDA that is flex_attention, late in a run; on a CPU it is every bfloat16 matrix product (oneDNN), which
is also slower where its rows do not divide into the processor's tiles.

What is added changes nothing: no block sees a row of the padding; a block of the padding sees itself, so that
nothing is NaN, and counts nothing, by which it is told from a real one, whose first slot always counts. It
comes behind the real ones, so the places of counted slots stay what they were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import functional as F

from dflash.attention import BlockLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dflash.train.batches import PackedBatch


class Multiples(NamedTuple):
    """What context rows and blocks are padded to multiples of."""

    rows: int = 1
    blocks: int = 1


ON_CUDA = Multiples(2048, 256)
"""At most an eighth of a default micro-batch's rows."""
ON_CPU = Multiples(256, 64)


def multiples_for(device: torch.device) -> Multiples:
    """What suits a kind of device."""
    return ON_CUDA if device.type == "cuda" else ON_CPU


def padded(batch: PackedBatch, multiples: Multiples) -> PackedBatch:
    """The batch with more rows and blocks; one without blocks stays as it is.

    Features that `pack` has not given room for are copied; those still coded get their rows when decoded.
    """
    rows, blocks = len(batch.context_positions), batch.blocks
    more_rows, more_blocks = -rows % multiples.rows, -blocks % multiples.blocks
    if not blocks or not (more_rows or more_blocks):
        return batch
    layout, nothing = batch.layout, [rows] * more_blocks
    return replace(
        batch,
        features=batch.features if batch.coded else with_rows(batch.features, rows + more_rows),
        context_positions=F.pad(batch.context_positions, (0, more_rows)),
        block_ids=_more(batch.block_ids, more_blocks),
        block_positions=_more(batch.block_positions, more_blocks),
        labels=_more(batch.labels, more_blocks),
        counted=_more(batch.counted, more_blocks),
        layout=BlockLayout.build(
            layout.context_start.tolist() + nothing, layout.context_end.tolist() + nothing
        ),
        buckets=F.pad(batch.buckets, (0, more_blocks)),
    )


def with_rows(features: Tensor, rows: int) -> Tensor:
    """Features `[T, K*H]` with rows of zeros behind them up to that many."""
    missing = rows - len(features)
    return F.pad(features, (0, 0, 0, missing)) if missing else features


def _more(tensor: Tensor, rows: int) -> Tensor:
    # [A, n] -> [A + rows, n]; zeros: token 0 at position 0, which counts nothing
    return F.pad(tensor, (0, 0, 0, rows))
