"""The index: opened by common tools, checked to the last bit, independent of writers, fast at any size."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from cache_samples import IDENTITY, make_manifest, make_samples, write_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cache import index as index_module
from dflash.cache.fragment import MAX_FRAGMENT_ROWS, SCHEMA, encode_fragment, fragment_path
from dflash.cache.index import load_index
from dflash.cache.manifest import Manifest, load_manifest, save_manifest
from dflash.cache.reader import CacheReader
from dflash.cache.shard import DATA_START, shard_name
from dflash.cache.sorting import sort_ids
from dflash.errors import CacheCorrupt, CacheError

SAMPLES = make_samples(24)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return write_cache(tmp_path_factory.mktemp("index") / "cache", SAMPLES, shard_bytes=800)


@pytest.fixture
def cache(finished, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def fragments(cache):
    return sorted((cache / "index").iterdir())


def columns_of(shards: int, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A valid index of shards in the middle bucket (lengths 5 to 8), without any shard."""
    random = np.random.default_rng(seed)
    count, size = shards * rows, IDENTITY.bytes_per_token
    length = random.integers(5, 9, count).astype(np.int32)
    before = np.cumsum(length) - length
    return {
        "id": random.integers(0, 1 << 64, count, dtype=np.uint64),
        "bucket": np.full(count, 8, np.int32),
        "shard": np.repeat(np.arange(shards, dtype=np.int32), rows),
        "row": np.tile(np.arange(rows, dtype=np.int32), shards),
        "length": length,
        "supervised": length // 2,
        "offset": DATA_START + (before - np.repeat(before[::rows], rows)) * size,
        "nbytes": length.astype(np.int64) * size,
        "crc32c": random.integers(0, 1 << 32, count, dtype=np.uint32),
    }


def put_fragment(cache, name, columns, names, identity=None):
    manifest = load_manifest(cache)
    (cache / "index").mkdir(exist_ok=True)
    data = encode_fragment(names, columns, name, identity or manifest.digest())
    fragment_path(cache, name).write_bytes(data)


@pytest.fixture
def empty(tmp_path) -> Path:
    save_manifest(tmp_path, make_manifest(10))
    return tmp_path


def test_datasets_pandas_and_pyarrow_open_a_fragment(cache):
    path = fragments(cache)[0]
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    assert table.schema.equals(SCHEMA)
    frame = table.to_pandas()
    assert frame["shard"][0].startswith("shards/len-")
    dataset = datasets.Dataset.from_file(str(path))
    assert dataset.column_names == SCHEMA.names
    assert dataset["id"][:] == frame["id"].tolist() == table["id"].to_pylist()


def test_all_fragments_open_as_one_table_as_the_page_on_the_cache_says(cache):
    tables = [pa.ipc.open_stream(path).read_all() for path in fragments(cache)]
    index = pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()
    frame = index.to_pandas()
    assert frame["id"].nunique() == len(SAMPLES)
    lengths = frame.groupby("bucket")["length"].sum().to_dict()
    assert sum(lengths.values()) == sum(len(sample.input_ids) for sample in SAMPLES)
    assert set(frame["shard"]) == {layout.name for layout in CacheReader(cache).index.layouts}


def test_rows_are_sorted_by_id_whatever_the_number_of_writers(tmp_path, finished):
    reference = CacheReader(finished).index
    assert reference.ids.tolist() == sorted(sample.id for sample in SAMPLES)
    by_id = {sample.id: sample for sample in SAMPLES}
    for writers in (2, 5):
        index = CacheReader(write_cache(tmp_path / str(writers), SAMPLES, writers=writers)).index
        assert index.digest() == reference.digest()
        for name in ("ids", "buckets", "lengths", "supervised"):
            assert np.array_equal(getattr(index, name), getattr(reference, name))
    assert reference.lengths.tolist() == [len(by_id[i].input_ids) for i in reference.ids.tolist()]
    assert reference.supervised.tolist() == [int(by_id[i].loss_mask.sum()) for i in reference.ids.tolist()]
    edges = np.array(IDENTITY.bucket_edges)
    assert np.array_equal(reference.buckets, np.searchsorted(edges, reference.lengths))
    assert reference.buckets.dtype == np.int16
    assert reference.lengths.dtype == reference.supervised.dtype == np.int32


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_flipped_bit_in_a_fragment_is_detected_and_named(finished, data):
    path = data.draw(st.sampled_from(fragments(finished)))
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(damaged)
        with pytest.raises(CacheCorrupt, match=path.name):
            CacheReader(finished)
    finally:
        path.write_bytes(content)


def test_a_fragment_cut_at_any_length_is_detected_and_named(cache):
    path = fragments(cache)[0]
    content = path.read_bytes()
    for length in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CacheCorrupt, match=path.name):
            CacheReader(cache)
    path.write_bytes(content + b"\0")
    with pytest.raises(CacheCorrupt, match=path.name):
        CacheReader(cache)


def test_a_lost_fragment_of_a_finished_cache_is_an_error_that_names_its_shard(cache):
    path = fragments(cache)[1]
    path.unlink()
    with pytest.raises(CacheCorrupt, match=rf"of 24 samples.*{path.stem}\.safetensors") as caught:
        CacheReader(cache)
    assert "\n" not in str(caught.value)
    shutil.rmtree(cache / "index")
    with pytest.raises(CacheCorrupt, match="0 of 24 samples"):
        CacheReader(cache, allow_incomplete=True)


def test_swapped_copied_and_foreign_fragments_are_named(cache, tmp_path):
    one, other = fragments(cache)[:2]
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    with pytest.raises(CacheCorrupt, match=rf"{one.name}.*fragment '{other.stem}'"):
        CacheReader(cache)
    one.write_bytes(contents[0])
    other.write_bytes(contents[1])
    copy = one.with_name("zzz.arrow")
    copy.write_bytes(contents[0])
    with pytest.raises(CacheCorrupt, match=r"zzz\.arrow"):
        CacheReader(cache)
    copy.unlink()
    put_fragment(cache, "zzz", columns_of(1, 1), [shard_name(8, "zzz")], identity="0" * 64)
    with pytest.raises(CacheCorrupt, match=r"zzz\.arrow: belongs to another cache"):
        CacheReader(cache)


def test_other_samples_in_the_same_number_are_not_the_finished_cache(cache):
    path = fragments(cache)[0]
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    columns = {name: table[name].to_numpy() for name in SCHEMA.names if name != "shard"}
    columns |= {"shard": np.zeros(len(table), np.int32), "id": columns["id"] ^ np.uint64(1)}
    put_fragment(cache, path.stem, columns, [table["shard"][0].as_py()])
    with pytest.raises(CacheCorrupt, match="not the samples"):
        CacheReader(cache)


def test_two_fragments_that_claim_one_sample_are_both_named(empty):
    for number, name in enumerate(("a", "b")):
        put_fragment(empty, name, columns_of(1, 3, number), [shard_name(8, name)])
    columns = columns_of(1, 3, 7)
    columns["id"][1] = columns_of(1, 3, 0)["id"][2]
    put_fragment(empty, "c", columns, [shard_name(8, "c")])
    with pytest.raises(CacheCorrupt, match=r"index/a\.arrow and .*index/c\.arrow both commit sample \d+ \(1"):
        load_index(empty, load_manifest(empty))


def test_two_fragments_that_claim_one_shard_are_both_named(empty):
    for number, name in enumerate(("a", "b", "c")):
        put_fragment(empty, name, columns_of(1, 3, number), [shard_name(8, name.replace("c", "a"))])
    with pytest.raises(
        CacheCorrupt, match=r"index/a\.arrow and .*index/c\.arrow both commit shards/len-00008/a"
    ):
        load_index(empty, load_manifest(empty))


IMPOSSIBLE = {
    "bucket": 4,
    "row": 7,
    "length": 9,
    "supervised": -1,
    "offset": -4096,
    "nbytes": 1 << 62,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_row_that_its_shard_cannot_have_is_refused(empty, name, row):
    columns = columns_of(2, 3)
    columns[name][row] = IMPOSSIBLE[name]
    put_fragment(empty, "a", columns, [shard_name(8, "a"), shard_name(8, "b")])
    with pytest.raises(CacheCorrupt, match=rf"a\.arrow: row {row} has an impossible"):
        load_index(empty, load_manifest(empty))


@pytest.mark.parametrize(
    "name",
    ["shards/len-00008/../../x.safetensors", "/etc/passwd", shard_name(7, "a"), "manifest.json", "\0", ""],
)
def test_a_shard_name_outside_the_buckets_is_refused(empty, name):
    put_fragment(empty, "a", columns_of(1, 3), [name])
    with pytest.raises(CacheCorrupt, match="unusable shard names"):
        load_index(empty, load_manifest(empty))


def test_rows_out_of_the_order_of_their_shards_are_refused(empty):
    columns = columns_of(2, 3)
    columns["shard"] = columns["shard"][::-1].copy()
    put_fragment(empty, "a", columns, [shard_name(8, "a"), shard_name(8, "b")])
    with pytest.raises(CacheCorrupt, match="order of its shards"):
        load_index(empty, load_manifest(empty))


def test_another_schema_and_no_arrow_at_all_are_refused(empty, monkeypatch):
    monkeypatch.setattr(index_module.crc32c, "crc32c", lambda data, value=0: 0)
    path = fragment_path(empty, "a")
    path.parent.mkdir()
    table = pa.table({"id": pa.array([1], pa.uint64())}).replace_schema_metadata({"x": "crc32c:00000000"})
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(CacheCorrupt, match="index schema"):
        load_index(empty, load_manifest(empty))
    path.write_bytes(b"crc32c:00000000" + bytes(100))
    with pytest.raises(CacheCorrupt, match=r"not an Arrow stream|index schema"):
        load_index(empty, load_manifest(empty))


def test_an_index_that_cannot_be_read_is_an_error_of_the_cache(empty):
    (empty / "index").write_text("a file")
    with pytest.raises(CacheError, match="cannot read"):
        load_index(empty, load_manifest(empty))


def test_two_hundred_thousand_rows_load_at_the_rate_that_ten_million_need(tmp_path):
    """10 M rows must load in 2 s and 1 GiB; the margin of 5 is for a busy machine."""
    save_manifest(tmp_path, Manifest(IDENTITY, 200_000))
    for number in range(4):
        names = [shard_name(8, f"w{number}-{shard:06d}") for shard in range(100)]
        put_fragment(tmp_path, f"w{number}", columns_of(100, 500, number), names)
    manifest = load_manifest(tmp_path)
    load_index(tmp_path, manifest)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    index = load_index(tmp_path, manifest)
    assert time.process_time() - start < 5 * 2.0 * 200_000 / 10_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10  # KiB
    assert len(index) == 200_000
    assert bool(np.all(index.ids[1:] > index.ids[:-1]))
    assert MAX_FRAGMENT_ROWS >= 50_000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, (1 << 64) - 1) | st.integers(0, 40), max_size=60),
    st.integers(0, 63),
)
def test_ids_are_sorted_whatever_bits_they_share(values, shift):
    ids = np.array(values, np.uint64) >> np.uint64(shift)
    found, places = sort_ids(ids)
    assert found.tolist() == sorted(ids.tolist())
    assert places.tolist() == np.argsort(ids, kind="stable").tolist()


def test_opening_a_cache_does_not_wait_for_pandas(finished):
    """Which pyarrow imports for its own conversions to NumPy."""
    code = "import sys; from pathlib import Path; from dflash.cache.reader import CacheReader"
    code += "; CacheReader(Path(sys.argv[1])); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, finished], check=False).returncode == 0
