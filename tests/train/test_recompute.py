"""Activation checkpointing: the same gradients from less memory."""

from __future__ import annotations

import pytest
import torch
from test_objective import SHAPE, make_documents, make_loss

from dflash.train.batches import pack
from dflash.train.parallel import recompute_layers


def learn(wanted: bool, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Gradients of a small batch as one vector, and bytes that its forward pass keeps for them."""
    loss, batch = make_loss(dtype=dtype), pack(make_documents(20, 12, 9, dtype=dtype), SHAPE)
    recompute_layers(loss.drafter, wanted=wanted)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = loss(batch)
        held = sum(kept.values())
    sums.loss.backward()
    return torch.cat([p.grad.flatten() for p in loss.drafter.parameters()]), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_equal_and_less_is_kept_for_them(dtype):
    plain, everything = learn(False, dtype)
    recomputed, held = learn(True, dtype)
    assert torch.equal(plain, recomputed)
    assert held < everything * 0.7
