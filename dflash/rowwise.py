"""Norm, rotation and gate: what a drafter does to each row between its matrix products.

CPUs have kernels for few of them, so in training they have gradients of their own there, in few passes. A
compiler makes better passes from plain operations, so it gets those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def by_hand(x: Tensor) -> bool:
    """Whether the functions with gradients of their own are used."""
    return x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32; the dtype of `x` is kept."""
    if by_hand(x):
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """The norm and its gradient in few passes: CPUs have no kernel for either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`[..., size] -> [..., size]`."""
        wide = x.float()
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = square.div_(len(weight)).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(wide, scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of `x` and `weight`."""
        x, weight, scale = ctx.saved_tensors
        rows, given = (part.reshape(-1, len(weight)).float() for part in (x, upstream[0]))
        scale = scale.view(-1, 1)
        product = given * rows
        d_weight = product.T @ scale
        along = (product @ weight)[:, None] * scale.pow(3) / -len(weight)
        d_x = torch.mul(given, weight, out=product).mul_(scale).addcmul_(rows, along)
        return d_x.view(x.shape).to(x.dtype), d_weight[:, 0], None


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
        """`[..., 2 * size] -> [..., size]`."""
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        """Of both halves."""
        (both,) = ctx.saved_tensors
        d_both, given = torch.empty_like(both), upstream[0]
        (gate, up), (d_gate, d_up) = both.chunk(2, dim=-1), d_both.chunk(2, dim=-1)
        active = F.silu(gate)
        torch.mul(given, active, out=d_up)
        slope = torch.mul(given, up, out=active)
        torch.ops.aten.silu_backward.grad_input(slope, gate, grad_input=d_gate)
        return d_both
