"""The index: Arrow fragments, one row a sample. A fragment is the commit record of the shards it names.

Loading reads the fragments alone, never a shard: it checks each fragment's checksum, its schema and every row
against the layout that the row's shard must have, and sorts by sample id, so that the row order does not
depend on how many writers there were. The columns are specified in docs/cache-format.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import crc32c
import numpy as np
import pyarrow as pa

from dflash.cache.duplicates import check_unique, shared_shard
from dflash.cache.extents import possible_rows
from dflash.cache.fragment import (
    CHECKSUM_BLANK,
    CHECKSUM_MARK,
    DIGESTS,
    FRAGMENT_SUFFIX,
    INDEX_FOLDER,
    MAX_FRAGMENT_ROWS,
    SCHEMA,
)
from dflash.cache.manifest import FORMAT_VERSION, REPAIR, Manifest, bucket_name, load_manifest
from dflash.cache.shard import SHARDS_FOLDER, ShardLayout, is_shard_name
from dflash.cache.sorting import sort_ids
from dflash.errors import CacheCorrupt, CacheError, CacheIncomplete
from dflash.files import size_of_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MAX_FRAGMENT_BYTES = 1 << 28
_ROW_BYTES = 48
"""Bytes of a row's fixed-width values: no fragment holds more rows than its size allows."""


class Extents(NamedTuple):
    """Where samples lie; every array has one entry a sample."""

    shards: NDArray[np.int64]
    """Positions in `CacheIndex.layouts`."""
    shard_rows: NDArray[np.int64]
    """0-based position of the sample in its shard."""
    offsets: NDArray[np.int64]
    """First byte of the extent in the shard."""
    crcs: NDArray[np.uint32]
    nbytes: NDArray[np.int64]
    """Bytes of the extent."""


@dataclass(frozen=True, eq=False)
class CacheIndex:
    """All committed samples. A row is a sample; rows are sorted by id."""

    ids: NDArray[np.uint64]
    buckets: NDArray[np.int16]
    """0-based bucket numbers."""
    lengths: NDArray[np.int32]
    """Tokens."""
    supervised: NDArray[np.int32]
    """Supervised tokens."""
    layouts: tuple[ShardLayout, ...]
    """The committed shards, in the order of their fragments."""
    digests: tuple[str, ...]
    """xxh3-128 of each shard (`shard_digest`); empty where its writer recorded none."""
    stored: _Stored

    def __len__(self) -> int:
        return len(self.ids)

    def locate(self, rows: NDArray[np.int64]) -> Extents:
        """Where these rows lie in the shards."""
        return self._at(self.stored.places[rows])

    def select(self, rows: NDArray[np.int64]) -> CacheIndex:
        """These rows alone, ascending, with a digest of their own."""
        return replace(
            self,
            ids=self.ids[rows],
            buckets=self.buckets[rows],
            lengths=self.lengths[rows],
            supervised=self.supervised[rows],
            stored=replace(self.stored, places=self.stored.places[rows]),
        )

    def locate_in_order(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Extents]:
        """The order in which these rows lie in the shards [N], and where they lie, in that order."""
        places = self.stored.places[rows]
        order = np.argsort(places, kind="stable")
        return order, self._at(places[order])

    def _at(self, places: NDArray[np.int64]) -> Extents:
        stored = self.stored
        shards = np.searchsorted(stored.shard_starts, places, side="right") - 1
        offsets = stored.offsets[places]
        following = stored.offsets.take(places + 1, mode="clip")
        # Where the next place holds no later byte, it is another shard's, or there is none.
        nbytes = np.where(following > offsets, following, self._shard_ends[shards]) - offsets
        return Extents(shards, places - stored.shard_starts[shards], offsets, stored.crcs[places], nbytes)

    @cached_property
    def _shard_ends(self) -> NDArray[np.int64]:
        """Byte behind the last extent of each shard."""
        return np.array([layout.offsets_start for layout in self.layouts], np.int64)

    def digest(self) -> str:
        """Sha256 (64 hex digits) of all ids, then all checksums, in row order."""
        state = hashlib.sha256(self.ids.astype("<u8", copy=False).data)
        state.update(self.stored.crcs[self.stored.places].astype("<u4", copy=False).data)
        return state.hexdigest()


@dataclass(frozen=True, eq=False)
class _Stored:
    """Columns that only reads of samples need; sorting them would cost time, so they stay as stored."""

    places: NDArray[np.int64]
    """Row of the index to place in the order of the fragments."""
    offsets: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    shard_starts: NDArray[np.int64]
    """First place of each shard."""


def load_index(cache: Path, manifest: Manifest, only: Sequence[Path] | None = None) -> CacheIndex:
    """Load and check all index fragments of a cache, complete or not, or `only` some of them.

    Raises:
        CacheCorrupt: a fragment is damaged, belongs elsewhere, or two of them claim the same sample or shard.
    """
    paths = fragment_paths(cache) if only is None else only
    sizes = [max(size_of_file(path), 0) for path in paths]
    kinds = (np.uint64, np.int16, np.int32, np.int32, np.int64, np.uint32)
    columns: list[NDArray[Any]] = [np.empty(sum(sizes) // _ROW_BYTES, kind) for kind in kinds]
    scratch = bytearray(min(max(sizes, default=0), MAX_FRAGMENT_BYTES) + 1)
    layouts: list[ShardLayout] = []
    digests: list[str] = []
    ends: list[int] = []
    count = 0
    for path in paths:
        parts, committed, written = _load_fragment(path, manifest, scratch)
        end = count + len(parts[0])
        for column, part in zip(columns, parts, strict=True):
            column[count:end] = part
        layouts += committed
        digests += written
        ends.append(end)
        count = end
    if len({layout.name for layout in layouts}) < len(layouts):
        raise CacheCorrupt(shared_shard(paths, ends, layouts))
    ids, buckets, lengths, supervised, offsets, crcs = (column[:count] for column in columns)
    columns.clear()
    ids, places = sort_ids(ids)
    check_unique(ids, places, paths, ends)
    starts = np.cumsum([0, *(layout.samples for layout in layouts)])[:-1]
    stored = _Stored(places, offsets, crcs, starts)
    lengths, supervised = lengths[places], supervised[places]
    return CacheIndex(ids, buckets[places], lengths, supervised, tuple(layouts), tuple(digests), stored)


def committed_ids(cache: Path) -> NDArray[np.uint64]:
    """Ids of the committed samples [N], ascending; the cache may be incomplete.

    Raises:
        CacheError: `cache` is not a cache, or is damaged.
    """
    return load_index(cache, load_manifest(cache)).ids


def check_complete(cache: Path, manifest: Manifest, index: CacheIndex) -> None:
    """Refuse a cache that lacks samples.

    Raises:
        CacheIncomplete: extraction has not finished.
        CacheCorrupt: the cache was finished, but its index holds another number of samples.
    """
    count = f"{len(index)} of {manifest.expected_samples} samples"
    if not manifest.complete:
        raise CacheIncomplete(f"{cache} holds {count}; run the same `dflash extract` again to finish it")
    if len(index) != manifest.expected_samples:
        committed = {layout.name for layout in index.layouts}
        orphans = [name for name in shards_on_disk(cache) if name not in committed]
        hint = f"; no index fragment commits {', '.join(orphans[:3])}" if orphans else ""
        raise CacheCorrupt(
            f"{cache / INDEX_FOLDER} lacks fragments or has foreign ones: it holds {count}{hint}; {REPAIR}"
        )
    if manifest.content_digest is not None and index.digest() != manifest.content_digest:
        raise CacheCorrupt(f"{cache / INDEX_FOLDER}: not the samples that were there at the end; {REPAIR}")


def shards_on_disk(cache: Path) -> list[str]:
    """Names of the shards that exist, committed or not, in order."""
    return sorted(
        name
        for path in (cache / SHARDS_FOLDER).glob("*/*")
        if is_shard_name(name := path.relative_to(cache).as_posix())
    )


def fragment_paths(cache: Path) -> list[Path]:
    """The index fragments that exist, in order."""
    try:
        return sorted(path for path in (cache / INDEX_FOLDER).iterdir() if path.suffix == FRAGMENT_SUFFIX)
    except FileNotFoundError:
        return []  # a cache without a committed sample
    except OSError as error:
        raise CacheError(f"cannot read {cache / INDEX_FOLDER}: {error}") from error


def _load_fragment(
    path: Path, manifest: Manifest, scratch: bytearray
) -> tuple[list[NDArray[Any]], list[ShardLayout], list[str]]:
    """Read one fragment: its columns, which live in `scratch`, its shards and their digests.

    Whatever is wrong with the file is a CacheCorrupt that names it.
    """
    data = _verified_bytes(path, scratch)
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            schema, batches = stream.schema, list(stream)
        if len(batches) != 1 or not schema.equals(SCHEMA):
            raise CacheCorrupt(f"{path}: not one record batch of the index schema; {REPAIR}")
        batch = batches[0]
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise CacheCorrupt(f"{path}: it holds nulls; {REPAIR}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheCorrupt(f"{path}: not an Arrow stream ({str(error).splitlines()[0]}); {REPAIR}") from error
    _check_metadata(path, schema.metadata or {}, manifest)
    kept, layouts = _checked_rows(path, batch, manifest)
    return kept, layouts, _shard_digests(path, schema.metadata, len(layouts))


def _verified_bytes(path: Path, scratch: bytearray) -> memoryview:
    """A fragment's bytes in `scratch`, its checksum blanked, after checking it."""
    if size_of_file(path) < 0:
        raise CacheCorrupt(f"{path}: not a file; {REPAIR}")
    try:
        with path.open("rb") as file:
            size = file.readinto(scratch)
    except OSError as error:
        raise CacheCorrupt(f"{path}: cannot be read ({error}); {REPAIR}") from error
    if size >= len(scratch):
        raise CacheCorrupt(f"{path}: it has grown, or is larger than {MAX_FRAGMENT_BYTES} bytes; {REPAIR}")
    data = memoryview(scratch)[:size]
    at = scratch.find(CHECKSUM_MARK, 0, min(size, 1 << 14)) + len(CHECKSUM_MARK)
    stated = bytes(data[at : at + 8])
    if len(stated) == 8:
        data[at : at + 8] = CHECKSUM_BLANK
    if stated != b"%08x" % crc32c.crc32c(data):
        raise CacheCorrupt(f"{path}: its bytes do not fit its checksum, it is damaged or cut short; {REPAIR}")
    return data


def _check_metadata(path: Path, metadata: dict[bytes, bytes], manifest: Manifest) -> None:
    expected = {
        "format": str(FORMAT_VERSION),
        "fragment": path.name.removesuffix(FRAGMENT_SUFFIX),
        "identity": manifest.digest(),
    }
    for key, value in expected.items():
        found = metadata.get(f"dflash.{key}".encode(), b"").decode(errors="replace")
        if found != value:
            raise CacheCorrupt(
                f"{path}: belongs to another cache or place: {key} {found!r:.80}, not {value!r}; {REPAIR}"
            )


def _shard_digests(path: Path, metadata: dict[bytes, bytes], shards: int) -> list[str]:
    """The shards' digests; empty texts in a fragment of the time before there were any."""
    digests = metadata.get(DIGESTS.encode(), b"").decode(errors="replace").split() or [""] * shards
    if len(digests) != shards:
        raise CacheCorrupt(f"{path}: {len(digests)} digests of {shards} shards; {REPAIR}")
    return digests


def _values(array: Any) -> NDArray[Any]:
    """A view of an array without nulls; its own `to_numpy` imports pandas, which takes half a second."""
    width = array.type.byte_width
    return np.frombuffer(array.buffers()[1], str(array.type), len(array), array.offset * width)


def _checked_rows(path: Path, batch: Any, manifest: Manifest) -> tuple[list[NDArray[Any]], list[ShardLayout]]:
    """A fragment's columns and shards, after checking each row against the layout of its shard."""
    names, count = batch.column("shard").dictionary.to_pylist(), len(batch)
    edges = (0, *manifest.identity.bucket_edges)
    number = {f"{SHARDS_FOLDER}/{bucket_name(edge)}": bucket for bucket, edge in enumerate(edges[1:])}
    buckets = [number.get(name.rpartition("/")[0], -1) if is_shard_name(name) else -1 for name in names]
    if -1 in buckets or len(set(names)) < len(names) or not 1 <= count <= MAX_FRAGMENT_ROWS:
        raise CacheCorrupt(f"{path}: unusable shard names, repeated ones, or row count {count}; {REPAIR}")
    shard = _values(batch.column("shard").indices)
    samples = np.bincount(shard, minlength=len(names))
    if bool(np.any(shard[1:] < shard[:-1])) or not samples.all():
        raise CacheCorrupt(f"{path}: its rows are not in the order of its shards; {REPAIR}")
    first = np.cumsum(samples) - samples  # first row of each shard
    column = {name: _values(batch.column(name)) for name in SCHEMA.names if name != "shard"}
    bucket = np.repeat(np.array(buckets, np.int16), samples)
    valid = possible_rows(column, np.array(edges, np.int32), bucket, samples, manifest.identity)
    for name, good in valid.items():
        if not good.all():
            row = int(np.argmin(good))
            raise CacheCorrupt(f"{path}: row {row} has an impossible {name} {column[name][row]}; {REPAIR}")
    tokens = np.add.reduceat(column["length"], first, dtype=np.int64)
    sizes = np.add.reduceat(column["nbytes"], first)
    layouts = [
        ShardLayout(name, manifest, edges[bucket + 1], int(rows), int(total), int(size))
        for name, bucket, rows, total, size in zip(names, buckets, samples, tokens, sizes, strict=True)
    ]
    kept = [column["id"], bucket, column["length"], column["supervised"], column["offset"], column["crc32c"]]
    return kept, layouts
