"""Damage, `dflash cache repair`, and the same `dflash extract` again: all is as it was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from chat_families import dialogue, write_jsonl
from extract_runs import same, samples_of
from support import write_target

from dflash.cache.index import load_index
from dflash.cache.manifest import MANIFEST_NAME, load_manifest
from dflash.cache.repair import LIST_NAME, repair
from dflash.cache.verify import verify
from dflash.errors import CacheError, CacheIncomplete
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.head import HEAD_NAME, TargetHead
from dflash.world import World


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished cache and the configuration that made it."""
    folder = tmp_path_factory.mktemp("repair")
    target = write_target(folder / "target")
    rows = [{"messages": dialogue(f"question {n}", "word " * (1 + 5 * n % 17))} for n in range(17)]
    config = ExtractConfig(
        target=str(target),
        data=(write_jsonl(folder / "data.jsonl", *rows),),
        out=folder / "cache",
        taps=(0, 2, 5),
        max_length=128,
        bucket_edges=(64, 128),
        tokens_per_batch=256,
        dtype="float32",
        shard_bytes=30_000,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "home"))
        extract(config, World())
        yield config


@pytest.fixture
def cache(made) -> Path:
    """The cache, put back after the test."""
    kept = made.out.with_name("kept")
    shutil.copytree(made.out, kept)
    yield made.out
    shutil.rmtree(made.out)
    kept.rename(made.out)


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def restored(config: ExtractConfig, before) -> int:
    """Extract again; the tokens that took. The cache is whole and holds the same samples."""
    report = extract(config, World())
    assert verify(config.out, deep=True, show=False).whole
    assert load_manifest(config.out).complete
    assert same(samples_of(config.out), before)
    return report.new_tokens


def test_a_bad_shard_goes_aside_and_exactly_its_samples_are_extracted_again(made, cache):
    before = samples_of(cache)
    index = load_index(cache, load_manifest(cache))
    assert len(index.layouts) > 3
    bad = index.layouts[1]
    flip(cache / bad.name, 5000)
    report = repair(cache, show=False)
    assert [fault.file for fault in report.faults] == [bad.name]
    assert not load_manifest(cache).complete
    assert (report.aside / bad.name).is_file()
    assert len(list((report.aside / "index").iterdir())) == 1
    lost = [int(line) for line in (report.aside / LIST_NAME).read_text().split()]
    assert lost == list(report.lost)
    assert set(lost) == before.keys() - samples_of(cache, allow_incomplete=True).keys()
    assert len(lost) == bad.samples
    assert restored(made, before) == bad.tokens


def test_repairing_a_whole_cache_changes_nothing(cache):
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    report = repair(cache, show=False)
    assert report.aside is None
    assert "nothing" in report.text()
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


@pytest.mark.parametrize("name", [HEAD_NAME, "target_config.json", "tokenizer/tokenizer.json", "run.json"])
@pytest.mark.parametrize("fault", ["flipped", "deleted"])
def test_a_bad_part_is_written_again_and_no_sample_is(made, cache, name, fault):
    before, content = samples_of(cache), (cache / name).read_bytes()
    flip(cache / name, 20) if fault == "flipped" else (cache / name).unlink()
    report = repair(cache, show=False)
    assert (report.lost, report.unlisted) == ((), 0)
    assert restored(made, before) == 0
    if name == HEAD_NAME:
        TargetHead.load(cache / name)
    if name != "run.json":
        assert (cache / name).read_bytes() == content


def test_a_bad_fragment_costs_its_samples_and_says_that_their_ids_are_unknown(made, cache):
    before = samples_of(cache)
    path = min((cache / "index").iterdir())
    samples = len(load_index(cache, load_manifest(cache), [path]))
    flip(path)
    report = repair(cache, show=False)
    assert report.unlisted == samples
    assert f"{samples} whose ids" in report.text()
    assert restored(made, before) > 0


@pytest.mark.parametrize("fault", ["flipped", "deleted"])
def test_a_lost_manifest_is_made_again_and_every_sample_stays(made, cache, fault):
    before = samples_of(cache)
    flip(cache / MANIFEST_NAME, 200) if fault == "flipped" else (cache / MANIFEST_NAME).unlink()
    report = repair(cache, show=False)
    assert [fault.file for fault in report.faults] == [MANIFEST_NAME]
    assert restored(made, before) == 0


def test_everything_bad_at_once_is_repaired(made, cache):
    before = samples_of(cache)
    for path in sorted((cache / "shards").glob("*/*"))[::2]:
        flip(path)
    sorted((cache / "index").iterdir())[1].unlink()
    flip(cache / HEAD_NAME)
    (cache / "tokenizer" / "chat_template.jinja.bak").write_text("x")
    report = repair(cache, show=False)
    assert len(report.faults) >= 4
    restored(made, before)


def test_a_crash_in_the_middle_of_a_repair_can_be_repaired(made, cache, monkeypatch):
    before = samples_of(cache)
    for path in sorted((cache / "shards").glob("*/*")):
        flip(path)
    flip(cache / HEAD_NAME)
    rename, steps = Path.rename, iter(range(3))

    def stopping(self, place):
        if next(steps, None) is None:
            raise OSError(5, "Input/output error")
        return rename(self, place)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopping)
        with pytest.raises(CacheError, match="nothing is lost"):
            repair(cache, show=False)
    repair(cache, show=False)
    restored(made, before)


def test_a_cache_with_appended_data_is_restored_corpus_by_corpus(made, cache, tmp_path):
    rows = [{"messages": dialogue(f"another {n}", "word " * (1 + 7 * n % 13))} for n in range(9)]
    more = replace(made, data=(write_jsonl(tmp_path / "b.jsonl", *rows),), append=True)
    extract(more, World())
    before = samples_of(cache)
    for path in (cache / "shards").glob("*/*"):
        flip(path)
    report = repair(cache, show=False)
    assert set(report.lost) == before.keys()
    with pytest.raises(CacheIncomplete, match="each of its corpora"):
        extract(made, World())
    restored(more, before)
