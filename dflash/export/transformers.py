"""The layout that Transformers (5.24 and later) opens without remote code: `MuseGlimmerAssistantModel`.

It is the same network under other names: the fusion of the tapped states is called an encoder. Taps are
0-based here too; Transformers adds one itself where it reads `hidden_states`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash.drafter import DrafterConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.export.facts import KEPT_KEY, TargetShape, Verifier, assembled, kept, with_defaults

RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
"""Beginnings of tensor names that differ: ours to theirs."""
IGNORED: frozenset[str] = frozenset()
"""Tensors that may stand beside the drafter's own."""
MODEL_TYPE = "muse_glimmer_assistant"


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this layout."""
    return raw.get("model_type") == MODEL_TYPE


def write_config(config: DrafterConfig, dtype: torch.dtype, _verifier: Verifier | None) -> dict[str, Any]:
    """`config.json` for weights of that dtype.

    Raises:
        ConfigError: the drafter has attention biases, which that network lacks, or taps the last layer.
    """
    c = config
    if c.attention_bias:
        raise ConfigError("a drafter with attention biases has no Transformers counterpart")
    last = c.num_target_layers - 1
    if last in c.target_layer_ids:
        raise ConfigError(
            f"tap {last} is the target's last layer, whose output Transformers gives only behind the final "
            "norm; train a drafter with lower taps"
        )
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id[0] if isinstance(c.eos_token_id, tuple) else c.eos_token_id,
        "pad_token_id": c.pad_token_id,
        "dtype": str(dtype).removeprefix("torch."),
        KEPT_KEY: kept(c),
    }


def read_config(raw: dict[str, Any], target: TargetShape | None, where: Path) -> DrafterConfig:
    """Read a `config.json`.

    Raises:
        CheckpointError: it is incomplete, or of a network that cannot be run.
    """
    values = with_defaults(MODEL_TYPE, {k: v for k, v in raw.items() if k != "model_type"}, where)
    own = {name: values[name] for name in ("block_size", "mask_token_id", "target_layer_ids")}
    ours = raw.get(KEPT_KEY) or {}
    if not isinstance(ours, dict):
        raise CheckpointError(f"{where}: {KEPT_KEY} is {ours!r}, not a table")
    return assembled(values | ours, own, target, where)
