"""`dflash cache verify`: whether a cache is whole. Structure in seconds, every byte with `deep`.

1. The manifest and its digest; the index fragments and their checksums; the parts and their digests.
2. Each committed shard: its size, its header byte for byte.
3. Deep: each shard's bytes against the xxh3-128 that its writer recorded, or, where there is none, every
   sample against its crc32c.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.copies import content_problem
from dflash.cache.info import format_bytes
from dflash.cache.manifest import MANIFEST_NAME, load_manifest
from dflash.cache.mirror import mirror_of
from dflash.cache.reader import CacheReader
from dflash.cache.scan import (
    Fault,
    beside_faults,
    completeness_fault,
    part_faults,
    scan_index,
    short,
    stray_faults,
)
from dflash.cache.shard import ShardLayout
from dflash.errors import CacheCorrupt, CacheError
from dflash.files import size_of_file
from dflash.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dflash.cache.index import CacheIndex
    from dflash.cache.manifest import Manifest
    from dflash.cache.mirror import Mirror


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    cache: Path
    deep: bool
    complete: bool
    """Whether the cache says that it holds all its samples."""
    samples: int
    """Committed samples, lost ones included."""
    expected_samples: int
    shards: int
    bytes: int
    """Bytes of the committed shards."""
    seconds: float
    faults: tuple[Fault, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready value."""
        value = asdict(self) | {"cache": str(self.cache), "whole": self.whole}
        rate = self.bytes / self.seconds if self.deep else None
        return value | {"faults": [fault._asdict() for fault in self.faults], "bytes_per_second": rate}

    def text(self) -> str:
        """What a terminal shows: one line where all is well, else a table of what is bad."""
        checked = f"{self.samples:,} samples in {self.shards:,} shards"
        how = "every byte read" if self.deep else "structure checked"
        more = f", {self.bytes / self.seconds / 1e9:.2f} GB/s" if self.deep else " (--deep reads every byte)"
        facts = f"{checked}, {format_bytes(self.bytes)}; {how} in {self.seconds:.1f} s{more}"
        if self.whole:
            state = "whole" if self.complete else f"sound, unfinished ({self.expected_samples:,} expected)"
            return f"{self.cache} is {state}: {facts}"
        lost = sum(fault.samples for fault in self.faults)
        advice = f"run `dflash cache repair {self.cache}`, then the command that made the cache again"
        last = f"faults: {len(self.faults):,}, samples lost: {lost:,}; {advice}"
        return "\n".join([f"{self.cache} is damaged: {facts}", *fault_table(self.faults), last])


def fault_table(faults: Sequence[Fault]) -> list[str]:
    """Lines of a table: file, samples lost with it, what is wrong."""
    width = max((len(fault.file) for fault in faults), default=4)
    lost = [f"{fault.samples:,}" if fault.samples else "" for fault in faults]
    rows = [("file", "samples", "problem")]
    rows += [(fault.file, count, fault.problem) for fault, count in zip(faults, lost, strict=True)]
    return [f"  {file:{width}}  {samples:>8}  {problem}" for file, samples, problem in rows]


def verify(cache: Path, *, deep: bool = False, jobs: int = 1, show: bool = True) -> VerifyReport:
    """Check a cache, finished or not, and list everything that is wrong with it.

    Args:
        cache: The cache's folder.
        deep: Read every byte of every shard.
        jobs: Threads that read shards.
        show: Whether to show progress.

    Raises:
        CacheError: `cache` is not a cache, or of a newer format.
    """
    started = time.perf_counter()
    try:
        manifest = load_manifest(cache)
    except CacheCorrupt as error:
        fault = Fault(MANIFEST_NAME, short(error, cache / MANIFEST_NAME))
        seconds = time.perf_counter() - started
        return VerifyReport(cache, deep, False, 0, 0, 0, 0, seconds, (fault,))
    index, faults, total = verify_loaded(cache, manifest, deep=deep, jobs=jobs, show=show)
    return VerifyReport(
        cache=cache,
        deep=deep,
        complete=manifest.complete,
        samples=len(index),
        expected_samples=manifest.expected_samples,
        shards=len(index.layouts),
        bytes=total,
        seconds=time.perf_counter() - started,
        faults=tuple(faults),
    )


def verify_loaded(
    cache: Path, manifest: Manifest, *, deep: bool, jobs: int, show: bool
) -> tuple[CacheIndex, list[Fault], int]:
    """What is good of the index, the faults, and the bytes of the committed shards; the manifest is good."""
    index, faults = scan_index(cache, manifest)
    if not faults and (fault := completeness_fault(cache, manifest, index)):
        faults.append(fault)
    faults += part_faults(cache, manifest) + beside_faults(cache, manifest)
    if manifest.complete:  # elsewhere they are what an interrupted writer has left
        faults += stray_faults(cache, index)
    sizes = [layout.file_size for layout in index.layouts]
    mirror = mirror_of(cache)
    if mirror is None:
        check = partial(_shard_fault, cache, index, deep=deep)
    else:
        check = partial(_stored_shard_fault, mirror, index, {} if deep else mirror.shard_sizes())
    done = 0
    with Progress("verify", sum(sizes) >> 20, "MiB", enabled=show and deep) as progress:
        for size, fault in zip(sizes, _in_turn(check, range(len(sizes)), jobs), strict=True):
            done += size
            progress.advance((done >> 20) - progress.done)
            if fault is not None:
                faults.append(fault)
    return index, faults, sum(sizes)


def _in_turn(check: Callable[[int], Fault | None], numbers: range, jobs: int) -> Iterator[Fault | None]:
    """Results of a check in order, from so many threads."""
    if jobs == 1:
        yield from map(check, numbers)
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(check, numbers)


def _shard_fault(cache: Path, index: CacheIndex, number: int, *, deep: bool) -> Fault | None:
    """What is wrong with one committed shard."""
    layout = index.layouts[number]
    try:
        problem = shard_problem(cache, layout, index.digests[number] if deep else "")
        if problem is None and deep and not index.digests[number]:
            problem = _bad_samples(cache, index, number)
    except OSError as error:
        problem = f"cannot be read ({error})"
    return None if problem is None else Fault(layout.name, problem, layout.samples)


def _stored_shard_fault(
    mirror: Mirror, index: CacheIndex, sizes: Mapping[str, int], number: int
) -> Fault | None:
    """What is wrong with one shard in an object store: with its size, or where none are given, with any byte.

    Raises:
        StoreError: the store does not answer, which says nothing about the shard.
    """
    layout, problem = index.layouts[number], None
    if sizes and sizes.get(layout.name) != layout.file_size:
        problem = f"{sizes.get(layout.name, 'no')} bytes, committed with {layout.file_size:,}"
    if not sizes:
        try:
            mirror.copies.forget(layout.name)  # the store is asked, not the copy that is here
            mirror.copies.fetch([(layout, index.digests[number])])
        except CacheCorrupt as error:
            problem = short(error, f"{mirror.url}/{layout.name}")
    return None if problem is None else Fault(layout.name, problem, layout.samples)


def shard_problem(cache: Path, layout: ShardLayout, digest: str) -> str | None:
    """What is wrong with a shard's size, its header, and, where a digest is given, any of its bytes."""
    path = cache / layout.name
    size = size_of_file(path)
    if size < 0:
        return "missing, or no file"
    if size != layout.file_size:
        return f"{size:,} bytes, committed with {layout.file_size:,}"
    return content_problem(path, layout, digest)


def _bad_samples(cache: Path, index: CacheIndex, number: int) -> str | None:
    """What reading each sample of a shard says, for shards whose writer recorded no digest."""
    rows = np.arange(len(index))
    rows = rows[index.locate(rows).shards == number]
    with CacheReader(cache, allow_incomplete=True) as reader:
        for row in rows.tolist():
            try:
                reader.read([row])
            except CacheError as error:  # noqa: PERF203 - the first bad one ends it
                return short(error, cache / index.layouts[number].name)
    return None
