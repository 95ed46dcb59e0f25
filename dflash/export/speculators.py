"""The layout of vLLM's `speculators` package, which `vllm serve DIR` opens with nothing else said.

Tensors have the same names as ours; embedding and `lm_head` come from the verifier, as long as the drafter
has the target's whole vocabulary. Taps are counted as Transformers counts `hidden_states`: T + 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash.drafter import DrafterConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.export.facts import KEPT_KEY, TargetShape, Verifier, assembled, kept, with_defaults
from dflash.pretrained import zlab_config

RENAMED: dict[str, str] = {}
"""Beginnings of tensor names that differ: ours to theirs."""
IGNORED = frozenset(
    {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
)
"""Tensors that may stand beside the drafter's own: copies of the target's."""
VERSION = "0.9.0"
"""Of the package whose layout this is."""
_NOT_OF_THE_LAYER = (
    "architectures",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "dtype",
    "torch_dtype",
    "rope_theta",  # stands in rope_parameters
    "rope_scaling",
)


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this layout."""
    return "speculators_model_type" in raw


def write_config(config: DrafterConfig, dtype: torch.dtype, verifier: Verifier | None) -> dict[str, Any]:
    """`config.json` for weights of that dtype.

    `sliding_window_non_causal` is left out: vLLM takes false for causal attention in all layers.

    Raises:
        ConfigError: the target is not known, or scales its embedding, of which this layout knows nothing.
    """
    c = config
    if verifier is None:
        raise ConfigError("the speculators layout names its target; give --target")
    if c.input_embedding_scale != 1.0:
        raise ConfigError(
            f"the target multiplies its embedding by {c.input_embedding_scale:g}, which the speculators "
            "layout cannot say; serve the z-lab layout"
        )
    layer = {key: value for key, value in zlab_config(c).items() if key not in _NOT_OF_THE_LAYER}
    method = {"proposal_type": "greedy", "speculative_tokens": c.block_size - 1, "verifier_accept_k": 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in c.target_layer_ids],
        "mask_token_id": c.mask_token_id,
        "block_size": c.block_size,
        "draft_vocab_size": c.vocab_size,
        "sample_from_anchor": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "dtype": str(dtype).removeprefix("torch."),
        KEPT_KEY: kept(c),
    }


def named_verifier(raw: dict[str, Any]) -> str | None:
    """The target that a `config.json` of this layout names."""
    found = raw.get("speculators_config")
    verifier = found.get("verifier") if isinstance(found, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def read_config(raw: dict[str, Any], target: TargetShape | None, where: Path) -> DrafterConfig:
    """Read a `config.json`.

    Raises:
        CheckpointError: it is incomplete, or of a network that cannot be run.
    """
    try:
        layer = dict(raw["transformer_layer_config"])
        _check_kind(raw, layer, where)
        own = {
            "block_size": raw["block_size"],
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [number - 1 for number in raw["aux_hidden_state_layer_ids"]],
        }
        values = with_defaults(layer.pop("model_type", "qwen3"), layer, where)
        return assembled(values | dict(raw.get(KEPT_KEY) or {}), own, target, where)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is not the config of a DFlash drafter of speculators: {error!r}"
        ) from error


def _check_kind(raw: dict[str, Any], layer: dict[str, Any], where: Path) -> None:
    algorithm = raw["speculators_model_type"]
    if algorithm != "dflash":
        raise CheckpointError(f"{where}: a speculator of kind {algorithm!r}; only dflash can be run")
    if raw.get("sample_from_anchor"):
        raise CheckpointError(
            f"{where}: it samples from the anchor too; only sample_from_anchor false can be run"
        )
    rows, all_rows = raw.get("draft_vocab_size"), layer.get("vocab_size")
    if None not in (rows, all_rows) and rows != all_rows:
        raise CheckpointError(
            f"{where}: it drafts from {rows} of the target's {all_rows} tokens; only all of them can be run"
        )
