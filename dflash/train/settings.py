"""From the flags of `dflash train` to its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.errors import ConfigError
from dflash.train.batches import AnchorConfig
from dflash.train.config import TrainConfig
from dflash.train.following import FollowConfig
from dflash.train.holdout import HoldoutConfig
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.sampler import SamplerConfig


def train_config(*, cache: Path, out: Path, **flags: Any) -> TrainConfig:
    """Distribute flags over the parts that read them.

    Args:
        cache: Cache to train from.
        out: Folder of the run.
        **flags: All others, by the names of their flags.

    Raises:
        ConfigError: a value that its part refuses.
    """
    f = flags
    epochs = f["epochs"] if f["epochs"] is not None or f["max_steps"] is not None else 6
    return TrainConfig(
        cache=cache,
        out=out,
        network=NetworkConfig(f["layers"], f["block_size"], f["mask_token_id"]),
        anchors=AnchorConfig(f["anchors"], f["anchor_density"], f["seed"], f["anchor_sampling"]),
        objective=ObjectiveConfig(
            f["block_size"], f["loss"], f["gamma"], f["sampled_softmax"], f["dpace_alpha"]
        ),
        sampler=SamplerConfig(
            policy=f["sampler"],
            compose=f["compose"],
            mix=f["mix"],
            tokens_per_batch=f["tokens_per_batch"],
            batches_per_step=f["batches_per_step"],
            min_ready=f["min_ready"],
            max_ready=f["max_ready"],
            seed=f["seed"],
            epoch_size=f["epoch_size"],
        ),
        optim=OptimConfig(
            f["optimizer"], lr=f["lr"], warmup=f["warmup"], schedule=f["schedule"], decay=f["decay"]
        ),
        holdout=HoldoutConfig(f["holdout"], f["eval_samples"]),
        epochs=epochs,
        max_steps=f["max_steps"],
        seed=f["seed"],
        init_from=f["init_from"],
        precision=f["precision"],
        save_every=f["save_every"],
        keep=f["keep"],
        eval_every=f["eval_every"],
        keep_best=f["keep_best"],
        log=tuple(f["log"]),
        resume=f["resume"],
        parallel=f["parallel"],
        activation_checkpointing=f["activation_checkpointing"],
        compile=f["compile"],
        max_minutes=f["max_minutes"],
        max_bad_steps=f["max_bad_steps"],
        skip_corrupt=f["skip_corrupt"],
        window_bytes=f["window_bytes"],
        follow=_follow_config(f),
    )


def _follow_config(flags: dict[str, Any]) -> FollowConfig | None:
    follow = FollowConfig(flags["max_wait"], flags["on_starved"])
    if flags["follow"]:
        return follow
    if follow != FollowConfig():
        raise ConfigError("--max-wait and --on-starved say how a cache is followed; add --follow")
    return None
