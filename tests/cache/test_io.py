"""Bytes of files: whole, from the right place, by few calls, few open files and no thread left behind."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise

import crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cache import io
from dflash.cache.io import OpenFile, OpenFiles, Transfer, Workers, portions
from dflash.errors import CacheCorrupt

CONTENT = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("io") / "file"
    path.write_bytes(CONTENT)
    return path


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=16), st.integers(0, 200), st.integers(1, 700))
def test_parts_are_filled_in_order_however_little_one_call_returns(path, sizes, start, most):
    file = OpenFile(path, len(CONTENT))
    data = bytearray(sum(sizes))
    ends = np.cumsum(sizes).tolist()
    parts = [memoryview(data)[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    whole = os.preadv

    def little(descriptor, buffers, at):
        """One call that returns at most `most` bytes."""
        piece = bytearray(min(most, sum(map(len, buffers))))
        count = whole(descriptor, [piece], at)
        for buffer in buffers:
            buffer[: len(piece)] = piece[: len(buffer)]
            piece = piece[len(buffer) :]
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", little)
        file.fill(parts, start)
    assert data == CONTENT[start : start + len(data)]


def transfer(starts, sizes) -> Transfer:
    """To memory that holds the extents one after another."""
    ends = np.cumsum(sizes).tolist()
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    return Transfer(memoryview(bytearray(ends[-1])), starts, begins, ends)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=30),
    st.sampled_from([1, 7, 100, 6000]),
    st.booleans(),
)
def test_extents_arrive_whole_with_their_checksums_in_whatever_pieces(path, steps, chunk, checked):
    starts, sizes, end = [], [], 0
    for gap, size in steps:
        starts.append(end + gap)
        sizes.append(size)
        end += gap + size
    wanted = transfer(starts, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "CHUNK_BYTES", chunk)
        (portion,) = portions([0] * len(starts), starts, sizes)
        crcs = OpenFile(path, len(CONTENT)).load(wanted, portion, checked=checked)
    extents = [CONTENT[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert wanted.memory == b"".join(extents)
    assert crcs == [crc32c.crc32c(extent) if checked else 0 for extent in extents]


def test_an_extent_that_one_call_does_not_fill_is_read_on_and_errors_are_told(path, monkeypatch):
    file, wanted = OpenFile(path, len(CONTENT)), transfer([900], [100])
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: whole(file, [parts[0][:30]], at))
    file.load(wanted, [(0, 1)], checked=True)
    assert wanted.memory == CONTENT[900:1000]

    def refuse(*_):
        raise OSError("input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(CacheCorrupt, match=r"cannot be read at byte 900 \(input/output error\)"):
        file.load(wanted, [(0, 1)], checked=True)


def test_reading_behind_the_end_says_where_the_file_ends(path):
    with pytest.raises(CacheCorrupt, match="ends at byte 5000"):
        OpenFile(path, len(CONTENT)).bytes_at(4990, 11)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=60), st.integers(0, 3000))
def test_runs_are_whole_ordered_and_joined_only_inside_a_piece_of_the_file(steps, start):
    starts, sizes = [start], [100]
    for size, gap in steps:
        starts.append(starts[-1] + sizes[-1] + gap)
        sizes.append(size)
    ends = [low + size for low, size in zip(starts, sizes, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "CHUNK_BYTES", 1000)
        (runs,) = portions([0] * len(starts), starts, sizes)
    assert [row for low, high in runs for row in range(low, high)] == list(range(len(starts)))
    for low, high in runs:
        assert starts[low + 1 : high] == ends[low : high - 1]
        assert high - low == 1 or starts[low] // 1000 == (ends[high - 1] - 1) // 1000
    for (low, behind), (_, high) in pairwise(runs):  # nothing is left apart that could be joined
        assert ends[behind - 1] != starts[behind] or starts[low] // 1000 != (ends[high - 1] - 1) // 1000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), min_size=1, max_size=60))
def test_portions_are_whole_ordered_and_of_one_file(extents):
    files, sizes = zip(*sorted(extents), strict=True)
    starts = (np.cumsum(sizes) - sizes).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "PORTION_BYTES", 1000)
        parts = [range(runs[0][0], runs[-1][1]) for runs in portions(files, starts, sizes)]
    assert [row for part in parts for row in part] == list(range(len(files)))
    for part in parts:
        assert len({files[row] for row in part}) == 1
        assert sum(sizes[row] for row in part[:-1]) < 1000
    assert len(parts) <= len(set(files)) + sum(sizes) // 1000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 4), st.integers(0, 30))
def test_the_latest_files_are_held_within_both_bounds(numbers, limit, weight_limit):
    held: list[int] = []
    opened = []

    def load(number):
        opened.append(number)
        return number

    files = OpenFiles(load, lambda number: number, limit, weight_limit)
    for number in numbers:
        known = number in held
        before = len(opened)
        assert files.get(number) == number
        assert (len(opened) == before) == known
        held = [*(other for other in held if other != number), number]
        if not known:
            held = held[-limit:]
            while sum(held) > weight_limit and len(held) > 1:
                held = held[1:]


def test_every_item_is_worked_on_once_and_several_threads_take_part(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    workers, done, threads = Workers(4), [], set()

    def work(item):
        time.sleep(0.001)
        threads.add(threading.get_ident())
        done.append(item)

    workers.run(work, range(40))
    assert sorted(done) == list(range(40))
    assert len(threads) > 1
    workers.close()
    workers.run(work, [40])
    assert done[-1] == 40


def test_small_work_is_done_alone_and_long_work_gets_help(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    workers, threads = Workers(4), set()

    def work(_item):
        time.sleep(0.002)
        threads.add(threading.get_ident())

    workers.run(work, range(3), alone_s=30)
    assert threads == {threading.get_ident()}
    workers.run(work, range(60), alone_s=0.004)
    assert len(threads) > 1
    with pytest.raises(ZeroDivisionError):
        workers.run(lambda item: 1 // item, [1, 0, 1], alone_s=30)
    workers.close()


def test_an_error_is_raised_once_nobody_works_any_more(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    workers, running = Workers(4), []

    def work(item):
        running.append(item)
        time.sleep(0.002)
        running.remove(item)
        if item == 3:
            raise ValueError(item)

    for _ in range(5):
        with pytest.raises(ValueError, match="3"):
            workers.run(work, range(40))
        assert running == []
    workers.close()


def test_a_forked_process_makes_its_own_threads(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    workers = Workers(4)
    workers.run(time.sleep, [0.001] * 8)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork, where the pool's threads are not there
    abandoned = workers._pool
    workers.run(time.sleep, [0.001] * 8)
    assert workers._pool is not abandoned
    abandoned.shutdown()
    workers.close()
