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
from dflash.cache.io import OpenFile, OpenFiles, Workers, neighbours, portions
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


def test_a_piecewise_checksum_is_that_of_the_whole(path, monkeypatch):
    for chunk in (1, 7, 1000, 5000, 6000):
        monkeypatch.setattr(io, "CHUNK_BYTES", chunk)
        data = bytearray(4000)
        assert OpenFile(path, len(CONTENT)).fill_checked([memoryview(data)], 900) == [crc32c.crc32c(data)]
        assert data == CONTENT[900:4900]


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
    low, size = np.array(starts, np.int64), np.array(sizes, np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "CHUNK_BYTES", 1000)
        runs = neighbours(low, size)
    high = low + size
    assert [row for run in runs for row in range(run.start, run.stop)] == list(range(len(starts)))
    for run in runs:
        assert low[run][1:].tolist() == high[run][:-1].tolist()
        assert run.stop - run.start == 1 or low[run][0] // 1000 == (high[run][-1] - 1) // 1000
    for one, other in pairwise(runs):  # nothing is left apart that could be joined
        begin, end = low[one.start], high[other.stop - 1] - 1
        assert high[one.stop - 1] != low[other.start] or begin // 1000 != end // 1000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), min_size=1, max_size=60))
def test_portions_are_whole_ordered_and_of_one_file(extents):
    files, sizes = np.array(sorted(extents), np.int64).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "PORTION_BYTES", 1000)
        parts = portions(files, sizes)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(files)))
    for part in parts:
        assert len(set(files[part])) == 1
        assert sizes[part][:-1].sum() < 1000
    assert len(parts) <= len(set(files)) + sizes.sum() // 1000


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
