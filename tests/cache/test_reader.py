"""Reading: any order, bit for bit, and nothing damaged ever comes out."""

from __future__ import annotations

import gc
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_samples import IDENTITY, bits, make_samples, read_all, write_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cache.reader import CacheReader
from dflash.errors import CacheCorrupt

SAMPLES = make_samples(24)
BY_ID = {sample.id: bits(sample) for sample in SAMPLES}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return write_cache(tmp_path_factory.mktemp("reader") / "cache", SAMPLES)


@pytest.fixture
def cache(finished, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shards(cache):
    return sorted((cache / "shards").glob("*/*"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 23), max_size=40))
def test_rows_come_in_the_order_asked_for_and_may_repeat(finished, rows):
    with CacheReader(finished) as reader:
        samples = reader.read(rows)
        assert [sample.id for sample in samples] == reader.index.ids[np.array(rows, np.int64)].tolist()
    assert all(bits(sample) == BY_ID[sample.id] for sample in samples)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5).map(lambda size: size * 4),
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(1, 2000),
)
def test_any_shape_and_dtype_round_trips(tmp_path_factory, hidden, taps, dtype, shard_bytes):
    identity = replace(IDENTITY, hidden_size=hidden, taps=tuple(taps), num_target_layers=10, dtype=dtype)
    samples = make_samples(8, identity)
    cache = write_cache(tmp_path_factory.mktemp("trip") / "cache", samples, identity, shard_bytes=shard_bytes)
    assert sorted(map(bits, read_all(cache))) == sorted(map(bits, samples))


def test_hidden_states_lie_in_the_buffer_that_was_given(finished):
    with CacheReader(finished) as reader:
        rows = [5, 3, 9]
        buffer = torch.zeros(reader.buffer_bytes(rows) + 64, dtype=torch.uint8)
        samples = reader.read(rows, buffer)
        assert samples[0].hidden_states.data_ptr() == buffer.data_ptr()
        together = torch.cat([sample.hidden_states.reshape(-1) for sample in samples]).view(torch.uint8)
        assert torch.equal(together, buffer[:-64])
        assert not buffer[-64:].any()
        assert together.numel() == sum(len(s.input_ids) for s in samples) * IDENTITY.bytes_per_token


def test_ids_and_masks_cannot_be_written_to_for_later_reads_would_see_it(finished):
    with CacheReader(finished) as reader:
        (sample,) = reader.read([3])
        for array in (sample.input_ids, sample.loss_mask):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_rows_outside_the_index_are_refused(finished):
    with CacheReader(finished) as reader:
        for rows in ([24], [-1, 3]):
            with pytest.raises(IndexError, match="of 24 samples"):
                reader.read(rows)
        assert reader.read([]) == []


def test_open_files_stay_bounded_and_are_closed(finished):
    gc.collect()  # readers of other tests may still hold some
    before = open_files()
    with CacheReader(finished, max_open=2) as reader:
        assert len(shards(finished)) > 4
        for row in range(24):
            reader.read([row])
            assert open_files() <= before + 2
    assert open_files() == before


def test_several_threads_read_through_one_reader(finished):
    with CacheReader(finished, max_open=1) as reader, ThreadPoolExecutor(4) as pool:
        for samples in pool.map(reader.read, np.random.default_rng(0).integers(0, 24, (40, 6))):
            assert all(bits(sample) == BY_ID[sample.id] for sample in samples)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_flipped_bit_in_a_shard_is_detected_and_named(finished, data):
    path = data.draw(st.sampled_from(shards(finished)))
    place = data.draw(st.integers(0, path.stat().st_size - 1))
    flip = 1 << data.draw(st.integers(0, 7))
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ flip]))
    try:
        with pytest.raises(CacheCorrupt, match=path.name) as caught:
            read_all(finished)
        assert "\n" not in str(caught.value)
    finally:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))


def test_one_bad_sample_does_not_hide_the_good_ones(cache):
    path = shards(cache)[0]
    content = bytearray(path.read_bytes())
    content[4096] ^= 1  # the first sample's first value
    path.write_bytes(content)
    with CacheReader(cache) as reader:
        places = reader.index.locate(np.arange(24))
        names = [reader.index.layouts[number].name for number in places.shards.tolist()]
        for row, (name, place) in enumerate(zip(names, places.shard_rows.tolist(), strict=True)):
            if name.endswith(path.name) and place == 0:
                with pytest.raises(CacheCorrupt, match=rf"{path.name}: row 0 .*`dflash cache verify`"):
                    reader.read([row])
            else:
                assert bits(reader.read([row])[0]) in BY_ID.values()


def test_a_shard_cut_at_any_length_is_detected_and_named(cache):
    path = shards(cache)[0]
    content = path.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1, len(content) + 1]:
        path.write_bytes((content + b"\0")[:length])
        with pytest.raises(CacheCorrupt, match=path.name):
            read_all(cache)


def test_a_shard_cut_while_it_is_open_raises(cache):
    with CacheReader(cache) as reader:
        rows = range(24)
        reader.read(rows)
        for path in shards(cache):
            os.truncate(path, 4096)
        for row in rows:
            with pytest.raises(CacheCorrupt, match="it was cut short"):
                reader.read([row])


def test_a_missing_shard_and_two_swapped_ones_are_named(cache):
    one, other = next((a, b) for a in shards(cache) for b in shards(cache) if a < b and a.parent == b.parent)
    aside = cache / "aside"
    one.rename(aside)
    with pytest.raises(CacheCorrupt, match=f"{one.name} is missing"):
        read_all(cache)
    other.rename(one)
    aside.rename(other)
    with pytest.raises(CacheCorrupt, match=one.name):
        read_all(cache)


def test_equal_shards_of_two_units_are_told_apart_by_their_header(tmp_path):
    """Same bucket, counts and sizes: only the unit in the header differs."""
    samples = [sample for sample in make_samples(80) if len(sample.input_ids) == 3][:2]
    cache = write_cache(tmp_path / "cache", samples, shard_bytes=1)
    one, other = shards(cache)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(CacheCorrupt, match="header"):
        read_all(cache)


def test_a_pipe_or_folder_in_the_place_of_a_shard_is_refused_without_waiting(cache):
    path = shards(cache)[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CacheCorrupt, match=path.name):
        read_all(cache)
    path.unlink()
    path.mkdir()
    with pytest.raises(CacheCorrupt, match=path.name):
        read_all(cache)
