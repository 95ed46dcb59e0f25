"""Rows are read by what a file holds, and what cannot be read is one clear line."""

from __future__ import annotations

import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dflash.errors import CorpusError
from dflash.extract.formats import find_sources

ROWS = [{"text": f"row {number}", "n": number} for number in range(5)]


def read(*data):
    return [row for source in find_sources([str(name) for name in data]) for row in source.rows()]


def as_lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def as_table(kind: str) -> bytes:
    table, sink = pa.Table.from_pylist(ROWS), pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(table, sink, row_group_size=2)
    else:
        make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


CONTENT = {
    "jsonl": as_lines(),
    "jsonl with blank lines and a byte order mark": b"\xef\xbb\xbf" + as_lines().replace(b"\n", b"\n\n"),
    "array": json.dumps(ROWS, indent=1).encode(),
    "parquet": as_table("parquet"),
    "arrow": as_table("arrow"),
    "arrow stream": as_table("stream"),
}
PACK = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "zstd in two frames": lambda data: b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (data[: len(data) // 2], data[len(data) // 2 :])
    ),
    "gzip in zstd": lambda data: zstandard.ZstdCompressor().compress(gzip.compress(data)),
}


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("content", CONTENT)
def test_the_format_is_told_by_content_whatever_the_name(tmp_path, content, pack):
    path = tmp_path / "data.txt"
    path.write_bytes(PACK[pack](CONTENT[content]))
    rows = read(path)
    assert [row.fields for row in rows] == ROWS
    assert all(str(path) in row.where for row in rows)
    assert 0 <= rows[0].read <= rows[-1].read <= path.stat().st_size


def test_several_files_folders_and_patterns_are_read_in_a_fixed_order(tmp_path):
    for name in (
        "b.jsonl",
        "a.jsonl",
        "deep/c.jsonl",
        "deep/.hidden.jsonl",
        "deep/notes.md",
        "dataset_info.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}))
    assert [row.fields["text"] for row in read(tmp_path)] == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert [row.fields["text"] for row in read(tmp_path / "?.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [row.fields["text"] for row in read(tmp_path / "**" / "c.*")] == ["deep/c.jsonl"]
    names = [row.fields["text"] for row in read(tmp_path / "deep", tmp_path / "a.jsonl")]
    assert names == ["deep/c.jsonl", "a.jsonl"]


def test_a_saved_data_set_is_read_from_its_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert [row.fields for row in read(tmp_path / "saved")] == ROWS


def test_a_line_that_is_not_json_is_named_by_its_number(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(CorpusError, match=r"data\.jsonl, line 3: not JSON") as caught:
        read(path)
    assert "\n" not in str(caught.value)


BAD = {
    "nothing": (b"", "the file is empty"),
    "blank lines": (b"\n\n", "the file is empty"),
    "an empty array": (b"[]", "the file is empty"),
    "prose": (b"Once upon a time", "line 1: not JSON"),
    "other encodings": ('{"text": "é"}'.encode("latin-1"), "line 1: not JSON"),
    "numbers": (b"{}\n3\n", "line 2: found a JSON int; a row is a JSON object"),
    "an array of texts": (b'["a"]', "element 0: found a JSON str"),
    "half an array": (b'[{"text": "a"},', "begins like a JSON array"),
    "half a gzip file": (gzip.compress(as_lines())[:-12], "cannot be read"),
    "half a zstd file": (zstandard.ZstdCompressor().compress(as_lines())[:-3], "cannot be read"),
    "a damaged zstd file": (b"\x28\xb5\x2f\xfd" + b"\xff" * 20, "cannot be read"),
    "half a Parquet file": (as_table("parquet")[:-20], "cannot be read"),
    "half an Arrow file": (as_table("arrow")[:-20], "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_one_line_that_names_the_file(tmp_path, case):
    content, message = BAD[case]
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no such file or folder"),
        ("./missing", "no such file or folder"),
        ("/missing/folder", "no such file or folder"),
        ("*.missing", "no file matches"),
        ("empty", "no data files"),
    ],
)
def test_a_path_without_data_is_an_error(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=message):
        read(name)


def test_no_data_at_all_is_an_error():
    with pytest.raises(CorpusError, match="no training data given"):
        find_sources([])


def test_a_name_that_is_no_path_is_a_data_set(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = read("owner/name", "owner/name:test")
    assert asked == [("owner/name", "train"), ("owner/name", "test")]
    assert [row.fields for row in rows] == ROWS * 2
    assert rows[-1].where == "owner/name:test, row 4"
    source = find_sources(["owner/name"])[0]
    assert source.digest() == find_sources(["owner/name"])[0].digest()
    assert source.size > 0


def test_a_data_set_that_cannot_be_loaded_is_one_line():
    """Without a network, the reason is given and no traceback."""
    with pytest.raises(CorpusError, match="nobody/nothing: neither a file, folder or pattern") as caught:
        read("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_zstd_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "data.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(as_lines()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CorpusError, match="pip install zstandard"):
        read(path)


def test_the_digest_follows_content_and_not_the_name(tmp_path):
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(text)
    one, same, other = (find_sources([str(tmp_path / name)])[0].digest() for name in "abc")
    assert one == same != other
