"""The golden caches of format 1: old caches stay readable, and the same samples give the same bytes.

After a deliberate change of the format (a new version, in a new folder), write new ones with
`python tests/cache/test_golden.py FOLDER [CODEC]`.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from cache_samples import IDENTITY, bits, make_manifest, read_all
from safetensors.numpy import load_file

from dflash.cache.fragment import INDEX_FOLDER
from dflash.cache.manifest import Manifest, load_manifest
from dflash.cache.reader import CacheReader
from dflash.cache.scales import scales_text
from dflash.cache.writer import CacheWriter, Sample, create_cache, finalize

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
CODECS = ("lossless", "int8", "fp8")
SHARD = "shards/len-00008/golden-000000.safetensors"


def golden_sample(number: int) -> Sample:
    """Plain arithmetic, so that no generator's version matters."""
    length = (3, 4, 7, 16)[number]
    values = torch.arange(length * 2 * 4, dtype=torch.float32) * (number + 1) - 8
    return Sample(
        id=(number + 1) * 0x9E3779B97F4A7C15 % (1 << 64),
        input_ids=np.arange(length, dtype=np.int32) * 3 + number,
        loss_mask=(np.arange(length) % 3 > 0).astype(np.uint8),
        hidden_states=values.reshape(length, 2, 4).to(torch.bfloat16),
    )


SAMPLES = [golden_sample(number) for number in range(4)]


def codec_sample(number: int) -> Sample:
    """5 and 6 tokens of 32 channels: a ramp, a row of zeros, a massive value, negative zero, a subnormal."""
    length = 5 + number
    values = (torch.arange(length * 2 * 32, dtype=torch.float32) * 37 % 101 - 50) / 8
    states = values.reshape(length, 2, 32).to(torch.bfloat16)
    states[1, 0] = 0
    states[2, 1, 5 + number] = 25_000
    states[3, 0, :2] = torch.tensor([-0.0, 1e-40])
    return replace(
        golden_sample(0),
        id=77 + number,
        input_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        hidden_states=states,
    )


CODEC_SAMPLES = [codec_sample(number) for number in range(2)]


def codec_manifest(codec: str) -> Manifest:
    """Channel scales of 1/4, 1/2, 1 and 2."""
    scales = torch.tensor([0.25, 0.5, 1.0, 2.0]).repeat(2, 8)
    text, digest = scales_text(scales)
    if codec != "int8":
        text, digest = None, None
    identity = replace(IDENTITY, hidden_size=32, codec=codec, codec_digest=digest)
    return replace(make_manifest(2, identity), channel_scales=text)


def write_golden(cache: Path, codec: str = "raw") -> None:
    raw = replace(make_manifest(4, IDENTITY), dropped={"no assistant turn": 1})
    manifest = create_cache(cache, raw if codec == "raw" else codec_manifest(codec))
    with CacheWriter(cache, manifest, "golden") as writer:
        for sample in SAMPLES if codec == "raw" else CODEC_SAMPLES:
            writer.write(sample)
    finalize(cache)


def contents(cache: Path) -> dict[str, bytes]:
    paths = sorted(path for path in cache.rglob("*") if path.is_file())
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in paths}


def test_the_golden_cache_reads_back_bit_for_bit():
    assert sorted(map(bits, read_all(GOLDEN))) == sorted(map(bits, SAMPLES))


def test_the_same_samples_give_the_same_bytes(tmp_path):
    write_golden(tmp_path / "cache")
    written, golden = contents(tmp_path / "cache"), contents(GOLDEN)
    assert written.keys() == golden.keys()
    assert [name for name in golden if written[name] != golden[name]] == []


def test_the_specification_alone_is_enough_to_read_a_sample():
    """docs/cache-format.md, followed with the struct module."""
    content = (GOLDEN / "shards" / "len-00004" / "golden-000000.safetensors").read_bytes()
    size = struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8 : 8 + size])
    start = {name: 8 + size + header[name]["data_offsets"][0] for name in header if name != "__metadata__"}
    assert size == 4088
    assert start["hidden_states"] == 4096
    offsets = struct.unpack_from("<3q", content, start["offsets"])
    assert offsets == (0, 3, 7)
    ids = struct.unpack_from("<4i", content, start["input_ids"] + 4 * offsets[1])
    mask = struct.unpack_from("<4B", content, start["loss_mask"] + offsets[1])
    assert list(ids) == SAMPLES[1].input_ids.tolist()
    assert list(mask) == SAMPLES[1].loss_mask.tolist()
    raw = struct.unpack_from("<32H", content, start["hidden_states"] + 2 * 8 * offsets[1])
    floats = [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in raw]
    assert floats == SAMPLES[1].hidden_states.float().reshape(-1).tolist()


def test_the_page_of_the_format_names_every_key_and_column():
    page = (Path(__file__).parents[2] / "docs" / "cache-format.md").read_text()
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    header = json.loads(next((GOLDEN / "shards").glob("*/*")).read_bytes()[8:4096])
    columns = ["id", "bucket", "shard", "row", "length", "supervised", "offset", "nbytes", "crc32c"]
    keys = [*manifest, *manifest["identity"], *header, *header["__metadata__"], *columns]
    keys += ["channel_scales", "codec_digest", "codec_error", "coded", "extents"]
    keys += ["tokens", "relative_error", "escaped", "kl"]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_golden_index_is_complete():
    with CacheReader(GOLDEN) as reader:
        assert reader.manifest == load_manifest(GOLDEN)
        assert reader.manifest.complete
        assert reader.index.lengths.sum() == 30
        assert len(list((GOLDEN / INDEX_FOLDER).iterdir())) == 3


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_the_same_samples_give_the_same_coded_bytes(tmp_path, codec):
    """Not so with `lossless`, where zstd may choose other bytes for the same planes in another version."""
    write_golden(tmp_path / "cache", codec)
    assert contents(tmp_path / "cache") == contents(GOLDEN.parent / f"v1-{codec}")


def test_the_golden_lossless_cache_reads_back_bit_for_bit():
    assert sorted(map(bits, read_all(GOLDEN.parent / "v1-lossless"))) == sorted(map(bits, CODEC_SAMPLES))


def bf16(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def coded_parts(codec: str, sample: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Extent of a golden sample by the tensors' names alone, then states as read and as written, float32."""
    cache = GOLDEN.parent / f"v1-{codec}"
    tensors = load_file(cache / SHARD)
    start, end = tensors["extents"][sample : sample + 2]
    (found,) = (one for one in read_all(cache) if one.id == 77 + sample)
    return (
        tensors["coded"][start:end].tobytes(),
        found.hidden_states.float().numpy(),
        CODEC_SAMPLES[sample].hidden_states.float().numpy(),
    )


@pytest.mark.parametrize("sample", [0, 1])
def test_the_specification_of_lossless_is_enough_to_decode_it(sample):
    extent, _, states = coded_parts("lossless", sample)
    tokens, count = len(states), states.size
    size = struct.unpack_from("<Q", extent)[0]
    plain = np.frombuffer(extent, np.uint8, count, 8).reshape(states.shape).astype(np.uint16)
    exponents = np.frombuffer(zstandard.decompress(extent[8 + count : 8 + count + size]), np.uint8)
    exponents = exponents.reshape(2, tokens, 32).transpose(1, 0, 2).astype(np.uint16)
    words = (plain & 0x80) << 8 | exponents << 7 | plain & 0x7F
    assert bf16(words).tobytes() == states.tobytes()


@pytest.mark.parametrize("sample", [0, 1])
def test_the_specification_of_int8_is_enough_to_decode_it(sample):
    extent, found, states = coded_parts("int8", sample)
    rows, count = len(states) * 2, states.size
    escaped, zero = struct.unpack_from("<II", extent)
    assert (escaped, zero) == (1, 0)
    codes = np.frombuffer(extent, np.int8, count, 8).reshape(rows, 32)
    lower = np.frombuffer(extent, np.uint8, 32, 8 + count)
    (row,) = struct.unpack_from("<I", extent, 8 + count + 32)
    scales = bf16(np.frombuffer(extent, "<u2", rows, 8 + count + 36))
    channels = np.tile(np.float32([0.25, 0.5, 1.0, 2.0]), 8)
    values = codes * (scales[:, None] * channels)
    values[row] = bf16(codes[row].view(np.uint8).astype(np.uint16) << 8 | lower)
    assert row == 2 * 2 + 1
    assert np.array_equal(values[row], states.reshape(rows, 32)[row])
    expected = torch.from_numpy(values.reshape(states.shape)).bfloat16().float().numpy()
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("sample", [0, 1])
def test_the_specification_of_fp8_is_enough_to_decode_it(sample):
    extent, found, states = coded_parts("fp8", sample)
    rows, count = len(states) * 2, states.size
    codes = np.frombuffer(extent, np.uint8, count)
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7) / 8
    size = np.where(exponent, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    scales = bf16(np.frombuffer(extent, "<u2", rows, count))
    values = (np.where(codes >> 7, -size, size).reshape(rows, 32) * scales[:, None]).astype(np.float32)
    expected = torch.from_numpy(values.reshape(states.shape)).bfloat16().float().numpy()
    assert np.array_equal(found, expected)


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]), *sys.argv[2:])
