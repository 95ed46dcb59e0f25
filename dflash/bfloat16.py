"""Matrix products in bfloat16 on a processor that has no instructions for them.

Such a processor (x86 without AVX512-BF16 or AMX: many laptops) multiplies bfloat16 several times more slowly
than float32. Training computes in float32 there. Code of others that computes in bfloat16 gets products that
are done in float32 and rounded, which is what the instructions do: they add up in float32 and round once; its
shapes, dtypes and memory stay those of bfloat16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FEWEST = 64
"""Rows and columns of a product for which turning its factors into float32 pays (measured: 32 to 64)."""

_aten = torch.ops.aten
_FACTORS = {
    _aten.mm: slice(0, 2),
    _aten.bmm: slice(0, 2),
    _aten.addmm: slice(1, 3),
    _aten.baddbmm: slice(1, 3),
    _aten.linear: slice(0, 2),
    _aten.matmul: slice(0, 2),
}
"""Which arguments of an operation are multiplied. In inference `linear` and `matmul` come whole."""


@cache
def has_products() -> bool:
    """Whether this processor has instructions that multiply bfloat16 (AVX512-BF16, AMX, Arm's BF16).

    A torch that cannot tell is left to do as it does.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    return any("bf16" in name and there is True for name, there in capabilities().items())


def product_dtype(wanted: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype to compute where bfloat16 would do: float32 where that is faster, besides more exact."""
    return torch.float32 if _is_slow(wanted, device) else wanted


def bfloat16_products(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Make bfloat16 products fast inside the block, gradients' too; nothing where they are, or do not occur.

    Args:
        dtype: Compute dtype.
        device: Where it computes.
    """
    return WideProducts() if _is_slow(dtype, device) else nullcontext()  # type: ignore[no-untyped-call]


def use_products(model: nn.Module) -> None:
    """Let a model of others, for inference, run inside `bfloat16_products` whenever it is called."""
    own, weight = model.forward, next(model.parameters())
    if not _is_slow(weight.dtype, weight.device):
        return

    @wraps(own)
    def run(*args: Any, **named: Any) -> Any:
        with bfloat16_products(weight.dtype, weight.device):
            return own(*args, **named)

    model.forward = run


def _is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and device.type == "cpu" and not has_products()


class WideProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does products of bfloat16 matrices in float32, and rounds what they give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        named = kwargs or {}
        factors = _FACTORS.get(func.overloadpacket)
        if factors is None or not _pays(*args[factors], by_rows=func.overloadpacket is _aten.linear):
            return func(*args, **named)
        out = named.pop("out", None)
        wide = func.overloadpacket(*(_wide(value) for value in args), **named)
        return wide.to(args[factors][0].dtype) if out is None else out.copy_(wide)


def _pays(left: Tensor, right: Tensor, *, by_rows: bool) -> bool:
    """Whether a product of these, `right` given by its rows in `linear`, is faster in float32."""
    plain = all(type(factor) in (Tensor, nn.Parameter) for factor in (left, right))
    if not plain or left.dtype != torch.bfloat16 or left.device.type != "cpu":
        return False
    if min(left.dim(), right.dim()) < 2:
        return False
    # One matrix is multiplied with all rows of a batch at once.
    rows = left.shape[:-1].numel() if right.dim() == 2 else left.shape[-2]
    return min(rows, right.shape[-2 if by_rows else -1]) >= FEWEST


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
