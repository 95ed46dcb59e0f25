"""Writing a cache so that a crash at any moment loses only what was not yet committed.

A shard is committed in this order: its bytes go to a temporary file; flush; rename without replacing; flush
the folder; then its index fragment in the same way. The fragment is the commit. A shard without one is
rubbish, which `sweep_uncommitted` removes at the next start.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash.cache.codec import codec_of
from dflash.cache.fragment import (
    FRAGMENT_SUFFIX,
    INDEX_FOLDER,
    MAX_FRAGMENT_ROWS,
    IndexRow,
    fragment_bytes,
    fragment_path,
)
from dflash.cache.index import check_complete, load_index, shards_on_disk
from dflash.cache.manifest import BadSample, Manifest, bucket_of, create_cache, load_manifest, save_manifest
from dflash.cache.shard import (
    DATA_START,
    SHARD_SUFFIX,
    SHARDS_FOLDER,
    Sample,
    ShardLayout,
    ShardStream,
    check_sample,
    shard_name,
)
from dflash.errors import CacheCorrupt, CacheError, CacheIncomplete
from dflash.files import TMP_SUFFIX, fsync_path, publish, publish_bytes, size_of_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from dflash.cache.handover import Handover

__all__ = ["CacheWriter", "Sample", "create_cache", "finalize", "sweep_uncommitted"]

SHARD_BYTES = 256 << 20


class CacheWriter:
    """Appends samples to a cache that `create_cache` has made; any number may run, each with its own name.

    Each bucket has one open shard, streamed to a temporary file and committed when it reaches `shard_bytes`.
    As a context manager it commits the rest at the end; leaving by an exception commits nothing further.

    Args:
        cache: The cache's folder.
        manifest: What `create_cache` returned.
        writer: Plain name that no other running writer of this cache has, e.g. `"rank0"`; names the units.
        shard_bytes: Size of stored hidden states at which a shard is committed.
        handover: Of the folder's mirror, where the cache is in an object store: commits go there at once.

    Raises:
        CacheError: the name is not plain, or the folder cannot be written.
    """

    def __init__(
        self,
        cache: Path,
        manifest: Manifest,
        writer: str,
        shard_bytes: int = SHARD_BYTES,
        handover: Handover | None = None,
    ) -> None:
        self.cache, self.manifest, self.writer, self.shard_bytes = cache, manifest, writer, shard_bytes
        self._handover = handover
        shard_name(manifest.identity.max_length, f"{writer}-000000")  # refuses a bad name before any work
        self._codec = codec_of(manifest)
        self._open: dict[int, tuple[ShardStream, str, list[IndexRow]]] = {}
        self._failed = False
        with self._guarded():
            _make_folder(cache / INDEX_FOLDER)
            _make_folder(cache / SHARDS_FOLDER)
            self._next_unit = _first_free_unit(cache, writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def write(self, sample: Sample) -> None:
        """Add a sample; its bytes are copied before this returns. It counts only once its shard is committed.

        Raises:
            CacheError: the sample does not fit the cache, the disk refuses, or an earlier call failed.
        """
        check_sample(sample, self.manifest)
        bucket = bucket_of(len(sample.input_ids), self.manifest.identity.bucket_edges)
        with self._guarded():
            if bucket not in self._open:
                self._open[bucket] = self._new_shard(bucket)
            stream, _, rows = self._open[bucket]
            offset, nbytes, crc = stream.append(sample)
            length, supervised = len(sample.input_ids), int(sample.loss_mask.sum())
            rows.append(IndexRow(int(sample.id), length, supervised, offset, nbytes, crc))
            if stream.size - DATA_START >= self.shard_bytes or len(rows) >= MAX_FRAGMENT_ROWS:
                self._commit(bucket)

    def flush(self) -> None:
        """Commit everything written so far, as shards of whatever size they have.

        Raises:
            CacheError: the disk refuses, or an earlier call failed.
        """
        with self._guarded():
            for bucket in sorted(self._open):
                self._commit(bucket)

    def close(self) -> None:
        """Commit the rest. May be called twice.

        Raises:
            CacheError: the disk refuses, or an earlier call failed.
        """
        self.flush()

    def _new_shard(self, bucket: int) -> tuple[ShardStream, str, list[IndexRow]]:
        unit = f"{self.writer}-{self._next_unit:06d}"
        self._next_unit += 1
        path = self.cache / shard_name(self.manifest.identity.bucket_edges[bucket], unit)
        _make_folder(path.parent)
        return (
            ShardStream(path.with_name(f"{path.name}.{os.getpid()}.part{TMP_SUFFIX}"), self._codec),
            unit,
            [],
        )

    def _commit(self, bucket: int) -> None:
        stream, unit, rows = self._open[bucket]
        edge = self.manifest.identity.bucket_edges[bucket]
        layout = ShardLayout(
            shard_name(edge, unit), self.manifest, edge, stream.samples, stream.tokens, stream.coded_bytes
        )
        if self._handover is None:
            commit_shard(self.cache, stream, layout, rows, unit)
            del self._open[bucket]
            return
        digest = _finish_shard(self.cache, stream, layout)
        self._handover.keep(unit, fragment_bytes(layout, rows, unit, digest))
        del self._open[bucket]
        self._handover.send(unit)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever fails makes the writer useless: going on after a lost sample would hide the loss."""
        if self._failed:
            raise CacheError(
                f"writer {self.writer!r} of {self.cache} has failed before; start again to resume"
            )
        try:
            yield
        except FileExistsError as error:
            self._discard()
            raise CacheError(
                f"{error.filename2 or error.filename} exists: two writers are named {self.writer!r}"
            ) from error
        except OSError as error:
            self._discard()
            raise CacheError(
                f"cannot write to {self.cache}: {error}; run the same command again to resume"
            ) from error
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        self._failed = True
        with ExitStack() as stack:  # closes every file, even if removing one of them fails
            for stream, _, _ in self._open.values():
                stack.callback(stream.discard)
            self._open.clear()


def commit_shard(
    cache: Path, stream: ShardStream, layout: ShardLayout, rows: Sequence[IndexRow], unit: str
) -> None:
    """Finish a shard and commit it by a fragment named `unit`.

    Raises:
        FileExistsError: the shard or the fragment is there already.
    """
    digest = _finish_shard(cache, stream, layout)
    publish_bytes(fragment_path(cache, unit), fragment_bytes(layout, rows, unit, digest), replace=False)


def _finish_shard(cache: Path, stream: ShardStream, layout: ShardLayout) -> str:
    """Give a shard its name; its digest."""
    digest = stream.finish(layout)
    publish(cache / layout.name, stream.path.replace, replace=False)
    return digest


def finalize(cache: Path, bad: Sequence[BadSample] = (), sizes: Mapping[str, int] | None = None) -> Manifest:
    """Mark a cache complete, once every expected sample is committed and every shard has its size.

    Args:
        cache: The cache's folder.
        bad: Samples that turned out to be bad since the cache was begun: they are no longer expected.
        sizes: Bytes of the shards by name where they are in an object store; by default those on the disk.

    Raises:
        CacheIncomplete: samples are missing.
        CacheCorrupt: there are too many, or a shard or fragment is damaged.
    """
    manifest = load_manifest(cache)
    manifest = replace(
        manifest,
        expected_samples=manifest.expected_samples - len(bad),
        bad=tuple(sorted((*manifest.bad, *bad), key=lambda sample: sample.id)),
    )
    index = load_index(cache, manifest)
    if manifest.complete:
        check_complete(cache, manifest, index)
    counts = f"{len(index)} samples are committed, {manifest.expected_samples} expected"
    if len(index) < manifest.expected_samples:
        which = (
            "same `dflash extract`" if not manifest.appended else "`dflash extract` of each of its corpora"
        )
        raise CacheIncomplete(f"{cache}: {counts}; run the {which} again to finish it")
    if len(index) > manifest.expected_samples:
        raise CacheCorrupt(f"{cache}: {counts}; it holds samples of another run, extract into a new folder")
    for layout in index.layouts:
        path = cache / layout.name
        size = size_of_file(path) if sizes is None else sizes.get(layout.name, -1)
        if size != layout.file_size:
            found = size if size >= 0 else "no"
            raise CacheCorrupt(f"{path}: {found} bytes, committed with {layout.file_size}; extract it again")
    done = replace(manifest, complete=True, content_digest=index.digest())
    if not manifest.complete:
        save_manifest(cache, done)
    return done


def sweep_uncommitted(cache: Path) -> list[Path]:
    """Remove what a crash has left: temporary files, and shards that no index fragment commits.

    To be called before any writer of the cache starts; it would take a running one's files away.

    Returns:
        The files that were removed.

    Raises:
        CacheCorrupt: the index is damaged; then nothing is removed, since a damaged one may commit shards.
    """
    committed = {layout.name for layout in load_index(cache, load_manifest(cache)).layouts}
    rubbish = [cache / name for name in shards_on_disk(cache) if name not in committed]
    for pattern in (f"*{TMP_SUFFIX}", f"{INDEX_FOLDER}/*{TMP_SUFFIX}", f"{SHARDS_FOLDER}/*/*{TMP_SUFFIX}"):
        rubbish += sorted(cache.glob(pattern))
    for path in rubbish:
        path.unlink(missing_ok=True)
    return rubbish


def _make_folder(path: Path) -> None:
    """Create a folder that survives a power cut."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        fsync_path(path.parent)


def _first_free_unit(cache: Path, writer: str) -> int:
    """One more than the last unit of this writer's name, committed or not: nothing is ever replaced."""
    unit = re.compile(
        rf"{re.escape(writer)}-([0-9]{{6,}})({re.escape(FRAGMENT_SUFFIX)}|{re.escape(SHARD_SUFFIX)})"
    )
    paths = [*(cache / INDEX_FOLDER).iterdir(), *(cache / SHARDS_FOLDER).glob("*/*")]
    numbers = [int(match[1]) for path in paths if (match := unit.fullmatch(path.name))]
    return max(numbers, default=-1) + 1
