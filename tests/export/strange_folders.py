"""Drafter folders as other packages write them, and as nobody should."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from support import drafter_config

from dflash.drafter import Drafter, init_weights
from dflash.files import json_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from dflash.drafter import DrafterConfig


def weights(config: DrafterConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> dict[str, Tensor]:
    """Random tensors of a drafter; norms too are not one."""
    drafter = Drafter(config)
    init_weights(drafter, seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = drafter.state_dict()
    return {
        name: (t + torch.randn(t.shape, generator=generator) * 0.1).to(dtype) for name, t in tensors.items()
    }


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder with these contents."""
    path.mkdir(parents=True)
    (path / "config.json").write_bytes(json_bytes(config))
    save_file(tensors, path / "model.safetensors")
    return path


def sharded(path: Path) -> Path:
    """Split the weights of a folder over two files behind an index."""
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, path / part)
    weight_map = {name: part for part, held in parts.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def released_by_zlab(**changes: Any) -> dict[str, Any]:
    """`config.json` with the keys that z-lab's first releases have: block size outside, theta bare."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]},
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 8192,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 6,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 260,
    } | changes


def saved_by_speculators(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`config.json` as speculators saves it: without what equals Qwen3's defaults; taps count from one."""
    network = {
        "model_type": "qwen3",
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 260,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 4,
        "draft_vocab_size": 260,
        "mask_token_id": 3,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/target"},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": network | (layer or {}),
    } | changes


def released_for_transformers(**changes: Any) -> dict[str, Any]:
    """`config.json` of a Muse Glimmer assistant as Meta writes it, but with full attention."""
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": [1, 3],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    } | changes


FOREIGN = {
    "zlab": released_by_zlab,
    "speculators": saved_by_speculators,
    "transformers": released_for_transformers,
}
"""A configuration of each layout that is not our export."""
NETWORK = drafter_config(rope_theta=1e6)
"""The network that all of them describe."""
