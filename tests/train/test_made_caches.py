"""Training takes a cache that a tool has made as it takes one from extraction."""

from __future__ import annotations

import pytest
from support import write_cache
from tiny_runs import LENGTHS, tiny_config

from dflash.cache.recipes import Choice, drop_taps, merge, rebucket, subset
from dflash.errors import CacheCorrupt
from dflash.head import HEAD_NAME
from dflash.train.trainer import train
from dflash.world import World

MAKE = {
    "subset": lambda cache, out: subset(cache, out, Choice("length < 60", 0.8)),
    "merge": lambda cache, out: merge([cache, cache], out),
    "rebucket": lambda cache, out: rebucket(cache, out, (30, 64)),
    "drop-taps": lambda cache, out: drop_taps(cache, out, (3,)),
}


@pytest.mark.parametrize("tool", MAKE)
def test_a_made_cache_can_be_trained_on(tmp_path, tool):
    cache = write_cache(tmp_path / "cache", LENGTHS)
    MAKE[tool](cache, tmp_path / "made")
    result = train(tiny_config(tmp_path / "made", tmp_path / "run", max_steps=2), World())
    assert result.steps == 2


@pytest.mark.parametrize("name", [HEAD_NAME, "target_config.json"])
def test_training_never_starts_from_a_part_with_a_flipped_bit(tmp_path, name):
    cache = write_cache(tmp_path / "cache", LENGTHS)
    content = bytearray((cache / name).read_bytes())
    content[-3] ^= 1
    (cache / name).write_bytes(content)
    with pytest.raises(CacheCorrupt, match=rf"{name}.*`dflash cache repair`"):
        train(tiny_config(cache, tmp_path / "run"), World())
