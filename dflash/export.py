"""Checkpoint layouts for clients that do not read the folder as `dflash train` leaves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import ConfigError
from dflash.files import json_bytes
from dflash.pretrained import CONFIG_NAME, WEIGHTS_NAME

_TRANSFORMERS_NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def transformers_config(config: DrafterConfig) -> dict[str, Any]:
    """`config.json` under which Transformers (5.24 and later) runs the same network without remote code.

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
        "model_type": "muse_glimmer_assistant",
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
        "dtype": "bfloat16",
    }


def export_transformers(drafter: Drafter, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a folder that `AutoModel` opens and `generate(speculation_type="dflash")` uses.

    Raises:
        ConfigError: `out` exists, or the network has no counterpart.
    """
    config = transformers_config(drafter.config)
    if out.exists():
        raise ConfigError(f"{out} exists already; give a folder that does not")
    tmp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    tmp.mkdir(parents=True)
    tensors = {
        _renamed(name): tensor.detach().to("cpu", dtype) for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, tmp / WEIGHTS_NAME, metadata={"format": "pt"})
    (tmp / CONFIG_NAME).write_bytes(json_bytes(config))
    tmp.rename(out)


def _renamed(name: str) -> str:
    for ours, theirs in _TRANSFORMERS_NAMES.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name
