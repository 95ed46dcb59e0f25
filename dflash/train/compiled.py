"""How layers run in training: through torch.compile, or computed again in the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflash.train.parallel import recompute_layers

if TYPE_CHECKING:
    from dflash.drafter import Drafter
    from dflash.train.config import TrainConfig


def shape_layers(drafter: Drafter, config: TrainConfig) -> None:
    """Make the layers run as asked, before ranks share them; what they compute stays the same."""
    recompute_layers(drafter, wanted=config.activation_checkpointing)
    if config.compile:
        compile_layers(drafter)


def compile_layers(drafter: Drafter, backend: str = "inductor") -> None:
    """Compile norms, projections, rotation and MLP of each layer, for any number of rows.

    The attention between them stays outside: it depends on a layout that is new in each micro-batch; on CUDA
    it is compiled in any case.
    """
    for layer in drafter.layers:
        attention: Any = layer.self_attn
        for name in ("key_value", "query_key_value"):
            compiled = torch.compile(getattr(attention, name), backend=backend, dynamic=True)
            setattr(attention, name, compiled)
        layer.mlp.compile(backend=backend, dynamic=True)  # type: ignore[union-attr]
