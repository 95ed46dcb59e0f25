"""Linear layers for a handful of rows on a CPU, where decoding spends its time.

A verification pass has a few rows, so it costs what reading the weights costs. On an AMD processor the
float32 kernels behind `F.linear` repack the weights for two rows or more, which takes three times as long as
reading them; `(W @ x.T).T` is the same product without that. On Intel's own, MKL has kernels for few rows,
and it is the other form that takes three times as long.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 12
"""Above this, repacking pays."""


@cache
def has_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether `F.linear` is fast for few rows here: MKL looks at who made the processor."""
    try:
        maker = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("vendor_id"))
    except (OSError, StopIteration):
        return False
    with_mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return with_mkl and maker.split()[-1] == "GenuineIntel"


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, like `F.linear`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if x.device.type != "cpu" or x.dtype != torch.float32 or not 1 < rows <= MOST_ROWS or has_kernels():
        return F.linear(x, weight, bias)
    # [..., in] -> [rows, in] -> [out, rows] -> [..., out]
    out = (weight @ x.reshape(rows, -1).T).T.contiguous().view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class SmallRowsLinear(nn.Linear):
    """A linear layer that looks at how many rows it gets."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
        """`[..., in] -> [..., out]`."""
        return small_linear(input, self.weight, self.bias)


def use_small_rows(module: nn.Module) -> None:
    """Let all plain linear layers of a module, for inference, look at how many rows they get."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = SmallRowsLinear
