"""A shard's bytes: any safetensors client opens them, and every value survives."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_samples import IDENTITY, bits, make_manifest, make_sample, make_samples, read_all, write_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from dflash.cache.reader import CacheReader
from dflash.cache.shard import DATA_START, Sample, ShardLayout, check_sample, is_shard_name, shard_name
from dflash.errors import CacheError


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_safetensors_opens_a_shard_and_finds_the_samples_ragged_in_it(tmp_path, dtype):
    identity = replace(IDENTITY, dtype=dtype)
    samples = make_samples(20, identity)
    cache = write_cache(tmp_path / "cache", samples, identity)
    found = []
    index = CacheReader(cache).index
    for number, layout in enumerate(index.layouts):
        tensors = load_file(cache / layout.name)
        offsets = tensors["offsets"].tolist()
        assert tensors["hidden_states"].dtype == getattr(torch, dtype)
        with safe_open(cache / layout.name, "np") as file:
            assert file.metadata()["bucket"] == str(layout.edge)
        places = index.locate(np.arange(len(index)))
        ids = index.ids[places.shards == number][np.argsort(places.shard_rows[places.shards == number])]
        for sample_id, start, end in zip(ids.tolist(), offsets[:-1], offsets[1:], strict=True):
            ids_, mask = tensors["input_ids"][start:end].numpy(), tensors["loss_mask"][start:end].numpy()
            found.append(Sample(sample_id, ids_, mask, tensors["hidden_states"][start:end]))
    assert sorted(map(bits, found)) == sorted(map(bits, samples))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 50), st.integers(1, 2000), st.sampled_from(["bfloat16", "float32"]), st.integers(1, 40))
def test_every_tensor_is_aligned_and_the_header_fits_its_place(samples, tokens, dtype, taps):
    identity = replace(IDENTITY, dtype=dtype, num_target_layers=taps, taps=tuple(range(taps)))
    name = shard_name(16, "w" * 93 + "-000000")
    layout = ShardLayout(name, make_manifest(1, identity), 16, samples, tokens)
    header = layout.header()
    assert len(header) == DATA_START
    assert struct.unpack("<Q", header[:8])[0] == DATA_START - 8
    value = json.loads(header[8:])
    for tensor, alignment in (("hidden_states", 4), ("offsets", 8), ("input_ids", 4), ("loss_mask", 1)):
        assert value[tensor]["data_offsets"][0] % alignment == 0
    assert value["loss_mask"]["data_offsets"][1] + DATA_START == layout.file_size


SPECIAL = {
    "bfloat16": [0x7FC1, 0xFFC1, 0x7F81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x807F, 0x7F7F, 0x46C3],
    "float32": [
        0x7FC00001,
        0xFFA00001,
        0x7F800001,
        0x7F800000,
        0x80000000,
        0x00000001,
        0x007FFFFF,
        0x46C35000,
    ],
}


@pytest.mark.parametrize("dtype", SPECIAL)
def test_nan_payloads_infinities_subnormals_and_negative_zero_survive(tmp_path, dtype):
    identity = replace(IDENTITY, dtype=dtype)
    integers = torch.int16 if dtype == "bfloat16" else torch.int32
    patterns = np.resize(np.array(SPECIAL[dtype]), 16 * 2 * 4).astype(
        np.uint16 if dtype == "bfloat16" else np.uint32
    )
    states = torch.from_numpy(patterns.view(f"i{patterns.itemsize}")).to(integers).view(getattr(torch, dtype))
    sample = replace(make_sample(1, identity, 16), hidden_states=states.view(16, 2, 4))
    cache = write_cache(tmp_path / "cache", [sample], identity)
    assert bits(read_all(cache)[0]) == bits(sample)


def test_a_view_with_strides_is_stored_by_value(tmp_path):
    sample = make_sample(1, length=6)
    strided = sample.hidden_states.transpose(0, 1).contiguous().transpose(0, 1)
    cache = write_cache(tmp_path / "cache", [replace(sample, hidden_states=strided)])
    assert bits(read_all(cache)[0]) == bits(sample)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"id": -1}, "unsigned"),
        ({"id": 1 << 64}, "unsigned"),
        ({"hidden_states": torch.zeros(5, 2, 4, dtype=torch.float16)}, "float16, not bfloat16"),
        ({"hidden_states": torch.zeros(5, 3, 4, dtype=torch.bfloat16)}, r"\(5, 3, 4\), not \(5, 2, 4\)"),
        ({"hidden_states": torch.zeros(4, 2, 4, dtype=torch.bfloat16)}, "hidden states"),
        ({"input_ids": np.zeros(5, np.int64)}, "int32"),
        ({"input_ids": np.full(5, 100, np.int32)}, "vocabulary of 100"),
        ({"input_ids": np.full(5, -1, np.int32)}, "vocabulary"),
        ({"input_ids": np.zeros(0, np.int32)}, "0 tokens"),
        ({"loss_mask": np.ones(4, np.uint8)}, "loss_mask"),
        ({"loss_mask": np.full(5, 2, np.uint8)}, "loss_mask"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_by_name(change, text):
    with pytest.raises(CacheError, match=text):
        check_sample(replace(make_sample(1, length=5), **change), make_manifest(1))


def test_only_names_inside_the_shards_folder_are_shards():
    assert is_shard_name(shard_name(256, "rank0-000000"))
    for name in (
        "shards/../manifest.json",
        "/etc/passwd",
        "shards/len-00256/../../x.safetensors",
        "shards/len-00256/.x.safetensors",
        "shards/len-00256/a/b.safetensors",
        "shards/len-00256/a.safetensors\n",
        "",
    ):
        assert not is_shard_name(name)
    with pytest.raises(CacheError, match="plain name"):
        shard_name(256, "../x")
