"""Norm and gate go over their rows piece by piece: a piece more or less changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash import rowwise

SHAPES = [(0, 4, 8), (1, 8), (7, 8), (3, 5, 2, 8), (16, 1, 8)]


def gated_by_formula(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("piece", [1, 24, 1 << 18])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_and_gate_over_pieces_are_those_of_the_formulas(monkeypatch, shape, piece, strided):
    monkeypatch.setattr(rowwise, "PIECE", piece)
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
    x = wide[..., : shape[-1]] if strided else wide[..., : shape[-1]].contiguous()
    weight = torch.rand(shape[-1], generator=generator)
    cases = [
        (lambda x, w: rowwise.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)),
        (lambda x, w: rowwise.gated(x * w), lambda x, w: gated_by_formula(x * w)),
    ]
    for by_hand, formula in cases:
        results = []
        for function in (by_hand, formula):
            leaves = [x.detach().requires_grad_(), weight.detach().clone().requires_grad_()]
            out = function(*leaves)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
            results.append([out, *torch.autograd.grad(out, leaves, upstream)])
        for ours, oracle in zip(*results, strict=True):
            torch.testing.assert_close(ours, oracle, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_a_norm_in_another_dtype_is_the_norm_and_then_a_cast(source, training):
    """Bit for bit, gradients too: products would have cast what it gives."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(70, 48, generator=generator).to(source)
    weight = torch.rand(48, generator=generator)
    upstream = torch.randn(70, 48, generator=generator).bfloat16()
    results = []
    for dtype in (torch.bfloat16, None):
        leaves = [part.clone().requires_grad_(training) for part in (values, weight)]
        out = rowwise.rms_norm(*leaves, 1e-6, dtype).bfloat16()
        results.append([out, *(torch.autograd.grad(out, leaves, upstream) if training else ())])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_product_takes_its_factor_in_the_dtype_of_autocast():
    x = torch.ones(2, 2)
    assert rowwise.factor_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert rowwise.factor_dtype(x) == torch.bfloat16
