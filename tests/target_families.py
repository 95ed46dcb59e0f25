"""Tiny random models of real families, as Transformers folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HIDDEN, VOCAB = 4, 32, 120
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = _SIZE | {"num_key_value_heads": 2, "head_dim": 8}
_MOE = {"num_experts_per_tok": 2}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_GQA),
    "llama-tied": lambda: LlamaConfig(**_GQA, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZE, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**_GQA),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_GQA, **_MOE, num_experts=4, moe_intermediate_size=24),
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **_GQA,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_GQA,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt-oss": lambda: GptOssConfig(**_GQA, **_MOE, num_local_experts=4, sliding_window=6),
    "mistral": lambda: MistralConfig(**_GQA, sliding_window=6),
    "phi3": lambda: Phi3Config(**_SIZE, num_key_value_heads=2),
    "gpt-neox": lambda: GPTNeoXConfig(**_SIZE),
}


def write_family(folder: Path, name: str, seed: int = 0) -> Path:
    """A random model of that family."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms that scale by exactly one would hide a wrong one
                parameter.add_(torch.rand_like(parameter) * 0.5)
            elif "sinks" in parameter_name:
                parameter.normal_()
    model.save_pretrained(folder)
    return folder
