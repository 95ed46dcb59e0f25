"""The drafter on several ranks: replicated (DDP), or split among them (FSDP).

- `ddp`: every rank holds everything; gradients are averaged beside the last backward pass of a step.
- `fsdp`: parameters, gradients and moments are split over the ranks (`fully_shard`), one group a layer and
  one for the rest. Parameters are gathered in float32 and cast by autocast, as with DDP, so that norms keep
  their float32 weights and both modes compute the same numbers; gradients are averaged in float32.

The frozen head is on every rank in either mode. To everything that is not a forward or backward pass, a split
parameter is a DTensor: `whole` puts one together, `like` takes this rank's part of a whole one.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dflash.attention import BlockAttention, BlockLayout, KeyValue
from dflash.errors import ConfigError
from dflash.grouped import attention_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from dflash.drafter import Drafter, DrafterLayer
    from dflash.world import World

PARALLEL = ("ddp", "fsdp")


def check_parallel(mode: str) -> None:
    """Refuse an unknown mode.

    Raises:
        ConfigError: names it and those that there are.
    """
    if mode not in PARALLEL:
        raise ConfigError(f"--parallel {mode!r} is not one of {', '.join(PARALLEL)}")


class SplitLayer(nn.Module):
    """A draft layer that computes its context's keys and values itself: one forward, so one gathering."""

    def __init__(self, layer: DrafterLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        blocks: Tensor,
        context: tuple[Tensor, tuple[Tensor, Tensor]],
        cos_sin: tuple[Tensor, Tensor],
        layout: BlockLayout,
        attention: BlockAttention,
        first_slot: int,
    ) -> Tensor:
        """Block states `[A, B, H]` to block states; the context is its states `[T, H]` and RoPE factors."""
        rows: KeyValue = self.layer.self_attn.key_value(*context)
        return self.layer(blocks, rows, cos_sin, layout, attention, first_slot)  # type: ignore[no-any-return]


class SplitDrafter(nn.Module):
    """The training pass of a drafter whose parameters are split among the ranks.

    The drafter keeps its names and its modules; only its parameters have become DTensors.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        from torch.distributed.fsdp import fully_shard

        self.config = drafter.config
        self.rest = nn.ModuleList([drafter.fc, drafter.hidden_norm, drafter.norm])
        self._whole = (drafter,)  # not a submodule: it would lead to the layers past their groups
        self.layers = nn.ModuleList(SplitLayer(layer) for layer in drafter.layers)  # type: ignore[arg-type]
        for layer in self.layers:
            fully_shard(layer)
        fully_shard(self)

    def forward(
        self,
        blocks: Tensor,
        positions: Tensor,
        features: Tensor,
        context_positions: Tensor,
        layout: BlockLayout,
        first_slot: int = 0,
    ) -> Tensor:
        """As `Drafter.forward`."""
        (drafter,), attention = self._whole, attention_for(blocks.device)
        context = drafter.fuse(features), drafter.rotary(context_positions)
        cos_sin = drafter.rotary(positions)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            slot = first_slot if number == last else 0
            blocks = layer(blocks, context, cos_sin, layout, attention, slot)
        return drafter.norm(blocks)  # type: ignore[no-any-return]

    def exchange(self, wanted: bool) -> None:
        """Whether the next backward pass ends with the exchange of gradients."""
        self.set_requires_gradient_sync(wanted)  # type: ignore[operator] # fully_shard adds it
        self.set_is_last_backward(wanted)  # type: ignore[operator]


def recompute_layers(drafter: Drafter, *, wanted: bool) -> None:
    """Keep each layer's inputs alone in the forward pass, and compute the layer again in the backward pass.

    The layers do it themselves, so it is the same alone, replicated and split: a split layer is put together
    once for both.
    """
    for layer in drafter.layers:
        layer.recompute = wanted  # type: ignore[assignment]


def over_ranks(loss: nn.Module, world: World, mode: str) -> nn.Module:
    """A loss with a `drafter` as the ranks compute it together; the optimizer is built behind this."""
    if world.size == 1:
        return loss
    if mode == "fsdp":
        loss.drafter = SplitDrafter(loss.drafter)  # type: ignore[arg-type]
        return loss
    return DistributedDataParallel(loss, gradient_as_bucket_view=True)


def exchanging(module: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Around a micro-batch: ranks exchange gradients only if wanted, which is for the last one of a step."""
    split = getattr(module, "drafter", None)
    if isinstance(split, SplitDrafter):
        split.exchange(wanted)
    elif isinstance(module, DistributedDataParallel) and not wanted:
        return module.no_sync()
    return nullcontext()


def zero_of(drafter: nn.Module, block_size: int) -> Tensor:
    """Zero, such that its backward pass reaches every parameter, as the other ranks wait for it to do.

    A split drafter exchanges nothing unless its layers run, so they run over a block without context.
    """
    if not isinstance(drafter, SplitDrafter):
        return torch.stack([parameter.sum() * 0 for parameter in drafter.parameters()]).sum()
    config, device = drafter.config, next(drafter.parameters()).device
    blocks = torch.zeros(1, block_size, config.hidden_size, device=device)
    positions = torch.arange(block_size, device=device)[None]
    features = torch.zeros(0, len(config.target_layer_ids) * config.hidden_size, device=device)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    states = drafter(blocks, positions, features, positions[0, :0], BlockLayout(nothing, nothing))
    return states.sum() * 0  # type: ignore[no-any-return]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within the block every rank has the whole drafter, for a pass without gradients."""
    split = getattr(module, "drafter", None)
    parts: list[Any] = [split, *split.layers] if isinstance(split, SplitDrafter) else []
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from its parts on all ranks; every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """This rank's part of a whole tensor, split as `model` is; no rank is asked."""
    tensor = tensor.to(model.device)
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)


class SplitMuon(torch.optim.Muon):
    """Muon over matrices that are split among ranks.

    Orthogonalising takes the whole matrix. So each matrix is put together, stepped as it is without
    splitting, and this rank's part is kept; one whole matrix exists at a time.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients; every rank calls it."""
        del closure  # torch's optimizers take one; training has none
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                self._step(parameter, settings)

    def _step(self, parameter: nn.Parameter, settings: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        matrix = nn.Parameter(whole(parameter))
        matrix.grad = whole(parameter.grad)
        one = torch.optim.Muon([matrix], **settings)
        before = self.state[parameter].get("momentum_buffer")
        if before is not None:
            one.state[matrix]["momentum_buffer"] = whole(before)
        one.step()  # type: ignore[no-untyped-call]
        parameter.copy_(like(matrix.detach(), parameter))
        self.state[parameter]["momentum_buffer"] = like(one.state[matrix]["momentum_buffer"], parameter)


def is_split(parameters: list[nn.Parameter]) -> bool:
    """Whether these parameters are split among ranks."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)
