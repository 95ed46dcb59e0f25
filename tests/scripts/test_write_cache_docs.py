"""The page about the cache's tools is written from what they print."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from support import write_cache, write_tokenizer

from dflash.cache.manifest import load_manifest
from dflash.cache.parts import record_parts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("cache_docs", ROOT / "scripts" / "write_cache_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    cache = write_cache(tmp_path_factory.mktemp("docs") / "demo", [10 + n % 50 for n in range(40)])
    (cache / "tokenizer").mkdir()
    write_tokenizer(cache / "tokenizer")
    record_parts(cache, load_manifest(cache))
    return cache


def test_every_block_of_the_page_is_written_and_the_cache_stays_as_it_was(script, cache, tmp_path):
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    page = tmp_path / "cache.md"
    shutil.copy(ROOT / "docs" / "cache.md", page)
    script.main(cache, page)
    blocks = dict(
        re.findall(r"<!-- ([a-z-]+) -->\n```\n(.*?)\n```\n<!-- /\1 -->", page.read_text(), re.DOTALL)
    )
    assert blocks.keys() == script.commands(cache).keys()
    assert "40 of 40" in blocks["info"]
    assert "is damaged" in blocks["repair"].split("$ dflash")[1]
    assert "is whole" in blocks["repair"].split("$ dflash")[4]
    assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before
    assert [path.name for path in cache.parent.iterdir()] == ["demo"]


def test_the_page_names_every_tool():
    from dflash.commands.cache import cache as group

    page = (ROOT / "docs" / "cache.md").read_text()
    assert [name for name in group.commands if f"dflash cache {name}" not in page] == []
