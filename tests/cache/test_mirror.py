"""A cache in an object store reads, verifies and repairs like one in a folder, and nothing of it is lost."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cache_samples import IDENTITY, bits, make_manifest, make_samples, same_samples, write_cache
from object_store import FAULTS, writers_expire

from dflash.cache.growing import GrowingCache
from dflash.cache.info import cache_info
from dflash.cache.manifest import MANIFEST_NAME, create_cache
from dflash.cache.mirror import FOLDER_VARIABLE, Mirror, local_folder, mirror_of
from dflash.cache.push import push_cache
from dflash.cache.reader import CacheReader, committed_ids
from dflash.cache.repair import repair
from dflash.cache.verify import verify
from dflash.cache.writer import CacheWriter, sweep_uncommitted
from dflash.errors import CacheCorrupt, CacheError, CacheMismatch, StoreError
from dflash.extract.remote import finalized, writer_name

SAMPLES = make_samples(24)


@pytest.fixture
def url(s3, bucket, tmp_path) -> str:
    """A finished cache of several shards in a bucket."""
    push_cache(write_cache(tmp_path / "made", SAMPLES), f"{bucket}/cache", show=False)
    s3.requests.clear()
    return f"{bucket}/cache"


def read_all(url: str):
    with CacheReader(local_folder(url)) as reader:
        return reader.read(range(len(reader.index)))


def fetched(s3) -> list[str]:
    """Shards that were asked for, each as often as it was."""
    return [
        name
        for request in s3.requests.elements()
        for name in [request]
        if "GET" in name and "/shards/" in name
    ]


def copies(cache: Path) -> list[Path]:
    return sorted((cache / "shards").glob("*/*.safetensors"))


def spoil(mirror: Mirror, name: str, place: int = -1) -> None:
    """Flip a bit of an object in the store."""
    content = bytearray(mirror.store.read(name))
    content[place] ^= 1
    mirror.store.replace(name, bytes(content))


def test_samples_come_out_of_the_store_bit_for_bit_and_shards_are_fetched_once(url, s3):
    assert same_samples(read_all(url), SAMPLES)
    assert len(fetched(s3)) == len(set(fetched(s3))) > 4
    s3.requests.clear()
    assert same_samples(read_all(url), SAMPLES)
    assert fetched(s3) == []


def test_reading_one_sample_fetches_one_shard_and_opening_fetches_none(url, s3):
    with CacheReader(local_folder(url)) as reader:
        assert fetched(s3) == []
        assert cache_info(reader.cache)["missing_shards"] == []
        assert verify(reader.cache, show=False).whole
        assert fetched(s3) == []
        reader.read([5])
    assert len(fetched(s3)) == 1


def test_copies_stay_within_the_bound_and_the_last_used_stay(url, s3, monkeypatch):
    monkeypatch.setenv("DFLASH_LOCAL_CACHE_GB", "2e-5")  # 20 kB: some of the shards
    order = list(range(24)) * 3
    random.Random(0).shuffle(order)
    with CacheReader(local_folder(url)) as reader:
        by_id = {sample.id: bits(sample) for sample in SAMPLES}
        for row in order:
            sample = reader.read([row])[0]
            assert bits(sample) == by_id[sample.id]
            assert sum(path.stat().st_size for path in copies(reader.cache)) <= 20_000
    assert len(fetched(s3)) > len(set(fetched(s3)))


def test_fetching_ahead_fills_the_bound_and_leaves_errors_to_the_read(url, s3):
    with CacheReader(local_folder(url)) as reader:
        reader.fetch_ahead()
        for thread in threading.enumerate():
            if thread.name == "fetch-ahead":
                thread.join(20)
        assert len(copies(reader.cache)) == len(reader.index.layouts)
        s3.away = True
        assert same_samples(reader.read(range(24)), SAMPLES)


def test_a_copy_that_arrives_bad_is_fetched_again_once_and_then_an_error(url, s3):
    mirror = Mirror.at(url)
    cache = local_folder(url)
    name = next(layout.name for layout in CacheReader(cache).index.layouts)
    spoil(mirror, name)
    s3.requests.clear()
    with CacheReader(cache) as reader, pytest.raises(CacheCorrupt, match=rf"{name}: .*digest.*twice"):
        reader.read(range(24))
    assert max(s3.requests[request] for request in fetched(s3)) == 2
    spoil(mirror, name)  # whole again
    assert same_samples(read_all(url), SAMPLES)


def test_a_copy_that_goes_bad_on_the_disk_is_replaced_from_the_store(url, s3):
    read_all(url)
    for path in copies(local_folder(url)):
        content = bytearray(path.read_bytes())
        content[4096 + 3] ^= 4
        path.write_bytes(content)
    assert same_samples(read_all(url), SAMPLES)


def test_a_copy_that_another_process_removed_is_fetched_again(url, s3):
    with CacheReader(local_folder(url), max_open=1) as reader:
        reader.read(range(24))
        for path in copies(reader.cache):
            path.unlink()
        assert same_samples(reader.read(range(24)), SAMPLES)


@pytest.mark.parametrize("fault", FAULTS)
def test_reading_goes_through_a_store_that_fails_now_and_then(url, s3, fault):
    dice = random.Random(1)
    s3.fault = lambda _method, _path: fault if dice.random() < 0.15 else None
    assert same_samples(read_all(url), SAMPLES)


def write(url: str, samples) -> Path:
    """Extraction's part of the work: join the cache, write what is missing, complete it when nothing is."""
    mirror = mirror_of(local_folder(url, pull=False))
    with mirror.writing():
        mirror.begin()
        manifest = create_cache(mirror.cache, make_manifest(len(SAMPLES)))
        sweep_uncommitted(mirror.cache)
        mirror.push_parts()
        done = set(committed_ids(mirror.cache).tolist())
        with CacheWriter(mirror.cache, manifest, writer_name(mirror, 0), 400, mirror.commits) as out:
            for sample in samples:
                if sample.id not in done:
                    out.write(sample)
        if len(committed_ids(mirror.cache)) == len(SAMPLES):
            finalized(mirror.cache, mirror, ())
    return mirror.cache


def other_machine(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))


def test_writing_goes_on_from_another_machine_where_the_first_one_died(s3, bucket, tmp_path, monkeypatch):
    url = f"{bucket}/cache"
    write(url, SAMPLES[:10])
    other_machine(monkeypatch, tmp_path / "second")
    assert len(committed_ids(local_folder(url))) == 10
    with pytest.raises(CacheError, match="of 24 samples"):
        read_all(url)
    write(url, SAMPLES)
    other_machine(monkeypatch, tmp_path / "third")
    assert same_samples(read_all(url), SAMPLES)
    assert Mirror.at(url).sweep(layout.name for layout in CacheReader(local_folder(url)).index.layouts) == []


@pytest.mark.parametrize("puts", [0, 1, 2, 3, 6, 9])
def test_a_store_that_goes_away_after_any_request_loses_nothing(s3, bucket, tmp_path, monkeypatch, puts):
    url, left = f"{bucket}/cache", puts

    def away(method: str, _path: str) -> str | None:
        nonlocal left
        left -= method == "PUT"
        return "drop" if left < 0 else None

    s3.fault = away
    with monkeypatch.context() as patch:
        patch.setattr("dflash.store.RETRY_S", 0.3)
        with pytest.raises(StoreError, match="run the same command again when the store answers"):
            write(url, SAMPLES)
    s3.reset()
    if puts % 2:
        other_machine(monkeypatch, tmp_path / "second")
        writers_expire(monkeypatch)
    write(url, SAMPLES)
    other_machine(monkeypatch, tmp_path / "third")
    assert same_samples(read_all(url), SAMPLES)


def test_commits_that_never_reached_the_store_give_way_to_what_others_did(s3, bucket, tmp_path, monkeypatch):
    url = f"{bucket}/cache"
    write(url, SAMPLES[:4])
    s3.fault = lambda method, path: "drop" if method == "PUT" and "/index/" in path else None
    with monkeypatch.context() as patch:
        patch.setattr("dflash.store.RETRY_S", 0.3)
        with pytest.raises(StoreError):
            write(url, SAMPLES[:12])
    s3.reset()
    first = tmp_path / "mirrors"
    other_machine(monkeypatch, tmp_path / "second")
    writers_expire(monkeypatch)
    write(url, SAMPLES[::-1])
    other_machine(monkeypatch, first)
    assert same_samples(read_all(url), SAMPLES)


def test_looking_at_a_cache_takes_nothing_from_the_process_that_writes_it(s3, bucket, monkeypatch):
    url = f"{bucket}/cache"
    write(url, SAMPLES[:4])
    s3.fault = lambda method, path: "drop" if method == "PUT" and "/commit-" in path else None
    with monkeypatch.context() as patch:
        patch.setattr("dflash.store.RETRY_S", 0.3)
        with pytest.raises(StoreError):
            write(url, SAMPLES[:6])  # the fifth is on the disk and cannot be committed
    s3.reset()
    cache = local_folder(url)
    unsent = set(copies(cache))
    assert len(committed_ids(cache)) == 4
    assert set(copies(cache)) == unsent
    s3.requests.clear()
    write(url, SAMPLES[:6])
    sent = [key for key in s3.requests if key.startswith("PUT") and "/shards/" in key]
    assert len(sent) == 2  # the one that was there, and the one that had to be made
    assert len(committed_ids(local_folder(url))) == 6


def test_following_sees_what_another_machine_commits(s3, bucket, tmp_path, monkeypatch):
    url = f"{bucket}/cache"
    write(url, SAMPLES[:10])
    first = tmp_path / "mirrors"
    other_machine(monkeypatch, tmp_path / "second")
    growing = GrowingCache(local_folder(url))
    names, complete = growing.look()
    assert not complete
    rows = growing.add([names])
    other_machine(monkeypatch, first)
    write(url, SAMPLES)
    growing._next_look = 0.0
    names, complete = growing.look()
    assert complete
    later = growing.add([names])
    samples = growing.reader.read([*range(rows.start, rows.stop), *range(later.start, later.stop)])
    assert same_samples(samples, SAMPLES)


def test_another_identity_and_a_simultaneous_beginning_are_refused(s3, url, bucket, tmp_path):
    mirror = mirror_of(local_folder(url))
    with pytest.raises(CacheMismatch, match="hidden_size"):
        create_cache(mirror.cache, make_manifest(24, replace(IDENTITY, hidden_size=8)))
    fresh = mirror_of(local_folder(f"{bucket}/new", pull=False))
    with fresh.writing():
        fresh.begin()
        create_cache(fresh.cache, make_manifest(24))
        create = fresh.store.create
        fresh.store.create = lambda key, content: (
            Mirror.at(fresh.url).store.replace(key, b"another's"),
            create(key, content),
        )
        with pytest.raises(CacheError, match="written by another process just now"):
            fresh.push_parts()


def test_deep_verify_and_repair_ask_the_store_and_change_it(url, s3):
    mirror = Mirror.at(url)
    cache = local_folder(url)
    names = [layout.name for layout in CacheReader(cache).index.layouts]
    read_all(url)  # good copies are here, which must not hide what the store holds
    spoil(mirror, names[0], 4096)
    mirror.store.remove(names[1])
    assert [fault.file for fault in verify(cache, show=False).faults] == [names[1]]
    assert sorted(fault.file for fault in verify(cache, deep=True, show=False).faults) == sorted(names[:2])
    report = repair(cache, show=False)
    assert len(report.lost) > 0
    assert not json.loads(mirror.store.read(MANIFEST_NAME))["complete"]
    assert set(mirror.shard_sizes()) == set(names[2:])
    write(url, SAMPLES)
    assert verify(local_folder(url), deep=True, show=False).whole
    assert same_samples(read_all(url), SAMPLES)


def test_what_is_no_cache_and_a_bound_that_is_no_number_are_one_line(s3, bucket, url, monkeypatch):
    with pytest.raises(CacheError, match=r"s3://.*/nothing is not a cache"):
        local_folder(f"{bucket}/nothing")
    monkeypatch.setenv("DFLASH_LOCAL_CACHE_GB", "lots")
    with pytest.raises(CacheError, match="DFLASH_LOCAL_CACHE_GB='lots'"):
        local_folder(url)


def test_names_in_the_store_that_are_none_of_a_cache_are_left_there(url, s3):
    mirror = Mirror.at(url)
    mirror.store.replace("tokenizer/../../outside", b"x") if False else mirror.store.replace(
        "notes.txt", b"x"
    )
    cache = local_folder(url)
    assert not (cache / "notes.txt").exists()


def test_a_file_url_is_the_folder_and_memory_works_within_a_process(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mirrors"))
    cache = write_cache(tmp_path / "made", SAMPLES)
    assert local_folder(f"file://{cache}") == cache
    push_cache(cache, f"memory://{tmp_path.name}/cache", show=False)
    assert same_samples(read_all(f"memory://{tmp_path.name}/cache"), SAMPLES)
