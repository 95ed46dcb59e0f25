"""The golden cache of format 1: old caches stay readable, and the same samples give the same bytes.

After a deliberate change of the format (a new version, in a new folder), write a new one with
`python tests/cache/test_golden.py FOLDER`.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from cache_samples import IDENTITY, bits, make_manifest, read_all

from dflash.cache.index import INDEX_FOLDER
from dflash.cache.manifest import load_manifest
from dflash.cache.reader import CacheReader
from dflash.cache.writer import CacheWriter, Sample, create_cache, finalize

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


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


def write_golden(cache: Path) -> None:
    manifest = create_cache(cache, replace(make_manifest(4, IDENTITY), dropped={"no assistant turn": 1}))
    with CacheWriter(cache, manifest, "golden") as writer:
        for sample in SAMPLES:
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
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_golden_index_is_complete():
    with CacheReader(GOLDEN) as reader:
        assert reader.manifest == load_manifest(GOLDEN)
        assert reader.manifest.complete
        assert reader.index.lengths.sum() == 30
        assert len(list((GOLDEN / INDEX_FOLDER).iterdir())) == 3


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
