"""How many positions go through the `lm_head` at once: logits are large, and never held as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Chunk(NamedTuple):
    """What bounds the logits that exist at once."""

    rows: int
    """Positions."""
    size: int
    """Bytes; with a large vocabulary there are fewer positions."""


ON_CUDA = Chunk(2048, 1 << 29)
"""Each chunk reads the whole `lm_head`, for R operations a byte of it where it has R rows. About 300 fit into
the time of a byte (H100: 990 TFLOP/s, 3.35 TB/s); with fewer a GPU waits for its memory."""
ON_CPU = Chunk(512, 1 << 26)
"""Enough rows for the matrix product to run at full speed."""
ROWS_MULTIPLE = 64
"""What positions are filled up to a multiple of on a CPU: kernels are compiled for each new shape."""


def chunk_rows(lm_head: Tensor, copies: int = 1) -> int:
    """Positions at once for an `lm_head` `[V, H]`: a multiple of `ROWS_MULTIPLE` if they are as many.

    Args:
        lm_head: In the dtype of the logits.
        copies: Tensors of the logits' size that share the bytes.
    """
    most = ON_CPU if lm_head.device.type == "cpu" else ON_CUDA
    rows = min(most.rows, most.size // (len(lm_head) * lm_head.element_size() * copies))
    return max(rows // ROWS_MULTIPLE * ROWS_MULTIPLE or rows, 1)


def missing_rows(count: int, device: torch.device) -> int:
    """How many rows to add to so many positions."""
    return -count % ROWS_MULTIPLE if device.type == "cpu" else 0
