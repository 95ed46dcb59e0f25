"""Of two runs that write to one URL one goes on, the other learns of it, and no sample is committed twice."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_samples import make_manifest, make_samples, same_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from object_store import writers_expire

from dflash.cache import claim as claim_module
from dflash.cache.claim import CLAIMS_FOLDER, Claim
from dflash.cache.manifest import create_cache, load_manifest, save_manifest
from dflash.cache.mirror import FOLDER_VARIABLE, Mirror, local_folder
from dflash.cache.push import push_cache
from dflash.cache.reader import CacheReader, committed_ids
from dflash.cache.repair import repair
from dflash.cache.writer import CacheWriter, sweep_uncommitted
from dflash.errors import CacheError
from dflash.extract.remote import finalized, writer_name

SAMPLES = make_samples(6)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/cache"


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Callable[[str, str], Mirror]:
    """Gives the mirror of a URL on a machine of this name; what follows runs on that one."""

    def on(name: str, url: str) -> Mirror:
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / name))
        return Mirror.at(url)

    return on


def begin(mirror: Mirror) -> CacheWriter:
    """What extraction does before its first sample."""
    mirror.begin()
    manifest = create_cache(mirror.cache, make_manifest(len(SAMPLES)))
    sweep_uncommitted(mirror.cache)
    mirror.push_parts()
    return CacheWriter(mirror.cache, manifest, writer_name(mirror, 0), 400, mirror.commits)


def write_rest(mirror: Mirror, samples: Sequence[Any] = SAMPLES) -> None:
    """Go on with an extraction until all samples are committed."""
    with mirror.writing():
        with begin(mirror) as out:
            done = set(committed_ids(mirror.cache).tolist())
            for sample in samples:
                if sample.id not in done:
                    out.write(sample)
                    out.flush()
        finalized(mirror.cache, mirror, ())


def read_all(url: str) -> list[Any]:
    with CacheReader(local_folder(url)) as reader:
        return reader.read(range(len(reader.index)))


def die(mirror: Mirror, monkeypatch) -> None:
    """Begin an extraction, commit one sample, and end without a word."""
    with monkeypatch.context() as patch:
        patch.setattr(claim_module.Holder, "data", lambda _self, data=claim_module.Holder.data: data(_self))
        patch.setattr(claim_module, "replace", lambda holder, released: holder)
        with mirror.writing(), begin(mirror) as out:
            out.write(SAMPLES[0])


def test_a_second_machine_is_told_who_writes_and_changes_nothing(url, machine):
    first, second = machine("one", url), machine("two", url)
    with first.writing():
        begin(first).close()
        before = first.store.listed()
        for attempt in (
            lambda: write_rest(second),
            lambda: repair(local_folder(url), show=False),
            lambda: push_cache(second.cache, url, show=False),
        ):
            with pytest.raises(
                CacheError,
                match=r"is being written by \S+ \(process \d+\) since \d{4}-.*, last heard of \d+ s ago; "
                r"wait for it, or if it is dead run the same command again in \d+ s, on its machine at once$",
            ):
                attempt()
        assert first.store.listed() == before
    write_rest(second)
    assert same_samples(read_all(url), SAMPLES)


def test_a_second_process_of_one_machine_is_told_so(url, machine):
    with machine("one", url).writing():
        with pytest.raises(
            CacheError, match=r"by process \d+ \(since .*\) of this machine; wait for it or stop"
        ):
            write_rest(machine("one", url))
        assert len(machine("one", url).store.sizes(CLAIMS_FOLDER)) == 1


def test_who_died_blocks_other_machines_for_a_while_and_its_own_not_at_all(url, machine, monkeypatch):
    die(machine("one", url), monkeypatch)
    with pytest.raises(CacheError, match="is being written by"):
        write_rest(machine("two", url))
    write_rest(machine("one", url), SAMPLES[:3] + SAMPLES[3:])
    assert same_samples(read_all(url), SAMPLES)


def test_who_died_is_forgotten_after_a_while(url, machine, monkeypatch):
    die(machine("one", url), monkeypatch)
    writers_expire(monkeypatch)
    write_rest(machine("two", url))
    assert same_samples(read_all(url), SAMPLES)
    assert len(Mirror.at(url).store.sizes(CLAIMS_FOLDER)) == 1


def test_who_was_only_asleep_stops_before_its_next_commit(url, machine, monkeypatch):
    sleeper, other = machine("one", url), machine("two", url)
    with sleeper.writing():
        out = begin(sleeper)
        out.write(SAMPLES[0])
        writers_expire(monkeypatch)
        write_rest(other)
        there = other.store.sizes("index")
        with pytest.raises(
            CacheError, match=r"was taken over by \S+ \(process .* had not been heard of for 300 s"
        ):
            out.flush()
        with pytest.raises(CacheError, match="was taken over by"):
            sleeper.push_file()
        assert other.store.sizes("index") == there
    assert same_samples(read_all(url), SAMPLES)
    assert not machine("two", url).store.read(Claim(other.store, 2).key).endswith(b'"released": false}')


def test_a_writer_gives_signs_of_life(url, machine, monkeypatch):
    monkeypatch.setattr(claim_module, "EXPIRY_S", 0.05)
    mirror, signs = machine("one", url), threading.Event()
    monkeypatch.setattr(claim_module, "Store", lambda *_args: Signing())

    class Signing:
        def replace(self, key: str, content: bytes) -> None:
            assert key == mirror.claim.key
            signs.set()

    with mirror.writing():
        assert signs.wait(20)


def test_a_claim_that_nobody_can_read_counts_as_somebody(url, machine):
    mirror = machine("one", url)
    mirror.store.create(Claim(mirror.store, 7).key, b"\xff{")
    with pytest.raises(CacheError, match=r"by an unknown host \(process 0\) since an unknown time"):
        write_rest(mirror)


class Turns:
    """Lets two writers ask their store in a given order, one request at a time."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.running, self.changed = deque(order), {0, 1}, threading.Condition()

    def take(self, who: int, work: Callable[[], Any]) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: self._next() in {who, None})
            if self.order:
                self.order.popleft()
            try:
                return work()
            finally:
                self.changed.notify_all()

    def leave(self, who: int) -> None:
        with self.changed:
            self.running.discard(who)
            self.changed.notify_all()

    def _next(self) -> int | None:
        while self.order and self.order[0] not in self.running:
            self.order.popleft()
        return self.order[0] if self.order else None

    def give(self, who: int, mirror: Mirror) -> None:
        """Make the requests of this mirror wait for their turn."""
        for name in ("listed", "read", "create", "replace", "remove"):
            work = getattr(mirror.store, name)
            setattr(mirror.store, name, lambda *args, work=work: self.take(who, lambda: work(*args)))


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.long, id="long")])
@pytest.mark.parametrize("claims", ["hold", "expire", "are not looked at"])
def test_no_sample_is_committed_twice_in_whatever_order_two_runs_ask_the_store(
    tmp_path_factory, claims, examples
):
    @settings(deadline=None, max_examples=examples)
    @given(order=st.lists(st.integers(0, 1), max_size=120), swapped=st.booleans())
    def check(order: list[int], swapped: bool) -> None:
        two_runs_in_this_order(tmp_path_factory, claims, order, swapped)

    check()


def two_runs_in_this_order(tmp_path_factory, claims: str, order: list[int], swapped: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        url, root = f"memory://{uuid.uuid4().hex}/cache", tmp_path_factory.mktemp("machines")
        mirrors = []
        for name in ("one", "two"):
            patch.setenv(FOLDER_VARIABLE, str(root / name))
            mirrors.append(Mirror.at(url))
        if claims != "hold":
            writers_expire(patch)
        if claims == "are not looked at":
            patch.setattr(Claim, "check", lambda _self: None)
        ended = run_both(Turns(order), mirrors, SAMPLES[::-1] if swapped else SAMPLES)
        assert all(error is None or isinstance(error, CacheError) for error in ended), ended
        patch.setenv(FOLDER_VARIABLE, str(root / "third"))
        committed = [] if all(ended) and not Mirror.at(url).finished() else read_committed(url)
        assert len(set(committed)) == len(committed)  # loading them has refused repeated ones too
        write_rest(Mirror.at(url))
        assert same_samples(read_all(url), SAMPLES)


def run_both(turns: Turns, mirrors: Sequence[Mirror], second: Sequence[Any]) -> list[BaseException | None]:
    """Two runs at the same time; gives what ended each of them."""
    ended: list[BaseException | None] = [None, None]

    def run(who: int) -> None:
        try:
            write_rest(mirrors[who], SAMPLES if who == 0 else second)
        except BaseException as error:  # noqa: BLE001 - judged by the test
            ended[who] = error
        finally:
            turns.leave(who)

    for who, mirror in enumerate(mirrors):
        turns.give(who, mirror)
    threads = [threading.Thread(target=run, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended


def read_committed(url: str) -> list[int]:
    return committed_ids(local_folder(url)).tolist()


def test_data_is_added_to_a_cache_that_was_pushed_from_elsewhere(url, machine):
    """Claims are counted anew in the other place, and units must not be: their names are those of shards."""
    write_rest(machine("one", f"{url}-before"))
    other = machine("two", url)
    push_cache(local_folder(f"{url}-before"), url, show=False)
    more = make_samples(9)[6:]
    with other.writing():
        other.begin()
        manifest = load_manifest(other.cache)
        save_manifest(other.cache, replace(manifest, expected_samples=9, complete=False, content_digest=None))
        other.push_parts()
        with CacheWriter(other.cache, manifest, writer_name(other, 0), 400, other.commits) as out:
            for sample in more:
                out.write(sample)
        finalized(other.cache, other, ())
    assert same_samples(read_all(url), [*SAMPLES, *more])


def test_folders_of_machines_have_names_of_their_own(url, machine, tmp_path):
    for name in ("one", "two", "one"):
        with machine(name, url).writing():
            pass
    names = {path.read_text() for path in Path(tmp_path).glob("*/*/machine")}
    assert len(names) == 2
