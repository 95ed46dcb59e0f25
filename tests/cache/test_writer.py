"""The commit protocol: whatever happens, what is committed is whole, and what is not can be done again."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from cache_samples import (
    IDENTITY,
    bits,
    make_manifest,
    make_sample,
    make_samples,
    read_all,
    same_samples,
    write_cache,
)

from dflash.cache.manifest import load_manifest
from dflash.cache.reader import CacheReader, committed_ids
from dflash.cache.writer import CacheWriter, create_cache, finalize, sweep_uncommitted
from dflash.errors import CacheCorrupt, CacheError, CacheIncomplete

SAMPLES = make_samples(12)


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


class MortalDisk:
    """Counts the steps that reach the disk and dies at one of them; dead, it refuses clean-up as well."""

    STEPS = ((os, "fsync"), (os, "link"), (Path, "replace"), (Path, "unlink"), (Path, "write_bytes"))

    def __init__(self, monkeypatch, dies_at, *, after):
        self.steps, self.dies_at, self.after, self.dead = 0, dies_at, after, False
        for owner, name in self.STEPS:
            monkeypatch.setattr(owner, name, self.mortal(getattr(owner, name)))

    def mortal(self, step):
        def run(*args, **kwargs):
            if self.dead:
                raise Killed
            self.steps += 1
            if self.steps == self.dies_at:
                self.dead = True
                if self.after:
                    step(*args, **kwargs)
                raise Killed
            return step(*args, **kwargs)

        return run


def extract(cache, samples=SAMPLES, shard_bytes=200):
    """What a pipeline does at every start: sweep, write what is not committed, finish."""
    manifest = create_cache(cache, make_manifest(len(samples)))
    sweep_uncommitted(cache)
    done = set(committed_ids(cache).tolist())
    with CacheWriter(cache, manifest, "w", shard_bytes) as writer:
        for sample in samples:
            if sample.id not in done:
                writer.write(sample)
    return finalize(cache)


def files(cache):
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_step_leaves_a_cache_that_resumes(tmp_path, after):
    step = 0
    while True:
        step += 1
        cache = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            disk = MortalDisk(patch, step, after=after)
            with suppress(Killed):
                extract(cache, SAMPLES[:5])
            if not disk.dead:
                break
        if (cache / "manifest.json").exists():
            before = set(committed_ids(cache).tolist())
            got = read_all(cache, allow_incomplete=True)
            assert {sample.id for sample in got} == before
            assert {bits(sample) for sample in got} <= {bits(sample) for sample in SAMPLES}
        assert extract(cache, SAMPLES[:5]).complete
        assert same_samples(read_all(cache), SAMPLES[:5])
        assert not [name for name in files(cache) if name.endswith(".tmp")]
    assert step > 25  # the loop did walk through every commit


def test_bytes_reach_the_disk_before_their_name_and_the_shard_before_its_fragment(tmp_path, monkeypatch):
    manifest = create_cache(tmp_path / "cache", make_manifest(1))
    steps = []
    link = os.link

    def fsync(descriptor):
        steps.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink().name.split(".")[0]))

    def named(source, target):
        steps.append(("name", Path(target).name.split(".")[0] + Path(target).suffix))
        link(source, target)

    with CacheWriter(tmp_path / "cache", manifest, "w") as writer:
        writer.write(SAMPLES[0])
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "link", named)
    shard = [("flush", "w-000000"), ("name", "w-000000.safetensors"), ("flush", "len-00004")]
    fragment = [("flush", "w-000000"), ("name", "w-000000.arrow"), ("flush", "index")]
    assert steps == shard + fragment


def test_leaving_by_an_exception_commits_nothing_further(tmp_path):
    manifest = create_cache(tmp_path / "cache", make_manifest(12))
    writer = CacheWriter(tmp_path / "cache", manifest, "w", shard_bytes=1 << 20)
    with pytest.raises(ZeroDivisionError), writer:  # noqa: PT012 - the block is the behaviour
        writer.write(SAMPLES[0])
        writer.flush()
        writer.write(SAMPLES[1])
        raise ZeroDivisionError
    assert committed_ids(tmp_path / "cache").tolist() == [SAMPLES[0].id]
    assert len(files(tmp_path / "cache")) == 3  # manifest, one shard, one fragment
    with pytest.raises(CacheError, match="has failed before"):
        writer.write(SAMPLES[1])
    with pytest.raises(CacheError, match="has failed before"):
        writer.close()


def test_a_sample_that_does_not_fit_spoils_nothing(tmp_path):
    manifest = create_cache(tmp_path / "cache", make_manifest(1))
    with CacheWriter(tmp_path / "cache", manifest, "w") as writer:
        with pytest.raises(CacheError, match="tokens"):
            writer.write(make_sample(0, length=17))
        writer.write(SAMPLES[0])
    assert finalize(tmp_path / "cache").complete


def test_a_full_disk_is_one_clear_line_and_can_be_resumed(tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dflash.files.os.fsync", full)
        with pytest.raises(CacheError, match="No space left"):
            create_cache(cache, make_manifest(12))
    manifest = create_cache(cache, make_manifest(12))
    with (  # noqa: PT012 - the writer is part of what fails
        monkeypatch.context() as patch,
        pytest.raises(CacheError, match=r"No space left.*resume") as caught,
        CacheWriter(cache, manifest, "w", 200) as writer,
    ):
        patch.setattr("dflash.files.os.fsync", full)
        for sample in SAMPLES:
            writer.write(sample)
    assert "\n" not in str(caught.value)
    assert committed_ids(cache).tolist() == []
    assert extract(cache).complete
    assert same_samples(read_all(cache), SAMPLES)


def test_a_shard_that_merely_exists_is_swept_and_never_counts(tmp_path):
    cache = write_cache(tmp_path / "cache", SAMPLES)
    manifest = create_cache(tmp_path / "new", make_manifest(12))
    for name in files(cache):
        if name.startswith("shards"):
            (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "new" / name).write_bytes((cache / name).read_bytes())
    (tmp_path / "new" / "shards" / "len-00004" / "x.safetensors.9.part.tmp").write_bytes(b"x")
    assert not manifest.complete
    assert len(committed_ids(tmp_path / "new")) == 0
    with pytest.raises(CacheIncomplete, match="0 samples are committed, 12 expected"):
        finalize(tmp_path / "new")
    assert (
        len(sweep_uncommitted(tmp_path / "new"))
        == len([n for n in files(cache) if n.startswith("shards")]) + 1
    )
    assert files(tmp_path / "new") == ["manifest.json"]


def test_sweeping_a_finished_cache_removes_nothing(tmp_path):
    cache = write_cache(tmp_path / "cache", SAMPLES)
    before = files(cache)
    assert sweep_uncommitted(cache) == []
    assert files(cache) == before


def test_a_damaged_index_is_never_taken_as_a_reason_to_sweep(tmp_path):
    cache = write_cache(tmp_path / "cache", SAMPLES)
    next((cache / "index").iterdir()).write_bytes(b"")
    before = files(cache)
    with pytest.raises(CacheCorrupt):
        sweep_uncommitted(cache)
    assert files(cache) == before


def test_resume_with_another_number_of_writers_neither_repeats_nor_loses_a_sample(tmp_path):
    cache = tmp_path / "cache"
    manifest = create_cache(cache, make_manifest(12))
    for rank in range(3):
        with CacheWriter(cache, manifest, f"rank{rank}", 200) as writer:
            for sample in SAMPLES[rank:7:3]:
                writer.write(sample)
    done = set(committed_ids(cache).tolist())
    assert done == {sample.id for sample in SAMPLES[:7]}
    with CacheWriter(cache, manifest, "rank0", 200) as writer:
        for sample in SAMPLES[7:]:
            writer.write(sample)
    finalize(cache)
    assert same_samples(read_all(cache), SAMPLES)


def test_finalize_counts_and_measures_before_it_says_complete(tmp_path):
    cache = tmp_path / "cache"
    manifest = create_cache(cache, make_manifest(12))
    with CacheWriter(cache, manifest, "w") as writer:
        for sample in SAMPLES[:-1]:
            writer.write(sample)
    with pytest.raises(CacheIncomplete, match="11 samples are committed, 12 expected"):
        finalize(cache)
    with pytest.raises(CacheIncomplete, match="11 of 12"):
        CacheReader(cache)
    assert len(CacheReader(cache, allow_incomplete=True).index) == 11
    with CacheWriter(cache, manifest, "w") as writer:
        writer.write(SAMPLES[-1])
    shard = next((cache / "shards").glob("*/*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CacheCorrupt, match=shard.name):
        finalize(cache)
    assert not load_manifest(cache).complete
    shard.write_bytes(content)
    assert finalize(cache) == finalize(cache) == load_manifest(cache)


def test_more_samples_than_planned_never_make_a_finished_cache(tmp_path):
    manifest = create_cache(tmp_path / "cache", make_manifest(3))
    with CacheWriter(tmp_path / "cache", manifest, "w") as writer:
        for sample in SAMPLES[:4]:
            writer.write(sample)
    with pytest.raises(CacheCorrupt, match="4 samples are committed, 3 expected"):
        finalize(tmp_path / "cache")


def test_two_running_writers_of_one_name_cannot_overwrite_each_other(tmp_path):
    cache = tmp_path / "cache"
    manifest = create_cache(cache, make_manifest(2))
    first, second = CacheWriter(cache, manifest, "w"), CacheWriter(cache, manifest, "w")
    first.write(make_sample(1, length=3))
    first.close()
    with pytest.raises(CacheError, match="two writers are named 'w'"), second:
        second.write(make_sample(2, length=3))
    assert committed_ids(cache).tolist() == [make_sample(1).id]


def test_a_name_that_is_a_path_is_refused(tmp_path):
    manifest = create_cache(tmp_path / "cache", make_manifest(2))
    with pytest.raises(CacheError, match="plain name"):
        CacheWriter(tmp_path / "cache", manifest, "../w")


def test_shards_are_cut_at_the_size_asked_for(tmp_path):
    cache = write_cache(tmp_path / "cache", SAMPLES, shard_bytes=200)
    largest = IDENTITY.max_length * IDENTITY.bytes_per_token
    for layout in CacheReader(cache).index.layouts:
        assert (layout.tokens - IDENTITY.max_length) * IDENTITY.bytes_per_token < 200 <= largest
