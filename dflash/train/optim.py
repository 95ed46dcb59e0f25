"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.bfloat16 import bfloat16_products
from dflash.errors import ConfigError
from dflash.train.parallel import SplitMuon, is_split, whole

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True)
class OptimConfig:
    """Linear warm-up and cosine decay; by default AdamW, as in the DFlash paper (arXiv 2602.06036)."""

    optimizer: str = "adamw"
    """`adamw`, or `muon` for the matrices (and AdamW for the rest)."""
    lr: float = 6e-4
    """Peak learning rate."""
    warmup: float = 0.04
    """Share of the run over which the rate rises from zero."""
    final_lr: float = 0.0
    """Rate at the end, as a share of the peak."""
    weight_decay: float = 0.01
    """On matrices only; norms and biases are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    """Largest gradient norm."""
    schedule: str = "cosine"
    """Behind the warm-up: `cosine`, `wsd` (constant, then a linear decay) or `constant`."""
    decay: float = 0.2
    """Share of the run over which `wsd` decays, at its end."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot train.

        Raises:
            ConfigError: names the value and its range.
        """
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"--optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        if not self.lr > 0:
            raise ConfigError(f"--lr {self.lr} must be positive")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"--warmup {self.warmup} is a share of the run and must be in [0, 1)")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"--schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if self.schedule == "wsd" and not 0 < self.decay <= 1 - self.warmup:
            raise ConfigError(
                f"--decay {self.decay} is a share of the run and must be above 0 and leave room for --warmup "
                f"{self.warmup}"
            )
        if not self.clip > 0:
            raise ConfigError(f"--clip {self.clip} must be positive")


def lr_at(progress: float, config: OptimConfig) -> float:
    """Learning rate at `progress` of the run (0 at its beginning, 1 at its end).

    Linear warm-up, then half a cosine from the peak to `final_lr` times the peak; with `wsd` the peak until
    the last `decay` of the run, then a straight line; with `constant` the peak.
    """
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    floor = config.lr * config.final_lr
    return floor + (config.lr - floor) * _height(min(progress, 1.0), config)


def _height(progress: float, config: OptimConfig) -> float:
    """Of the schedule behind its warm-up: 1 at the peak, 0 at the end of a decay."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        return min((1 - progress) / config.decay, 1.0)
    through = (progress - config.warmup) / (1 - config.warmup)
    return 0.5 * (1 + math.cos(math.pi * through))


class MuonAdamW:
    """Muon for the matrices, AdamW for norms and biases; to its users one optimizer.

    Muon (Jordan et al., 2024) orthogonalises each matrix's momentum; its step is scaled to the size of an
    AdamW step (Liu et al., 2025), so that the same learning rate and decay suit both.

    Args:
        matrices: Parameters of two dimensions.
        vectors: All others.
        config: Rate, decay and betas; Muon's momentum is 0.95.
    """

    def __init__(
        self, matrices: list[nn.Parameter], vectors: list[nn.Parameter], config: OptimConfig
    ) -> None:
        muon = (SplitMuon if is_split(matrices) else torch.optim.Muon)(
            matrices,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        # fused: its count of steps is on the device, where a resumed one is too; else each is read every step
        adamw = torch.optim.AdamW(vectors, lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True)
        self._parts = (muon, adamw)
        self.param_groups: list[dict[str, Any]] = [*muon.param_groups, *adamw.param_groups]
        # Both look their state up by parameter, so one mapping serves both.
        self.state = muon.state = adamw.state

    def step(self) -> None:
        """Apply the gradients."""
        # Muon's products are in bfloat16 whatever the parameters are in
        with bfloat16_products(torch.bfloat16, self._parts[0].param_groups[0]["params"][0].device):
            for part in self._parts:
                part.step()  # type: ignore[no-untyped-call]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none)


Optimizer = torch.optim.Optimizer | MuonAdamW


def build_optimizer(module: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer over the float32 parameters of `module`; AdamW is fused where the device has it."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    if config.optimizer == "muon":
        return MuonAdamW(matrices, vectors, config)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def moments_of(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of what the optimizer remembers of a parameter."""
    if isinstance(optimizer, MuonAdamW) and parameter.ndim >= 2:
        return ("momentum_buffer",)
    return ("step", "exp_avg", "exp_avg_sq")


def clipped_mean(module: nn.Module, weight: Tensor, ranks: int, most: float) -> Tensor:
    """Turn gradients of a sum over a step into those of its mean, and clip them; the host waits for nothing.

    Args:
        module: What has the gradients.
        weight: What the sum is divided by, scalar float64 on the device; of 0 all gradients become 0.
        ranks: DDP and FSDP have averaged over so many; the loss is a sum over them.
        most: Largest norm.

    Returns:
        The norm before clipping, scalar float32 on the device.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    # divided in float64 as on a host; what multiplies has the gradients' dtype, for one kernel over all
    scale = torch.where(weight > 0, torch.full_like(weight, ranks) / weight, 0.0).float()
    torch._foreach_mul_([parameter.grad for parameter in parameters if parameter.grad is not None], scale)
    return whole(nn.utils.clip_grad_norm_(parameters, most))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Use this rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
