"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from dflash.errors import ConfigError


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay, as in the DFlash paper (arXiv 2602.06036)."""

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

    def __post_init__(self) -> None:
        """Refuse settings that cannot train.

        Raises:
            ConfigError: names the value and its range.
        """
        if not self.lr > 0:
            raise ConfigError(f"--lr {self.lr} must be positive")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"--warmup {self.warmup} is a share of the run and must be in [0, 1)")
        if not self.clip > 0:
            raise ConfigError(f"--clip {self.clip} must be positive")


def lr_at(progress: float, config: OptimConfig) -> float:
    """Learning rate at `progress` of the run (0 at its beginning, 1 at its end).

    Linear warm-up, then half a cosine from the peak to `final_lr` times the peak.
    """
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    through = min((progress - config.warmup) / (1 - config.warmup), 1.0)
    floor = config.lr * config.final_lr
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * through))


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the float32 parameters of `module`; fused where the device has it."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
