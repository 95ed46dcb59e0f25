"""A drafter on disk: the folder that z-lab's package, vLLM and SGLang load.

`config.json` and `model.safetensors` with the 11 L + 3 bare tensors, in bf16 (contract section 5). Loading
and saving check the exact set of tensors, their shapes and values: servers ignore unknown and missing tensors
silently and would serve random weights.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.files import json_bytes

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


def zlab_config(config: DrafterConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """`config.json` of the z-lab layout, for weights of that dtype."""
    c, dtype_name = config, str(dtype).removeprefix("torch.")
    shared: dict[str, Any] = {
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
    }
    if c.input_embedding_scale != 1.0:
        shared["input_embedding_scale"] = c.input_embedding_scale
    if c.final_logit_softcapping is not None:
        shared["final_logit_softcapping"] = c.final_logit_softcapping
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": c.block_size,
        "dflash_config": shared,
        "num_target_layers": c.num_target_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "is_causal": False,
        "hidden_act": "silu",
        "attention_bias": c.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "rope_scaling": None,
        "max_position_embeddings": c.max_position_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_id) if isinstance(c.eos_token_id, tuple) else c.eos_token_id,
        "pad_token_id": c.pad_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }


def parse_config(raw: dict[str, Any], where: Path) -> DrafterConfig:
    """Read a z-lab `config.json`.

    Raises:
        CheckpointError: a key is missing, or the network is of a kind this package cannot run.
    """
    try:
        own, rope = raw["dflash_config"], raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        _check_kind(raw, rope, where)
        return DrafterConfig(
            **{key: raw[key] for key in _PLAIN_KEYS},
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            block_size=own.get("block_size") or raw["block_size"],
            mask_token_id=own["mask_token_id"],
            target_layer_ids=tuple(own["target_layer_ids"]),
            rope_theta=float(raw.get("rope_theta") or rope["rope_theta"]),
            attention_bias=bool(raw.get("attention_bias", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=_ids(raw.get("eos_token_id")),
            pad_token_id=raw.get("pad_token_id"),
            input_embedding_scale=float(own.get("input_embedding_scale", 1.0)),
            final_logit_softcapping=own.get("final_logit_softcapping"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is not the config of a DFlash drafter: {error!r}") from error
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


_PLAIN_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_target_layers",
    "rms_norm_eps",
    "max_position_embeddings",
)


def _check_kind(raw: dict[str, Any], rope: dict[str, Any], where: Path) -> None:
    for kind in raw.get("layer_types") or ():
        if kind != "full_attention":
            raise CheckpointError(f"{where}: a layer of kind {kind!r}; only full_attention can be run")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise CheckpointError(f"{where}: RoPE of type {rope_type!r}; only the default RoPE can be run")
    rotated = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated is not None and float(rotated) != 1.0:
        raise CheckpointError(f"{where}: RoPE turns {rotated} of a head; only whole heads can be run")


def _ids(value: Any) -> int | tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else value


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter, without building it."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def parameter_count(config: DrafterConfig) -> int:
    """Weights of a drafter, without building it."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def check_tensors(tensors: dict[str, Tensor], config: DrafterConfig, where: Path) -> None:
    """Compare a checkpoint's tensors with those its config calls for.

    Raises:
        CheckpointError: names the first tensors that are missing, unknown, of another shape, or not numbers.
    """
    expected = expected_shapes(config)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors are missing ({', '.join(missing[:3])}) and "
            f"{len(unknown)} unknown ({', '.join(unknown[:3])}); a server would run random weights"
        )
    for name, shape in expected.items():
        if not tensors[name].is_floating_point():
            raise CheckpointError(f"{where}: {name} has dtype {tensors[name].dtype}, not a float dtype")
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, its config says {shape}"
            )
        if not tensors[name].isfinite().all():
            raise CheckpointError(f"{where}: {name} holds NaN or infinity")


def write_drafter(drafter: Drafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the servable files into an existing folder that nobody reads yet.

    Raises:
        CheckpointError: a weight is not finite; nothing is written.
    """
    write_tensors(drafter.state_dict(), drafter.config, folder, dtype)


def write_tensors(
    weights: dict[str, Tensor], config: DrafterConfig, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the servable files of a drafter's tensors into an existing folder that nobody reads yet.

    Raises:
        CheckpointError: a weight is not finite; nothing is written.
    """
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    check_tensors(tensors, config, folder)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_bytes(json_bytes(zlab_config(config, dtype)))


def load_drafter(folder: Path, dtype: torch.dtype | None = None) -> Drafter:
    """Load a drafter from a folder in the z-lab layout.

    Args:
        folder: Holds `config.json` and `model.safetensors`.
        dtype: Dtype of the weights; as stored when None.

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors are not exactly those of the config.
    """
    path = folder / CONFIG_NAME
    try:
        raw = json.loads(path.read_bytes())
        tensors = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no drafter ({error}); give a run folder or a checkpoint"
        ) from error
    config = parse_config(raw, path)
    check_tensors(tensors, config, folder / WEIGHTS_NAME)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(dtype) if dtype else drafter
