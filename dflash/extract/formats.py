"""Rows of training data, from files or from a Hugging Face data set.

What a file holds is told by its first bytes, never by its name: JSONL, a JSON array, Parquet, Arrow (file or
stream), and gzip or zstd around any of them.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from dflash.errors import CorpusError
from dflash.files import digest_file

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_BOM = b"\xef\xbb\xbf"
# Suffixes decide only which files of a folder are data, and whether a missing name was meant as a file.
_SUFFIXES = {".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".gz", ".zst", ".zstd"}
_NOT_DATA = {"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json"}
_ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class Row:
    """One record of a source."""

    where: str
    """Source and line or row number, for error messages."""
    fields: dict[str, Any]
    read: int = 0
    """Bytes of the source that were read when this row was; about `Source.size` at the last one."""


class Source(Protocol):
    """Something that rows can be read from, as often as one likes, always in the same order."""

    @property
    def size(self) -> int:
        """Bytes to read, or an estimate; what progress is measured in."""

    def digest(self) -> str:
        """Hex digest of the content."""

    def rows(self) -> Iterator[Row]:
        """Read the rows.

        Raises:
            CorpusError: the content cannot be read.
        """


@dataclass(frozen=True)
class FileSource:
    """A file on disk."""

    path: Path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def digest(self) -> str:
        """Digest of the file's bytes; its name and place do not matter."""
        return digest_file(self.path, "blake2b")

    def rows(self) -> Iterator[Row]:
        """Read the rows.

        Raises:
            CorpusError: the file is empty, cut off, or in none of the formats; names the line.
        """
        count = 0
        try:
            with self.path.open("rb") as raw:
                for row in _rows_of(_unpacked(raw), self.path):
                    count += 1
                    yield replace(row, read=raw.raw.tell())
        except (OSError, EOFError, zlib.error, _arrow_error()) as error:
            raise CorpusError(f"{self.path}: cannot be read: {_one_line(error)}") from error
        if not count:
            raise CorpusError(f"{self.path}: the file is empty; give one with training data")


@dataclass(frozen=True)
class HubSource:
    """A data set known to the `datasets` library by name."""

    name: str
    split: str
    data: Any
    """The `datasets.Dataset`."""

    @property
    def size(self) -> int:
        """Bytes of the data set's Arrow tables."""
        return int(self.data.data.nbytes)

    def digest(self) -> str:
        """Fingerprint that `datasets` keeps of the content."""
        return f"datasets:{self.data._fingerprint}"  # noqa: SLF001 - datasets has no public name for it

    def rows(self) -> Iterator[Row]:
        """Read the rows of the split."""
        share = self.size / max(len(self.data), 1)
        for number, fields in enumerate(self.data):
            yield Row(f"{self.name}:{self.split}, row {number}", fields, int(share * (number + 1)))


def find_sources(data: Sequence[str]) -> list[Source]:
    """Turn what the user wrote into sources: files, folders, patterns, or `NAME[:SPLIT]` of a data set.

    Args:
        data: Paths, glob patterns, or names for `datasets.load_dataset` (split `train` unless given).

    Raises:
        CorpusError: a path does not exist, a folder or pattern holds no data, or a data set cannot be loaded.
    """
    if not data:
        raise CorpusError("no training data given; name a file, a folder, a pattern or a data set")
    return [source for name in data for source in _find(name)]


def _find(name: str) -> list[Source]:
    path = Path(name).expanduser()
    if path.is_file():
        return [FileSource(path)]
    if path.is_dir():
        return _files(name, sorted(path.rglob("*")), f"no data files ({', '.join(sorted(_SUFFIXES))}) in it")
    if glob.has_magic(name):
        # Not Path.glob: it takes no absolute patterns.
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        return _files(name, [Path(match) for match in matches], "no file matches")
    if path.suffix in _SUFFIXES or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CorpusError(f"{name}: no such file or folder")
    return [_hub_source(name)]


def _files(name: str, paths: Sequence[Path], problem: str) -> list[Source]:
    wanted = [
        path
        for path in paths
        if path.is_file()
        and path.name not in _NOT_DATA
        and not path.name.startswith(".")
        and (glob.has_magic(name) or path.suffix in _SUFFIXES)
    ]
    if not wanted:
        raise CorpusError(f"{name}: {problem}")
    return [FileSource(path) for path in wanted]


def _hub_source(written: str) -> HubSource:
    from datasets import load_dataset

    name, _, split = written.partition(":")
    split = split or "train"
    try:
        return HubSource(name, split, load_dataset(name, split=split))
    except (
        Exception
    ) as error:  # datasets raises a dozen kinds here, connection errors of three libraries among them
        raise CorpusError(
            f"{written}: neither a file, folder or pattern here nor a data set that could be loaded "
            f"({type(error).__name__}: {_one_line(error)})"
        ) from error


def _one_line(error: BaseException, limit: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _arrow_error() -> type[Exception]:
    import pyarrow as pa

    return cast("type[Exception]", pa.ArrowException)


class _ChunkReader(io.RawIOBase):
    """A raw stream over an iterator of byte strings."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise CorpusError("zstd data needs the package zstandard: pip install zstandard") from error
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    while data := file.read(1 << 17):
        while data:
            begun = True
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    if begun:  # zstandard's own reader would end here as if all were well
        raise EOFError("compressed data ended before its end-of-frame mark")


def _unpacked(raw: BinaryIO) -> io.BufferedReader:
    """The file's content, decompressed as often as its first bytes say so."""
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast("Any", raw))
    magic = stream.peek(4)[:4]
    if magic.startswith(_GZIP):
        return _unpacked(io.BufferedReader(cast("Any", gzip.GzipFile(fileobj=stream))))
    if magic == _ZSTD:
        return _unpacked(io.BufferedReader(_ChunkReader(_zstd_chunks(stream))))
    return stream


def _rows_of(stream: io.BufferedReader, path: Path) -> Iterator[Row]:
    magic = stream.peek(64)[:64]
    if magic.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM)):
        return _table_rows(stream, magic, path)
    if magic.removeprefix(_BOM).lstrip().startswith(b"["):
        return _array_rows(stream, path)
    return _line_rows(stream, path)


def _line_rows(stream: io.BufferedReader, path: Path) -> Iterator[Row]:
    for number, line in enumerate(stream, 1):
        content = line.removeprefix(_BOM).strip()
        if not content:
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(content)
        except ValueError as error:  # covers text that is not UTF-8
            raise CorpusError(
                f"{where}: not JSON ({_one_line(error)}); "
                "data is one JSON object a line, one JSON array, Parquet or Arrow"
            ) from error
        yield Row(where, _mapping(value, where))


def _array_rows(stream: io.BufferedReader, path: Path) -> Iterator[Row]:
    try:
        values = json.loads(stream.read().removeprefix(_BOM))
    except ValueError as error:
        raise CorpusError(f"{path}: begins like a JSON array but is not JSON ({_one_line(error)})") from error
    for number, value in enumerate(values):
        where = f"{path}, element {number}"
        yield Row(where, _mapping(value, where))


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorpusError(
            f"{where}: found a JSON {type(value).__name__}; a row is a JSON object with named fields"
        )
    return value


def _table_rows(stream: io.BufferedReader, magic: bytes, path: Path) -> Iterator[Row]:
    seekable: Any = stream if stream.seekable() and not _is_compressed(stream) else io.BytesIO(stream.read())
    number = 0
    for batch in _table_batches(seekable, magic):
        for fields in batch.to_pylist():
            yield Row(f"{path}, row {number}", fields)
            number += 1


def _is_compressed(stream: io.BufferedReader) -> bool:
    # gzip can seek, but only by reading again from the start.
    return not isinstance(stream.raw, io.FileIO)


def _table_batches(file: Any, magic: bytes) -> Iterator[Any]:
    if magic.startswith(_PARQUET):
        import pyarrow.parquet as pq

        yield from pq.ParquetFile(file).iter_batches(batch_size=_ROWS_PER_BATCH)
        return
    import pyarrow as pa

    if magic.startswith(_ARROW_STREAM):
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)
