"""What decides a run, and what a run says at its end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash.bfloat16 import product_dtype
from dflash.errors import ConfigError
from dflash.train.batches import AnchorConfig
from dflash.train.following import FollowConfig
from dflash.train.holdout import HoldoutConfig
from dflash.train.loggers import check_loggers
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.parallel import check_parallel
from dflash.train.sampler import SamplerConfig

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run."""

    cache: Path
    out: Path
    network: NetworkConfig = field(default_factory=NetworkConfig)
    anchors: AnchorConfig = field(default_factory=AnchorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    holdout: HoldoutConfig = field(default_factory=HoldoutConfig)
    epochs: int | None = 6
    """Passes over the cache; None means until `max_steps`."""
    max_steps: int | None = None
    """Stop behind this many optimizer steps; the schedule ends there too."""
    seed: int = 0
    init_from: Path | None = None
    """A run or drafter whose weights are trained further; drawn by the seed when None."""
    precision: str = "bfloat16"
    """Compute dtype, `bfloat16` or `float32`; weights and moments are float32 either way. On a processor that
    cannot multiply bfloat16, `bfloat16` is computed in float32."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept."""
    eval_every: int | None = None
    """Steps between walks over the held-out samples; as `save_every` when None; one more at the end."""
    keep_best: bool = False
    """Keep the checkpoint with the best walk beside the newest ones."""
    log: tuple[str, ...] = ()
    """Loggers beside `metrics.jsonl`: `tensorboard`, `wandb`, `trackio`."""
    resume: bool = False
    parallel: str = "ddp"
    """With several ranks: `ddp` (everything on each) or `fsdp` (split among them)."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed: less memory."""
    compile: bool = False
    """Norms, projections and MLPs through torch.compile."""
    max_minutes: float | None = None
    """Stop with a checkpoint behind the step in which so many minutes are over; None for never."""
    max_bad_steps: int = 10
    """Steps in a row whose loss or gradient is not finite, with which the run ends; fewer are skipped."""
    skip_corrupt: bool = False
    """Go on without samples that are damaged, recording them; otherwise the first one ends the run."""
    window_bytes: int | None = None
    """Most bytes of hidden states that one rank holds ready; None: 1 GiB, or two steps where that is more."""
    follow: FollowConfig | None = None
    """How a cache that is still being written is followed; None needs a complete one."""

    def __post_init__(self) -> None:
        """Refuse a run without an end, and parts that do not belong together.

        Raises:
            ConfigError: neither epochs nor steps, a number below one, an unknown precision, or a loss for
                another block size than the network's.
        """
        if self.epochs is None and self.max_steps is None:
            raise ConfigError("a run needs an end: give --epochs or --max-steps")
        check_parallel(self.parallel)
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ConfigError(f"--max-minutes {self.max_minutes:g} must be above 0")
        for flag in ("epochs", "max_steps", "save_every", "keep", "eval_every", "max_bad_steps"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ConfigError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
        check_loggers(self.log)
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.keep_best and not self.holdout.share:
            raise ConfigError("--keep-best follows the walk over held-out samples; give --holdout 0.02, say")
        if self.objective.block_size != self.network.block_size:
            raise ConfigError(
                f"the loss is for blocks of {self.objective.block_size}, the network has blocks of "
                f"{self.network.block_size}; --block-size sets both"
            )

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """What `precision` comes to on this device: float32 where bfloat16 would only be slower."""
        return product_dtype(PRECISIONS[self.precision], device)

    def settings(self) -> dict[str, Any]:
        """What must not change when a run is resumed, JSON-ready."""
        parts = ("network", "anchors", "objective", "sampler", "optim", "holdout")
        own = ("epochs", "max_steps", "seed", "precision")
        tree = {part: asdict(getattr(self, part)) for part in parts} | {
            key: getattr(self, key) for key in own
        }
        tree["follow"] = True if self.follow else None  # how long it waits may change
        tree["init_from"] = None if self.init_from is None else str(self.init_from)
        return json.loads(json.dumps(tree))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TrainResult:
    """What a run did."""

    steps: int
    tokens: int
    """Tokens of the samples consumed, all ranks together."""
    seconds: float
    """From the first step of this start to the last."""
    loss: float
    """Mean loss of the last tenth of the steps of this start."""
    checkpoint: Path
    stopped: str | None
    """What ended the run early, if anything did: the name of a signal, or `--max-minutes`."""
    mix: dict[str, Any]
    """Length mix of what was consumed, against its quota."""

    def text(self) -> str:
        """One line for the terminal, and how to go on where the run was stopped."""
        line = f"{self.steps:,} steps, {self.tokens:,} tokens, loss {self.loss:.3f}: {self.checkpoint}"
        return line if self.stopped is None else f"{line}\nstopped by {self.stopped}; go on with --resume"


def check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the settings of a checkpoint with those of the run that is to go on from it.

    Raises:
        ConfigError: they differ; names each with both values.
    """
    flat_saved, flat_now = _flat(saved), _flat(now)
    changed = [
        key for key in sorted(flat_saved.keys() | flat_now.keys()) if flat_saved.get(key) != flat_now.get(key)
    ]
    if changed:
        both = "; ".join(f"{key}: was {flat_saved.get(key)!r}, now {flat_now.get(key)!r}" for key in changed)
        raise ConfigError(f"--resume with other settings: {both}; use the first values or another --out")


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{part}.{key}" if isinstance(values, dict) else part: value
        for part, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [(part, values)])
    }
