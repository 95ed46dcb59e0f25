"""What `dflash cache info` will show, from the manifest, the index and file sizes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cache_samples import IDENTITY, make_manifest, make_samples, write_cache

from dflash.cache.info import cache_info, format_bytes, format_info
from dflash.cache.manifest import create_cache, load_manifest, save_manifest
from dflash.errors import CacheError

SAMPLES = make_samples(24)


def test_counts_and_sizes_are_those_of_the_samples(tmp_path):
    cache = write_cache(tmp_path / "cache", SAMPLES)
    save_manifest(cache, replace(load_manifest(cache), dropped={"empty answer": 3}))
    info = json.loads(json.dumps(cache_info(cache)))
    lengths = [len(sample.input_ids) for sample in SAMPLES]
    assert info["complete"]
    assert (info["samples"], info["expected_samples"], info["tokens"]) == (24, 24, sum(lengths))
    assert info["supervised_tokens"] == sum(int(sample.loss_mask.sum()) for sample in SAMPLES)
    assert [bucket["edge"] for bucket in info["buckets"]] == list(IDENTITY.bucket_edges)
    for low, bucket in zip((0, *IDENTITY.bucket_edges), info["buckets"], strict=False):
        inside = [length for length in lengths if low < length <= bucket["edge"]]
        assert (bucket["samples"], bucket["tokens"]) == (len(inside), sum(inside))
    assert info["shard_bytes"] == sum(path.stat().st_size for path in (cache / "shards").glob("*/*"))
    assert info["total_bytes"] == sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert info["bytes_per_token"] == info["shard_bytes"] / sum(lengths)
    assert info["dropped"] == {"empty answer": 3}
    assert info["identity"]["taps"] == [0, 2]
    text = format_info(info)
    for part in ("complete", "24 of 24", "0, 2 of 4 layers", "3 empty answer", "█" * 30):
        assert part in text


def test_an_empty_incomplete_cache_can_be_described(tmp_path):
    create_cache(tmp_path / "cache", make_manifest(5))
    info = cache_info(tmp_path / "cache")
    assert (info["samples"], info["tokens"], info["bytes_per_token"], info["complete"]) == (0, 0, None, False)
    assert "INCOMPLETE" in format_info(info)


def test_a_lost_shard_is_shown(tmp_path):
    cache = write_cache(tmp_path / "cache", SAMPLES)
    lost = min((cache / "shards").glob("*/*"))
    lost.unlink()
    info = cache_info(cache)
    assert info["missing_shards"] == [lost.relative_to(cache).as_posix()]
    assert "MISSING" in format_info(info)


def test_a_folder_of_something_else_is_an_error(tmp_path):
    with pytest.raises(CacheError, match="not a cache"):
        cache_info(tmp_path)


def test_sizes_read_well():
    assert [format_bytes(n) for n in (0, 1023, 1536, 1 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 TiB",
    ]
