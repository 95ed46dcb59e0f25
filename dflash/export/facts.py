"""What a layout needs beyond the drafter's own configuration, or has no place for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from dflash.drafter import DrafterConfig
from dflash.errors import CheckpointError
from dflash.pretrained import parse_config

KEPT_KEY = "dflash_trainer"
"""Key of `config.json` under which our exports keep what a layout has no place for; clients pass over it."""
_KEPT = (
    "vocab_size",
    "num_target_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "input_embedding_scale",
    "final_logit_softcapping",
)


@dataclass(frozen=True)
class TargetShape:
    """What a checkpoint may not say about its target."""

    num_target_layers: int
    """N."""
    vocab_size: int
    """Rows of the embedding."""


@dataclass(frozen=True)
class Verifier:
    """The target as other packages name it."""

    name: str
    """Folder or hub name."""
    architectures: tuple[str, ...] = ()


def kept(config: DrafterConfig) -> dict[str, Any]:
    """What an export keeps, JSON-ready, so that an import gives the very same configuration."""
    values = asdict(config)
    return {name: list(v) if isinstance(v := values[name], tuple) else v for name in _KEPT}


def with_defaults(kind: str, raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """A Transformers configuration with every key: files leave out what equals the default of its kind.

    Raises:
        CheckpointError: Transformers knows no such kind, or a value is not one.
    """
    try:
        return dict(AutoConfig.for_model(kind, **raw).to_dict())
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"{where} is not the config of a DFlash drafter: {reason}") from error


def assembled(
    network: dict[str, Any], own: dict[str, Any], target: TargetShape | None, where: Path
) -> DrafterConfig:
    """The configuration of a drafter from the parts of another layout.

    Args:
        network: Keys as Transformers names them, and what our export has kept.
        own: `block_size`, `mask_token_id` and 0-based `target_layer_ids`.
        target: The target's shape, where the checkpoint does not give it.
        where: The file, for errors.

    Raises:
        CheckpointError: something is missing, or the network is of a kind that cannot be run.
    """
    values = (asdict(target) if target else {}) | network
    for name, meaning in (("num_target_layers", "layers"), ("vocab_size", "embedding rows")):
        if values.get(name) is None:
            raise CheckpointError(f"{where} does not say how many {meaning} its target has; give --target")
        if target is not None and values[name] != getattr(target, name):
            raise CheckpointError(
                f"{where} is for a target with {values[name]} {meaning}, "
                f"that of --target has {getattr(target, name)}"
            )
    # a null would hide that the target does not scale its embedding
    scale = {"input_embedding_scale": values.get("input_embedding_scale") or 1.0}
    cap = {"final_logit_softcapping": values.get("final_logit_softcapping")}
    return parse_config(values | {"dflash_config": own | scale | cap}, where)
