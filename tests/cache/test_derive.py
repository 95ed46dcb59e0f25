"""Caches made from others: the right samples, bit for bit, whole, resumable, and the sources untouched."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cache_samples import IDENTITY, bits, make_manifest, make_samples, read_all, same_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cache import derive as derive_module
from dflash.cache.manifest import TARGET_CONFIG_NAME, create_cache, load_manifest
from dflash.cache.parts import record_parts
from dflash.cache.reader import CacheReader
from dflash.cache.recipes import NOT_CHOSEN, Choice, choose, drop_taps, merge, rebucket, subset
from dflash.cache.verify import verify
from dflash.cache.writer import CacheWriter, finalize
from dflash.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch, ConfigError
from dflash.head import HEAD_NAME

SAMPLES = make_samples(24)


def build(cache: Path, samples=SAMPLES, identity=IDENTITY, writer: str = "rank0") -> Path:
    manifest = create_cache(cache, make_manifest(len(samples), identity))
    with CacheWriter(cache, manifest, writer, 400) as out:
        for sample in samples:
            out.write(sample)
    (cache / "tokenizer").mkdir()
    for name in (HEAD_NAME, TARGET_CONFIG_NAME, "tokenizer/tokenizer.json"):
        (cache / name).write_bytes(random.Random(name).randbytes(100))
    record_parts(cache, manifest)
    finalize(cache)
    return cache


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("derive") / "source")


def contents(cache: Path) -> dict[str, bytes]:
    return {
        path.relative_to(cache).as_posix(): path.read_bytes() for path in cache.rglob("*") if path.is_file()
    }


def check(out: Path, samples, *sources: Path) -> None:
    """The new cache is complete, whole to the last byte, and holds just these samples and the parts."""
    assert verify(out, deep=True, show=False).whole
    manifest = load_manifest(out)
    assert manifest.complete
    assert manifest.expected_samples == len(samples)
    assert manifest.derived
    assert same_samples(read_all(out), samples)
    for name in (HEAD_NAME, TARGET_CONFIG_NAME, "tokenizer/tokenizer.json"):
        assert (out / name).read_bytes() == (sources[0] / name).read_bytes()


def test_a_subset_by_condition_links_the_shards_that_it_keeps_whole(source, tmp_path):
    before = contents(source)
    made = subset(source, tmp_path / "out", Choice("bucket = 8"))
    chosen = [sample for sample in SAMPLES if 4 < len(sample.input_ids) <= 8]
    check(tmp_path / "out", chosen, source)
    shards = list((tmp_path / "out" / "shards").glob("*/*"))
    assert made.linked == len(shards) > 1
    assert made.written == 0
    for shard in shards:
        assert shard.samefile(source / shard.relative_to(tmp_path / "out"))
    assert load_manifest(tmp_path / "out").dropped == {NOT_CHOSEN: 24 - len(chosen)}
    assert contents(source) == before


def test_where_links_are_impossible_shards_are_copied_and_checked(source, tmp_path, monkeypatch):
    link = os.link

    def other_file_system(one, other):
        if str(one).startswith(str(source)):
            raise OSError(18, "Invalid cross-device link")
        link(one, other)

    monkeypatch.setattr(os, "link", other_file_system)
    subset(source, tmp_path / "out", Choice("bucket = 8"))
    check(tmp_path / "out", [s for s in SAMPLES if 4 < len(s.input_ids) <= 8], source)
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or path.stat().st_nlink == 1


@settings(max_examples=15, deadline=None)
@given(st.floats(0.02, 1), st.integers(-5, 2**64), st.integers(1, 16))
def test_any_share_takes_that_many_samples_bit_for_bit(source, tmp_path_factory, share, seed, longest):
    out = tmp_path_factory.mktemp("subset") / "out"
    under = [sample for sample in SAMPLES if len(sample.input_ids) <= longest]
    subset(source, out, Choice(f"length <= {longest}", share, seed))
    taken = read_all(out)
    assert len(taken) == max(round(share * len(under)), 1)
    assert {bits(sample) for sample in taken} <= {bits(sample) for sample in under}
    check(out, taken, source)


def test_what_a_seed_takes_depends_on_ids_alone_and_grows_with_the_share(source, tmp_path):
    other = build(tmp_path / "other", SAMPLES[::-1], writer="w")
    reader, turned = CacheReader(source), CacheReader(other)
    for seed in range(5):
        half, most = (
            set(reader.index.ids[choose(reader, Choice(None, s, seed))].tolist()) for s in (0.5, 0.8)
        )
        assert half < most
        assert set(turned.index.ids[choose(turned, Choice(None, 0.5, seed))].tolist()) == half
    counts = np.zeros(24)
    for seed in range(400):
        counts[choose(reader, Choice(None, 0.25, seed))] += 1
    assert counts.min() > 60  # 100 expected
    assert counts.max() < 140


def test_a_subset_of_a_subset_and_a_merge_of_subsets_give_the_samples_back(source, tmp_path):
    subset(source, tmp_path / "a", Choice(None, 0.7, 1))
    subset(tmp_path / "a", tmp_path / "aa", Choice(None, 0.5, 2))
    check(tmp_path / "aa", read_all(tmp_path / "aa"), source)
    subset(source, tmp_path / "b", Choice(None, 0.7, 3))
    ids = {s.id for name in "ab" for s in read_all(tmp_path / name)}
    made = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    check(tmp_path / "merged", [s for s in SAMPLES if s.id in ids], source)
    assert "taken once" in made.text()


def test_caches_of_two_corpora_merge_though_their_shards_have_equal_names(source, tmp_path):
    more = make_samples(36)[20:]
    other = build(tmp_path / "other", more, replace(IDENTITY, corpus_digest="d1"))
    merge([source, other], tmp_path / "merged")
    check(tmp_path / "merged", make_samples(36), source)
    assert load_manifest(tmp_path / "merged").corpora == ("d0", "d1")
    again = merge([source, source], tmp_path / "twice")
    check(tmp_path / "twice", SAMPLES, source)
    assert again.written == 0


def test_where_two_caches_hold_a_sample_differently_the_first_wins_and_it_is_said(source, tmp_path):
    changed = [replace(s, hidden_states=s.hidden_states.flip(0)) for s in SAMPLES if len(s.input_ids) > 1]
    other = build(tmp_path / "other", changed)
    made = merge([source, other], tmp_path / "merged")
    check(tmp_path / "merged", SAMPLES, source)
    assert f"{len(changed)} of them had other bytes" in made.text()


def test_a_merge_of_other_identities_names_each_difference(source, tmp_path):
    identity = replace(IDENTITY, weights_digest="w1", taps=(0, 3), corpus_digest="d1")
    other = build(tmp_path / "other", make_samples(3, identity), identity)
    with pytest.raises(CacheMismatch, match=r"weights_digest: this 'w0', other 'w1'") as caught:
        merge([source, other], tmp_path / "merged")
    assert "taps: this [0, 2], other [0, 3]" in str(caught.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("edges", [(16,), (2, 5, 11, 16), (4, 8, 16), (100,)])
def test_rebucketing_keeps_every_sample(source, tmp_path, edges):
    rebucket(source, tmp_path / "out", edges, shard_bytes=300)
    check(tmp_path / "out", SAMPLES, source)
    index = CacheReader(tmp_path / "out").index
    assert index.buckets.tolist() == np.searchsorted(edges, index.lengths).tolist()
    assert load_manifest(tmp_path / "out").identity.bucket_edges == edges
    assert index.digest() == CacheReader(source).index.digest()


@pytest.mark.parametrize("edges", [(8,), (16, 8), (), (0, 16)])
def test_edges_that_cannot_be_are_refused(source, tmp_path, edges):
    with pytest.raises(CacheError):
        rebucket(source, tmp_path / "out", edges)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [(0,), (2,), (2, 0), (0, 2)])
def test_dropping_taps_keeps_the_others_in_the_order_asked_for(source, tmp_path, keep):
    drop_taps(source, tmp_path / "out", keep)
    columns = [IDENTITY.taps.index(tap) for tap in keep]
    cut = [replace(s, hidden_states=s.hidden_states[:, columns].contiguous()) for s in SAMPLES]
    check(tmp_path / "out", cut, source)
    assert load_manifest(tmp_path / "out").identity.taps == keep


@pytest.mark.parametrize("keep", [(1,), (0, 0), (), (0, 2, 3)])
def test_taps_that_are_not_there_are_refused(source, tmp_path, keep):
    with pytest.raises(CacheError, match="--keep"):
        drop_taps(source, tmp_path / "out", keep)


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("steps", range(5))
def test_a_killed_run_goes_on_where_it_was_and_ends_with_the_same_bytes(source, tmp_path, monkeypatch, steps):
    def make(out):
        return subset(source, out, Choice("length != 3", 0.8), shard_bytes=200)

    make(tmp_path / "whole")
    publish, count = derive_module.commit_shard, iter(range(steps))
    link = derive_module._link_piece

    def mortal(step):
        def run(*args):
            if next(count, None) is None:
                raise Killed
            return step(*args)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(derive_module, "commit_shard", mortal(publish))
        patch.setattr(derive_module, "_link_piece", mortal(link))
        with pytest.raises(Killed):
            make(tmp_path / "out")
    assert not load_manifest(tmp_path / "out").complete
    made = make(tmp_path / "out")
    assert made.resumed == steps
    assert "by an earlier run" in made.text() or not steps
    whole, out = contents(tmp_path / "whole"), contents(tmp_path / "out")
    assert whole.keys() == out.keys()
    assert {name for name in whole if whole[name] != out[name]} <= {"run.json", "manifest.json"}
    assert make(tmp_path / "out").resumed == made.linked + made.written


def test_a_folder_of_other_settings_or_sources_is_refused_untouched(source, tmp_path):
    out = tmp_path / "out"
    subset(source, out, Choice("bucket = 8"))
    before = contents(out)
    for choice in (Choice("bucket = 4"), Choice("bucket = 8", 0.5)):
        with pytest.raises(CacheMismatch, match="use another folder"):
            subset(source, out, choice)
    with pytest.raises(CacheMismatch):
        rebucket(source, out, (16,))
    with pytest.raises(CacheError, match="is a source itself"):
        subset(source, source, Choice("bucket = 8"))
    assert contents(out) == before


def test_a_choice_of_nothing_is_an_error_and_makes_nothing(source, tmp_path):
    with pytest.raises(CacheError, match="no sample is left"):
        subset(source, tmp_path / "out", Choice("length > 1000"))
    assert not (tmp_path / "out").exists()
    for share in (0, -1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="--sample"):
            Choice(None, share)


def test_a_damaged_or_unfinished_source_is_an_error(tmp_path):
    cache = build(tmp_path / "cache")
    shard = min((cache / "shards").glob("*/*"))
    content = bytearray(shard.read_bytes())
    content[4096] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CacheCorrupt, match=shard.name):
        rebucket(cache, tmp_path / "out", (16,))
    create_cache(tmp_path / "empty", make_manifest(3))
    with pytest.raises(CacheIncomplete):
        subset(tmp_path / "empty", tmp_path / "out2", Choice(None))


def test_a_head_that_changed_is_never_carried_over(tmp_path):
    cache = build(tmp_path / "cache")
    (cache / HEAD_NAME).write_bytes(b"another")
    with pytest.raises(CacheCorrupt, match=HEAD_NAME):
        subset(cache, tmp_path / "out", Choice("bucket = 8"))


def test_what_was_made_is_a_value_for_json(source, tmp_path):
    made = json.loads(json.dumps(subset(source, tmp_path / "out", Choice(None, 0.5)).to_json()))
    assert made["samples"] == 12
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["command"], record["config"]["share"]) == ("cache subset", 0.5)
