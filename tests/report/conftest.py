"""Two tiny runs with a held-out walk, and a page about them."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from report_pages import Page, parse
from support import write_cache, write_tokenizer
from tiny_runs import LENGTHS, tiny_config

from dflash.cache.listing import load_tokenizer
from dflash.cache.manifest import load_manifest
from dflash.cache.parts import record_parts
from dflash.cache.reader import CacheReader
from dflash.report.run import write_report
from dflash.train.holdout import HoldoutConfig
from dflash.train.trainer import train
from dflash.world import World


@pytest.fixture(scope="session")
def reported_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cache` and its runs `a` and `b`, which differ in their sampler."""
    folder = tmp_path_factory.mktemp("reported")
    cache = write_cache(folder / "cache", LENGTHS * 2)
    (cache / "tokenizer").mkdir()
    write_tokenizer(cache / "tokenizer")
    record_parts(cache, load_manifest(cache))
    config = tiny_config(cache, folder / "a", max_steps=6, eval_every=2, holdout=HoldoutConfig(0.35))
    train(config, World())
    train(replace(config, out=folder / "b", sampler=replace(config.sampler, policy="shuffle")), World())
    return folder


@pytest.fixture(scope="session")
def tokenizer(reported_runs: Path) -> Any:
    """That of the runs' cache."""
    with CacheReader(reported_runs / "cache") as reader:
        return load_tokenizer(reader)


@pytest.fixture
def runs(reported_runs: Path, tmp_path: Path) -> Path:
    """A copy of the runs that a test may change; their cache stays where it is."""
    for name in ("a", "b"):
        shutil.copytree(reported_runs / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="session")
def page_of_two(reported_runs: Path) -> Page:
    """The page about both runs, with texts."""
    out = reported_runs / "two.html"
    write_report([reported_runs / "a", reported_runs / "b"], out, samples=2)
    return parse(out.read_text())
