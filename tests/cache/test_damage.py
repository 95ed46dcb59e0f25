"""Faults at random places, ten thousand of them: each is found, named, and never a crash or wrong bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cache_samples import IDENTITY, bits, make_manifest, make_samples, write_cache

from dflash.cache.index import CacheIndex, load_index
from dflash.cache.manifest import TARGET_CONFIG_NAME, load_manifest, save_manifest
from dflash.cache.parts import check_part, check_tokenizer, record_parts
from dflash.cache.planned import Planned, save_planned
from dflash.cache.reader import CacheReader
from dflash.cache.repair import repair
from dflash.cache.scan import BESIDE, beside_faults
from dflash.cache.speeds import save_speeds
from dflash.cache.verify import shard_problem, verify
from dflash.cache.writer import CacheWriter, create_cache, finalize
from dflash.errors import CacheError
from dflash.head import HEAD_NAME

SAMPLES = make_samples(6)
BY_ID = {sample.id: bits(sample) for sample in SAMPLES}
FLIPS = 10_000
CUTS_A_FILE = 8


def build(cache: Path, samples=SAMPLES, seed: int = 0) -> Path:
    """A tiny cache with every kind of file that a real one has."""
    fill = random.Random(seed)
    manifest = create_cache(cache, make_manifest(len(samples)))
    with CacheWriter(cache, manifest, f"rank{seed}") as writer:
        for sample in samples:
            writer.write(sample)
    (cache / "tokenizer").mkdir()
    for name in (HEAD_NAME, TARGET_CONFIG_NAME, "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"):
        (cache / name).write_bytes(fill.randbytes(400))
    record_parts(cache, manifest)
    finalize(cache)
    save_planned(cache, Planned.of(load_index(cache, manifest).lengths, manifest.identity.bucket_edges))
    save_speeds(cache, {edge: fill.uniform(1, 1e4) for edge in manifest.identity.bucket_edges})
    return cache


@pytest.fixture
def cache(tmp_path) -> Path:
    return build(tmp_path / "cache")


def reading_needs(path: Path) -> bool:
    """Whether the file is part of the cache, and not one that stands beside it."""
    return path.name not in BESIDE


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def said(cache: Path, *, deep: bool = True) -> str:
    """What checking a damaged cache says: a table, or one line where it cannot even be opened."""
    try:
        report = verify(cache, deep=deep, show=False)
    except CacheError as error:
        return str(error)
    assert not report.whole
    return report.text()


def named(path: Path, cache: Path) -> bool:
    """Whether a deep check names the file."""
    return path.relative_to(cache).as_posix() in said(cache)


@contextmanager
def damaged(path: Path, content: bytes | bytearray | None) -> Iterator[None]:
    """The file with other content for a while; None removes it."""
    before = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def reads_right_or_raises(cache: Path) -> bool:
    """Read everything that training would; true when an error was raised. Wrong or missing bytes fail."""
    text = None
    try:
        with CacheReader(cache) as reader:
            check_part(cache, reader.manifest, HEAD_NAME)
            check_part(cache, reader.manifest, TARGET_CONFIG_NAME)
            check_tokenizer(cache, reader.manifest)
            samples = reader.read(range(len(reader.index)))
    except CacheError as error:
        text = str(error)
    if text is None:
        assert {sample.id: bits(sample) for sample in samples} == BY_ID
        return False
    assert "\n" not in text
    return True


def test_a_whole_cache_is_whole(cache):
    assert verify(cache, show=False).whole
    assert verify(cache, deep=True, show=False, jobs=3).whole
    assert not reads_right_or_raises(cache)


def put_byte(path: Path, place: int, byte: int) -> None:
    """In place: writing whole files anew makes some file systems flush each of them."""
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        file.write(bytes([byte]))


def found_at_once(path: Path, cache: Path, index: CacheIndex) -> str:
    """What the check of this file alone says: the part of `verify` that has to see a fault in it."""
    if path.suffix == ".arrow":
        with pytest.raises(CacheError) as caught:
            load_index(cache, load_manifest(cache), [path])
        return str(caught.value)
    name = path.relative_to(cache).as_posix()
    if name.startswith("shards/"):
        number = [layout.name for layout in index.layouts].index(name)
        return str(shard_problem(cache, index.layouts[number], index.digests[number]) and name)
    if not reading_needs(path):
        return " ".join(fault.file for fault in beside_faults(cache, load_manifest(cache)))
    with pytest.raises(CacheError) as caught:
        check_part(cache, load_manifest(cache), name)
    return str(caught.value)


def test_ten_thousand_flipped_bits_are_all_found_in_the_file_that_has_them(cache):
    """The places are drawn anew in each run; one in fifty goes through all checks, and reading."""
    contents = {path: path.read_bytes() for path in files(cache)}
    index = CacheReader(cache).index
    for number in range(FLIPS):
        path = random.choice(list(contents))
        place = random.randrange(len(contents[path]))
        byte = contents[path][place]
        put_byte(path, place, byte ^ 1 << random.randrange(8))
        if number % 50:
            assert path.name in found_at_once(path, cache, index)
        else:
            assert named(path, cache)
            assert reads_right_or_raises(cache) == reading_needs(path)
        put_byte(path, place, byte)
    assert verify(cache, deep=True, show=False).whole


def test_a_file_cut_at_any_length_or_grown_is_found(cache):
    for path in files(cache):
        content = path.read_bytes()
        lengths = {0, len(content) - 1, *random.choices(range(len(content)), k=CUTS_A_FILE)}
        for length in lengths:
            with damaged(path, content[:length]):
                assert named(path, cache)
                assert reads_right_or_raises(cache) == reading_needs(path)
        with damaged(path, content + b"\0"):
            assert named(path, cache)
            assert reads_right_or_raises(cache) or path.name == "manifest.json" or not reading_needs(path)


def test_a_deleted_file_is_found_in_structure_alone(cache):
    for path in filter(reading_needs, files(cache)):
        with damaged(path, None):
            name, text = path.relative_to(cache).as_posix(), said(cache, deep=False)
            # A lost fragment cannot be named, but the shard that it committed is.
            assert name in text or (path.suffix == ".arrow" and f"{path.stem}.safetensors" in text)
            assert reads_right_or_raises(cache)


def test_two_files_of_a_kind_swapped_are_both_found(cache):
    for pattern in ("shards/*/*", "index/*", "tokenizer/*"):
        one, other = sorted(cache.glob(pattern))[:2]
        first, second = one.read_bytes(), other.read_bytes()
        with damaged(one, second), damaged(other, first):
            assert named(one, cache)
            assert named(other, cache)
            assert reads_right_or_raises(cache)


def test_a_copied_fragment_shard_or_tokenizer_file_is_found(cache):
    for pattern, name in (
        ("index/*", "copy.arrow"),
        ("shards/*/*", "copy.safetensors"),
        ("tokenizer/*", "added.json"),
    ):
        path = min(cache.glob(pattern))
        copy = path.with_name(name)
        shutil.copy(path, copy)
        assert [fault.file for fault in verify(cache).faults] == [copy.relative_to(cache).as_posix()]
        if pattern != "shards/*/*":  # reading never looks at a shard that nothing commits
            assert reads_right_or_raises(cache)
        copy.unlink()


def test_files_beside_a_cache_may_go_and_are_set_aside_when_they_are_damaged(cache):
    before = load_manifest(cache)
    for name in BESIDE:
        path = cache / name
        path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    report = repair(cache, show=False)
    assert sorted(fault.file for fault in report.faults) == sorted(BESIDE)
    assert (report.lost, report.made_by) == ((), None)
    assert report.text().endswith("001; the cache is whole without")
    assert verify(cache, deep=True, show=False).whole
    assert load_manifest(cache) == before
    assert not reads_right_or_raises(cache)
    assert not any((cache / name).exists() for name in BESIDE)


def test_files_beside_a_cache_of_the_time_before_their_digests_are_taken_as_they_are(cache):
    for name in BESIDE:
        value = json.loads((cache / name).read_bytes())
        assert value.pop("digest")
        (cache / name).write_text(json.dumps(value))
    assert verify(cache, show=False).whole
    for name in BESIDE:
        with damaged(cache / name, (cache / name).read_bytes().replace(b"{", b'{"digesu": "1", ')):
            assert named(cache / name, cache)
        with damaged(cache / name, b"[" * 100_000):
            assert named(cache / name, cache)
            assert not reads_right_or_raises(cache)


@pytest.mark.parametrize("same_identity", [True, False])
def test_files_of_another_cache_are_found(cache, tmp_path, same_identity):
    others = make_samples(12)[6:]
    other = build(tmp_path / "other", others, seed=1)
    if not same_identity:
        shutil.rmtree(other)
        identity = IDENTITY.__class__(**{**vars(IDENTITY), "weights_digest": "w1"})
        write_cache(other, make_samples(6, identity), identity)
    for source in filter(reading_needs, files(other)):  # a measurement of another cache is one all the same
        place = cache / source.relative_to(other)
        if place.exists():
            with damaged(place, source.read_bytes()):
                assert named(place, cache) or place.name == "manifest.json"
                assert reads_right_or_raises(cache)
            continue
        shutil.copy(source, place)
        report = verify(cache, show=False)
        assert not report.whole
        if source.suffix == ".arrow":
            assert reads_right_or_raises(cache)
        place.unlink()
    for fragment in sorted(other.glob("index/*")):  # a commit record with its shard
        shutil.copytree(other / "shards", cache / "shards", dirs_exist_ok=True)
        shutil.copy(fragment, cache / "index")
        assert not verify(cache, show=False).whole
        assert reads_right_or_raises(cache)
        (cache / "index" / fragment.name).unlink()


def test_a_file_cut_while_a_reader_has_it_open_raises(cache):
    for path in sorted(cache.glob("shards/*/*")):
        with CacheReader(cache) as reader:
            rows = range(len(reader.index))
            reader.read(rows)
            content = path.read_bytes()
            for length in (4097, 100, 0):
                os.truncate(path, length)
                with pytest.raises(CacheError, match=path.name):
                    reader.read(rows)
            path.write_bytes(content)


def test_pipes_folders_and_loops_in_the_place_of_files_are_refused_without_waiting(cache):
    for path in files(cache):
        content = path.read_bytes()
        for make in (os.mkfifo, os.mkdir, lambda place: Path(place).symlink_to(place)):
            path.unlink()
            make(path)
            assert reads_right_or_raises(cache) == reading_needs(path)
            assert named(path, cache)
            path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(content)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a//b", "", ".", "a\0b", "x" * 600])
def test_a_manifest_that_points_outside_its_cache_is_refused(cache, name):
    manifest = load_manifest(cache)
    manifest.files[name] = "0" * 32
    save_manifest(cache, manifest)
    assert not verify(cache, show=False).whole
    assert reads_right_or_raises(cache)


def test_a_header_that_claims_a_huge_size_allocates_nothing(cache):
    path = min(cache.glob("shards/*/*"))
    content = bytearray(path.read_bytes())
    content[:8] = (1 << 62).to_bytes(8, "little")
    with damaged(path, content):
        assert reads_right_or_raises(cache)
    with damaged(cache / "manifest.json", b"[" * 100_000):
        assert reads_right_or_raises(cache)


def test_the_report_of_a_check_is_a_table_and_json(cache):
    path = min(cache.glob("shards/*/*"))
    with damaged(path, b"short"):
        report = verify(cache, show=False)
    value = json.loads(json.dumps(report.to_json()))
    name = path.relative_to(cache).as_posix()
    assert value["faults"][0]["file"] == name
    assert value["faults"][0]["samples"] > 0
    assert not value["whole"]
    assert name in report.text()
    assert "repair" in report.text()


def test_shards_without_a_recorded_digest_are_checked_sample_by_sample(cache, monkeypatch):
    monkeypatch.setattr("dflash.cache.index._shard_digests", lambda path, metadata, shards: [""] * shards)
    assert verify(cache, deep=True, show=False).whole
    path = min(cache.glob("shards/*/*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with damaged(path, content):
        assert named(path, cache)
