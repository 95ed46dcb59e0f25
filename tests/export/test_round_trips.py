"""From any layout to any other and back, nothing changes: no bit of a tensor and no value of the network."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strange_folders import weights
from support import drafter_config, write_target

from dflash.drafter import DrafterConfig
from dflash.export.facts import Verifier
from dflash.export.folder import renamed, write_folder
from dflash.export.give import ExportConfig, export_drafter
from dflash.export.layouts import LAYOUTS
from dflash.export.take import import_drafter, read_drafter
from dflash.files import json_bytes
from dflash.pretrained import load_drafter

DTYPES = (torch.bfloat16, torch.float32)
WAYS = list(product(LAYOUTS, LAYOUTS))


def put(folder, layout, config, tensors):
    """What an export in this layout holds."""
    module, dtype = LAYOUTS[layout], next(iter(tensors.values())).dtype
    raw = module.write_config(config, dtype, Verifier("somebody/target"))
    write_folder(folder, renamed(tensors, module.RENAMED), {"config.json": json_bytes(raw)})
    return folder


def bits(tensors):
    return {
        name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


heads = st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2)])
token = st.integers(0, 90)
configs = st.builds(
    lambda heads, taps, **rest: DrafterConfig(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=100,
        mask_token_id=99,
        num_target_layers=9,
        target_layer_ids=tuple(sorted(taps)),
        **rest,
    ),
    heads=heads,
    # the last layer has no counterpart in Transformers, which is tested beside its layout
    taps=st.sets(st.integers(0, 7), min_size=1, max_size=4),
    hidden_size=st.sampled_from([8, 12]),
    intermediate_size=st.integers(1, 20),
    num_hidden_layers=st.integers(1, 2),
    head_dim=st.sampled_from([2, 4]),
    block_size=st.integers(2, 16),
    rope_theta=st.sampled_from([1e4, 5e5, 1e6, 1e7]),
    rms_norm_eps=st.sampled_from([1e-6, 1e-5]),
    max_position_embeddings=st.integers(16, 1 << 20),
    bos_token_id=st.none() | token,
    eos_token_id=st.none() | token | st.tuples(token, token),
    pad_token_id=st.none() | token,
    final_logit_softcapping=st.none() | st.just(30.0),
)


@settings(max_examples=12, deadline=None)
@given(config=configs, way=st.sampled_from(WAYS), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_over_two_layouts_and_back(tmp_path_factory, config, way, dtype, seed):
    folder, tensors = tmp_path_factory.mktemp("trip"), weights(config, dtype, seed)
    first = read_drafter(put(folder / "first", way[0], config, tensors))
    second = read_drafter(put(folder / "second", way[1], first.config, first.tensors))
    assert (first.layout, second.layout) == way
    assert first.config == second.config == config
    assert bits(second.tensors) == bits(tensors)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_by_the_commands(tmp_path, way):
    """Export, export of the export, import; with every field of the network away from its default."""
    target = str(write_target(tmp_path / "target"))
    config = drafter_config(
        rope_theta=5e5, rms_norm_eps=1e-5, head_dim=16, eos_token_id=(2, 7), bos_token_id=9, block_size=7
    )
    tensors = weights(config)
    source = put(tmp_path / "source", "zlab", config, tensors)
    for number, layout in enumerate(way):
        out = tmp_path / str(number)
        export_drafter(ExportConfig(source, out, layout, target=target))
        source = out
    import_drafter(source, tmp_path / "ours")
    loaded = load_drafter(tmp_path / "ours")
    assert loaded.config == config
    assert bits(loaded.state_dict()) == bits(tensors)
    assert (tmp_path / "ours" / "config.json").read_bytes() == put_config(tmp_path, config)


def put_config(folder, config):
    return (put(folder / "again", "zlab", config, weights(config)) / "config.json").read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wider_dtype_holds_the_same_values_and_says_so(tmp_path, layout):
    """bf16 weights in float32, and float32 back in bf16."""
    target, config = str(write_target(tmp_path / "target")), drafter_config()
    tensors = weights(config)
    source = put(tmp_path / "source", "zlab", config, tensors)
    export_drafter(ExportConfig(source, tmp_path / "wide", layout, "float32", target))
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    wide = read_drafter(tmp_path / "wide").tensors
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    export_drafter(ExportConfig(tmp_path / "wide", tmp_path / "narrow", layout, "bfloat16", target))
    assert bits(read_drafter(tmp_path / "narrow").tensors) == bits(tensors)


def test_an_embedding_scale_survives_where_the_layout_has_a_place_for_it(tmp_path):
    config = drafter_config(input_embedding_scale=5.656854249492381, final_logit_softcapping=30.0)
    tensors = weights(config)
    for layout in ("zlab", "transformers"):
        assert read_drafter(put(tmp_path / layout, layout, config, tensors)).config == config
