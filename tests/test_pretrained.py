"""A drafter's folder: exactly the tensors and the config that servers read, and nothing else is accepted."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import drafter_config

from dflash.drafter import Drafter, init_weights
from dflash.errors import CheckpointError
from dflash.pretrained import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    expected_shapes,
    load_drafter,
    parse_config,
    write_drafter,
    zlab_config,
)


@pytest.fixture
def drafter() -> Drafter:
    drafter = Drafter(drafter_config(eos_token_id=(1, 2), rope_theta=1e6))
    init_weights(drafter, seed=1)
    return drafter


@pytest.fixture
def folder(drafter, tmp_path):
    write_drafter(drafter, tmp_path)
    return tmp_path


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)


def edit_config(folder, **changes) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_saving_and_loading_keeps_every_bf16_bit(drafter, folder):
    loaded = load_drafter(folder)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16())
    again = folder / "again"
    again.mkdir()
    write_drafter(loaded, again)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_loading_in_another_dtype_converts_every_weight(folder):
    assert {p.dtype for p in load_drafter(folder, torch.float32).parameters()} == {torch.float32}


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_drafter_has_11_tensors_a_layer_and_3_more_by_their_published_names(layers):
    config = drafter_config(num_hidden_layers=layers)
    hidden, heads, groups, mlp = 32, 32, 16, 48
    of_layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (groups, hidden),
        "self_attn.v_proj": (groups, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (8,),
        "self_attn.k_norm": (8,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    expected = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(layers):
        expected |= {f"layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    assert len(expected) == 11 * layers + 3
    assert expected_shapes(config) == expected


def test_the_config_holds_what_servers_read(folder):
    raw = json.loads((folder / CONFIG_NAME).read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [1, 3]},
        "num_target_layers": 6,
        "head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
        "is_causal": False,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": None,
        "vocab_size": 260,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": [1, 2],
    }
    assert {key: raw.get(key, "absent") for key in expected} == expected
    assert not raw.keys() & {"partial_rotary_factor", "mrope_section", "auto_map"}


def test_a_scaled_embedding_and_capped_logits_survive_the_round_trip(tmp_path):
    config = drafter_config(input_embedding_scale=5.5, final_logit_softcapping=30.0, attention_bias=True)
    assert parse_config(json.loads(json.dumps(zlab_config(config))), tmp_path) == config


NORM = "layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(NORM), rf"1 tensors are missing \({NORM}\) and 0 unknown"),
        (
            lambda tensors: tensors.update(lm_head=torch.ones(2)),
            r"0 tensors are missing \(\) and 1 unknown \(lm_head\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors.pop("norm.weight")}),
            r"missing \(norm.weight\) and 1 unknown \(model.norm.weight\)",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.ones(9)}),
            rf"{NORM} has shape \(9,\), its config says \(8,\)",
        ),
        (lambda tensors: tensors[NORM].fill_(float("nan")), f"{NORM} holds NaN or infinity"),
        (lambda tensors: tensors[NORM][3:4].fill_(float("-inf")), f"{NORM} holds NaN or infinity"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(8, dtype=torch.int32)}),
            f"{NORM} has dtype torch.int32",
        ),
    ],
)
def test_other_tensors_than_the_configs_are_refused_by_name(folder, change, text):
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=text):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a layer of kind 'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "RoPE of type 'yarn'"),
        ({"dflash_config": None}, "not the config of a DFlash drafter"),
        ({"dflash_config": {}}, "not the config of a DFlash drafter: KeyError"),
        ({"rope_theta": None, "rope_parameters": None}, "not the config of a DFlash drafter: KeyError"),
        ({"num_target_layers": 3}, "tap 3 is outside the target's layers 0..2"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(folder, changes, text):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=text):
        load_drafter(folder)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_or_cut_file_is_one_clear_line(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:20])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds no drafter") as caught:
            load_drafter(folder)
        assert "\n" not in str(caught.value)
        path.unlink(missing_ok=True)


def test_a_config_that_is_no_object_is_refused(folder):
    (folder / CONFIG_NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="not the config"):
        load_drafter(folder)


def test_weights_that_are_not_finite_are_never_written(drafter, tmp_path):
    drafter.norm.weight.data[0] = float("inf")
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN or infinity"):
        write_drafter(drafter, tmp_path)
    assert not list(tmp_path.iterdir())
