"""Caches of every codec: written, read in any order, opened by safetensors, and checked to the last bit."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_samples import IDENTITY, bits, make_manifest, make_samples, read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dflash.cache.codec import codec_of, decoded
from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.fragment import encode_fragment, fragment_path
from dflash.cache.index import load_index
from dflash.cache.manifest import create_cache
from dflash.cache.reader import CacheReader
from dflash.cache.scales import calibrate, scales_text
from dflash.cache.writer import CacheWriter, finalize
from dflash.errors import CacheCorrupt, CacheError

CODED = [codec for codec in CODECS if codec != "raw"]


def finite(sample):
    states = torch.nan_to_num(sample.hidden_states.float(), 0.0, 0.0, 0.0).clamp(-25_000, 25_000)
    return replace(sample, hidden_states=states.bfloat16())


SAMPLES = [finite(sample) for sample in make_samples(24)]


def write_coded(cache, codec, samples=SAMPLES, shard_bytes=400):
    text, digest = scales_text(calibrate(torch.cat([sample.hidden_states for sample in samples])))
    text, digest = (text, digest) if codec == "int8" else (None, None)
    identity = replace(IDENTITY, codec=codec, codec_digest=digest)
    manifest = replace(make_manifest(len(samples), identity), channel_scales=text)
    create_cache(cache, manifest)
    with CacheWriter(cache, manifest, "w", shard_bytes) as writer:
        for sample in samples:
            writer.write(sample)
    finalize(cache)
    return cache


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    return {codec: write_coded(folder / codec, codec) for codec in CODED}


@pytest.fixture(scope="module")
def expected(finished):
    """Bits of each sample by id, as its codec alone gives it back."""
    found = {}
    for codec, cache in finished.items():
        one = codec_of(CacheReader(cache).manifest)
        for sample in SAMPLES:
            extent = torch.from_numpy(one.encode(sample.hidden_states))
            states = decoded(one.parse(extent, len(sample.input_ids)))
            found[codec, sample.id] = bits(replace(sample, hidden_states=states))
    return found


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CODED), st.lists(st.integers(0, 23), max_size=30))
def test_rows_come_in_the_order_asked_for_whatever_the_codec(finished, expected, codec, rows):
    with CacheReader(finished[codec]) as reader:
        buffer = torch.empty(reader.buffer_bytes(rows), dtype=torch.uint8)
        samples = reader.read(rows, buffer)
        assert [sample.id for sample in samples] == reader.index.ids[np.array(rows, np.int64)].tolist()
    assert all(bits(sample) == expected[codec, sample.id] for sample in samples)


def test_a_lossless_cache_gives_back_every_bit(finished):
    assert sorted(map(bits, read_all(finished["lossless"]))) == sorted(map(bits, SAMPLES))


@pytest.mark.parametrize("codec", CODED)
def test_coded_states_are_kept_for_the_device_where_that_is_asked_for(finished, expected, codec):
    with CacheReader(finished[codec]) as reader:
        for sample in reader.read(range(len(reader.index)), keep_coded=True):
            assert (sample.coded is not None) == (codec in LOSSY_CODECS)
            whole = sample if sample.coded is None else replace(sample, hidden_states=sample.coded.decode())
            assert bits(whole) == expected[codec, sample.id]


@pytest.mark.parametrize("codec", CODED)
def test_safetensors_opens_a_coded_shard_and_finds_each_extent(finished, codec):
    cache = finished[codec]
    index = load_index(cache, CacheReader(cache).manifest)
    extents = index.locate(np.arange(len(index)))
    for number, layout in enumerate(index.layouts):
        tensors = load_file(cache / layout.name)
        assert set(tensors) == {"coded", "extents", "input_ids", "loss_mask", "offsets"}
        mine = extents.shards == number
        starts = tensors["extents"].numpy()
        assert sorted(extents.offsets[mine] - 4096) == starts[:-1].tolist()
        assert np.array_equal(np.diff(starts)[extents.shard_rows[mine]], extents.nbytes[mine])
        assert starts[-1] == len(tensors["coded"])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODED), st.integers(0, 1 << 30), st.integers(0, 7))
def test_a_flipped_bit_of_a_coded_shard_is_found(finished, tmp_path_factory, codec, place, bit):
    cache = tmp_path_factory.mktemp("flip") / "cache"
    shutil.copytree(finished[codec], cache)
    shards = sorted((cache / "shards").glob("*/*"))
    path = shards[place % len(shards)]
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(CacheCorrupt, match=path.name):
        read_all(cache)


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("size", [0, 8, 1 << 40, -8])
def test_an_extent_of_an_impossible_size_is_refused_by_the_index(finished, tmp_path, codec, size):
    cache = tmp_path / "cache"
    shutil.copytree(finished[codec], cache)
    manifest = CacheReader(cache).manifest
    name = load_index(cache, manifest).layouts[0].name
    edge = int(name.split("len-")[1][:5])
    columns = {
        "id": [1],
        "bucket": [edge],
        "shard": [0],
        "row": [0],
        "length": [edge],
        "supervised": [1],
        "offset": [4096],
        "nbytes": [size],
        "crc32c": [0],
    }
    for path in (cache / "index").iterdir():
        path.unlink()
    fragment_path(cache, "w").write_bytes(encode_fragment([name], columns, "w", manifest.digest()))
    with pytest.raises(CacheCorrupt, match="nbytes"):
        load_index(cache, manifest)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_lossy_writer_refuses_nan_by_name_and_commits_nothing(tmp_path, codec):
    bad = replace(SAMPLES[3], hidden_states=torch.full_like(SAMPLES[3].hidden_states, float("nan")))
    with pytest.raises(CacheError, match=f"sample {bad.id}: .*NaN"):
        write_coded(tmp_path / "cache", codec, [*SAMPLES[:3], bad], 1 << 30)
    assert not list((tmp_path / "cache").glob("shards/*/*"))
