"""`dflash cache ...` as a user meets it: what is printed, the exit codes, JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support import VOCAB, write_cache, write_tokenizer

from dflash.cache.manifest import load_manifest
from dflash.cache.parts import record_parts
from dflash.cache.reader import CacheReader
from dflash.cli import cli

LENGTHS = [20, 40, 60, 10, 30, 12, 50, 8, 33, 21]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    cache = write_cache(tmp_path_factory.mktemp("commands") / "cache", LENGTHS)
    (cache / "tokenizer").mkdir()
    write_tokenizer(cache / "tokenizer")
    record_parts(cache, load_manifest(cache))
    return cache


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


def test_ls_lists_samples_by_bucket_length_and_id(whole):
    lines = [json.loads(line) for line in output("ls", whole, "--json").splitlines()]
    assert [line["length"] for line in lines] == sorted(LENGTHS)
    assert [line["bucket"] for line in lines] == [16, 16, 16, 32, 32, 32, 64, 64, 64, 64]
    with CacheReader(whole) as reader:
        for line in lines:
            (sample,) = reader.read([int(reader.index.ids.searchsorted(line["id"]))])
            assert (sample.id, int(sample.loss_mask.sum())) == (line["id"], line["supervised"])
            assert (whole / line["shard"]).is_file()
    chosen = output("ls", whole, "--where", "bucket = 64 and length < 50", "--sort", "id", "--limit", 2)
    assert [row.split()[0] for row in chosen.splitlines()] == ["id", "2", "9"]


def test_a_condition_that_cannot_be_is_one_line(whole, tmp_path):
    for arguments in (["ls", whole], ["subset", whole, "--out", tmp_path / "out"]):
        result = run(*arguments, "--where", "lenght < 3")
        assert result.exit_code == 2
        assert "'lenght'" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_show_tells_text_mask_and_norms(whole):
    shown = parsed("show", whole, 4)
    with CacheReader(whole) as reader:
        (sample,) = reader.read([3])
    assert shown["input_ids"] == sample.input_ids.tolist()
    assert shown["loss_mask"] == sample.loss_mask.tolist()
    assert max(shown["input_ids"]) < VOCAB
    norms = sample.hidden_states.float().norm(dim=-1)
    for column, tap in enumerate((1, 3)):
        assert shown["norms"][str(tap)] == pytest.approx(norms[:, column].tolist())
    assert [piece["supervised"] for piece in shown["text"]] == [False, True]
    text = output("show", whole, 4)
    assert "10 tokens, 7 supervised" in text
    assert text.count("[[") >= 1
    assert "\x1b" not in text


def test_a_terminal_sees_the_mask_in_colour_and_no_control_characters_of_the_text(whole):
    from dflash.cache.listing import show_sample

    for sample_id in range(1, 11):
        text = show_sample(whole, sample_id).text(colour=True)
        codes = [part.split("m", 1)[0] for part in text.split("\x1b")[1:]]
        assert set(codes) == {"[2", "[32", "[0"}
        assert not [c for c in text if ord(c) < 32 and c not in "\n\t\x1b"]


@pytest.mark.parametrize("sample_id", ["99", str(1 << 70), "x"])
def test_a_sample_that_is_not_there_is_an_error(whole, sample_id):
    assert run("show", whole, sample_id).exit_code == 2


def test_show_refuses_a_tokenizer_that_was_touched(cache):
    flip(cache / "tokenizer" / "tokenizer.json", 30)
    result = run("show", cache, 4)
    assert result.exit_code == 2
    assert "tokenizer.json" in result.stderr.splitlines()[-1]


def test_diff_tells_what_is_not_in_both_with_exit_code_1(whole, tmp_path):
    assert "the same: 10 samples" in output("diff", whole, whole)
    output("subset", whole, "--where", "length < 50", "--out", tmp_path / "part")
    result = run("diff", whole, tmp_path / "part")
    assert result.exit_code == 1
    assert "only in the first: 2 samples: 3, 7" in result.stdout
    other = write_cache(tmp_path / "other", LENGTHS, edges=(32, 64), seed=1)
    found = json.loads(run("diff", whole, other, "--json").stdout)
    assert not found["same"]
    assert [line.split(":")[0] for line in found["identity"]] == ["bucket_edges"]
    assert found["other_bytes"] == list(range(1, 11))


def test_subset_merge_rebucket_and_drop_taps_make_whole_caches(whole, tmp_path):
    made = {
        "small": ("subset", whole, "--where", "length <= 30", "--sample", "0.5"),
        "rest": ("subset", whole, "--where", "length > 20"),
        "merged": ("merge", tmp_path / "small", tmp_path / "rest"),
        "rebucketed": ("rebucket", tmp_path / "merged", "--edges", "10,64"),
        "cut": ("drop-taps", tmp_path / "rebucketed", "--keep", "3"),
    }
    for name, arguments in made.items():
        report = parsed(*arguments, "--out", tmp_path / name)
        assert report["samples"] == len(CacheReader(tmp_path / name).index)
        assert "is whole" in output("verify", tmp_path / name, "--deep")
        assert "by an earlier run" in output(*arguments, "--out", tmp_path / name)
        assert name in output("info", tmp_path / name)
    assert "made by" in output("info", tmp_path / "cut")
