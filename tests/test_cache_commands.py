"""`dflash cache ...` as a user meets it: what is printed, the exit codes, JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support import write_cache

from dflash.cli import cli

LENGTHS = [20, 40, 60, 10, 30, 12, 50, 8, 33, 21]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_cache(tmp_path_factory.mktemp("commands") / "cache", LENGTHS)


@pytest.fixture
def cache(whole, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "cache"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["cache", *map(str, arguments)])


def output(*arguments: object) -> str:
    """What a command that must succeed prints."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def parsed(*arguments: object):
    return json.loads(output(*arguments, "--json"))


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_whole_cache_verifies_with_exit_code_0(whole):
    assert "is whole: 10 samples in 3 shards" in output("verify", whole)
    assert "GB/s" in output("verify", whole, "--deep", "--jobs", 2)
    assert parsed("verify", whole, "--deep")["whole"] is True


def test_a_bad_cache_verifies_with_exit_code_1_and_a_table(cache):
    shard = min((cache / "shards").glob("*/*"))
    flip(shard)
    assert run("verify", cache).exit_code == 0  # the structure is sound
    result = run("verify", cache, "--deep")
    assert result.exit_code == 1
    assert shard.relative_to(cache).as_posix() in result.stdout
    assert "`dflash cache repair" in result.stdout
    report = json.loads(run("verify", cache, "--deep", "--json").stdout)
    assert [fault["file"] for fault in report["faults"]] == [shard.relative_to(cache).as_posix()]


def test_repair_lists_the_samples_and_leaves_the_cache_incomplete(cache):
    flip(min((cache / "shards").glob("*/*")))
    report = parsed("repair", cache)
    assert len(report["samples"]) == sum(length <= 16 for length in LENGTHS)
    assert Path(report["aside"]).parent == cache / "repaired"
    assert "INCOMPLETE" in output("info", cache)
    assert "nothing is bad" in output("repair", cache)


@pytest.mark.parametrize("tool", ["info", "verify", "repair"])
def test_what_is_no_cache_is_one_line_and_exit_code_2(tool, tmp_path):
    result = run(tool, tmp_path)
    assert result.exit_code == 2
    assert "is not a cache" in result.stderr.splitlines()[-1]
