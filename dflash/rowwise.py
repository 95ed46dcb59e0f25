"""Norm, rotation and gate: what a drafter does to each row between its matrix products.

CPUs have kernels for few of them, so in training they have gradients of their own there, in few passes. A
compiler makes better passes from plain operations, so it gets those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PIECE = 1 << 18
"""Values that are worked on at once on a CPU: they stay in its cache from one operation to the next."""


def by_hand(x: Tensor) -> bool:
    """Whether the functions with gradients of their own are used."""
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def factor_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product takes `x`: that of autocast where it is on."""
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else x.dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32.

    Args:
        x: `[..., size]`.
        weight: float32 `[size]`.
        eps: Added to the mean.
        dtype: Of the result; that of `x` when None.
    """
    if by_hand(x):
        return _RmsNorm.apply(x, weight, eps, dtype or x.dtype)  # type: ignore[no-any-return,no-untyped-call]
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(dtype or x.dtype)


class _RmsNorm(torch.autograd.Function):
    """The norm and its gradient in few passes: CPUs have no kernel for either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """`[n, ..., size] -> [n, ..., size]`."""
        out, scale = torch.empty_like(x, dtype=dtype), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        for part, part_scale, part_out in _pieces(x, scale, out):
            wide = part.float()
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=part_scale)
            part_scale.square_().div_(len(weight)).add_(eps).rsqrt_()
            part_out.copy_(torch.mul(wide, part_scale).mul_(weight))
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Of `x` and `weight`."""
        x, weight, scale = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        for rows, given, part_scale, out in _pieces(x, upstream[0], scale, d_x):
            wide, wide_given, of_rows = (
                part.float().reshape(-1, part.shape[-1]) for part in (rows, given, part_scale)
            )
            product = wide_given * wide
            d_weight.addmv_(product.T, of_rows[:, 0])
            along = (product @ weight)[:, None] * of_rows.pow(3) / -len(weight)
            slope = torch.mul(wide_given, weight, out=product).mul_(of_rows).addcmul_(wide, along)
            out.copy_(slope.view(out.shape))
        return d_x, d_weight, None, None


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to `[..., heads, d]`, in its dtype."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Rotation.apply(x, *cos_sin)  # type: ignore[no-any-return,no-untyped-call]
    cos, sin = (part.to(x.dtype) for part in cos_sin)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class _Rotation(torch.autograd.Function):
    """RoPE half by half; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[..., heads, d]` by `[..., 1, d]`, whose halves are equal."""
        half = x.shape[-1] // 2
        ctx.turn = cos[..., :half].to(x.dtype), sin[..., :half].to(x.dtype)
        return _turned(x, *ctx.turn, direction=1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """Of `x`."""
        return _turned(upstream[0], *ctx.turn, direction=-1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, direction: int) -> Tensor:
    out = torch.empty_like(x)
    (low, high), (new_low, new_high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(low, cos, out=new_low).addcmul_(high, sin, value=-direction)
    torch.mul(high, cos, out=new_high).addcmul_(low, sin, value=direction)
    return out


def gated(both: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., gate | up]`, in training on a CPU."""
    return _Gated.apply(both)  # type: ignore[no-any-return,no-untyped-call]


class _Gated(torch.autograd.Function):
    """`silu(gate) * up` of `[..., gate | up]`, whose gradient is written into one tensor at once."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """`[n, ..., 2 * size] -> [n, ..., size]`."""
        ctx.save_for_backward(both)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        for part, part_out in _pieces(both, out):
            gate, up = part.chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=part_out)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        """Of both halves."""
        (both,) = ctx.saved_tensors
        d_both = torch.empty_like(both)
        for part, given, out in _pieces(both, upstream[0], d_both):
            (gate, up), (d_gate, d_up) = part.chunk(2, dim=-1), out.chunk(2, dim=-1)
            active = F.silu(gate)
            torch.mul(given, active, out=d_up)
            slope = torch.mul(given, up, out=active)
            torch.ops.aten.silu_backward.grad_input(slope, gate, grad_input=d_gate)
        return d_both


def _pieces(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few of the leading rows of each tensor, as many as hold `PIECE` values of the first."""
    rows = max(PIECE * len(first) // max(first.numel(), 1), 1)
    return zip(*(torch.split(tensor, rows) for tensor in (first, *others)), strict=True)
