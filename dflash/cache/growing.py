"""A cache that is still being written, in order of arrival: rows never move while others are added.

A complete cache's rows are sorted by sample id, so each commit would renumber them. Here every part, some
index fragments that were seen together, is sorted by id for itself, and parts follow each other.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dflash.cache.fragment import FRAGMENT_SUFFIX, INDEX_FOLDER, fragment_path
from dflash.cache.index import CacheIndex, load_index
from dflash.cache.manifest import load_manifest
from dflash.cache.planned import Planned, load_planned
from dflash.cache.reader import CacheReader
from dflash.errors import CacheCorrupt, CacheMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_QUIET_S, _QUIET_FACTOR = 0.5, 20
"""Between two looks at the disk pass so many seconds at least, and so many times what the last work took."""


class GrowingCache:
    """Reads what parts of an unfinished cache hold.

    Args:
        cache: The cache's folder.

    Raises:
        CacheError: it is none, or damaged.
    """

    def __init__(self, cache: Path) -> None:
        self.reader = CacheReader(cache, allow_incomplete=True)
        self._identity = self.reader.manifest.digest()
        self.reader.index = load_index(cache, self.reader.manifest, ())
        self._seen: set[str] = set()
        self._next_look = 0.0

    def look(self) -> tuple[list[str], bool]:
        """Names of the fragments that are committed and not yet added, and whether the cache is complete.

        Raises:
            CacheMismatch: the folder holds another cache by now.
        """
        started = time.monotonic()
        if started < self._next_look:
            return [], False
        self.reader.refresh()
        # The manifest first: when it says complete, no fragment comes after it.
        manifest = load_manifest(self.reader.cache)
        if manifest.digest() != self._identity:
            raise CacheMismatch(f"{self.reader.cache} was replaced by another cache while it was followed")
        folder = self.reader.cache / INDEX_FOLDER
        names = sorted(path.stem for path in folder.glob(f"*{FRAGMENT_SUFFIX}")) if folder.is_dir() else []
        self._rest(started)
        return [name for name in names if name not in self._seen], manifest.complete

    def add(self, parts: Sequence[Sequence[str]]) -> slice:
        """Make parts readable, each a list of fragment names; gives the rows that they got.

        Raises:
            CacheCorrupt: a fragment is damaged or gone.
        """
        started, before = time.monotonic(), len(self.reader.index)
        new: list[CacheIndex] = []
        for names in parts:
            paths = [fragment_path(self.reader.cache, name) for name in names]
            for path in paths:
                if not path.is_file():
                    raise CacheCorrupt(f"{path} is gone, though training has drawn from what it commits")
            new.append(load_index(self.reader.cache, self.reader.manifest, paths))
            self._seen.update(names)
        self.reader.index = join([self.reader.index, *new])
        self._rest(started)
        return slice(before, len(self.reader.index))

    def _rest(self, started: float) -> None:
        """Leave the disk alone for a while after work that began then."""
        now = time.monotonic()
        self._next_look = max(self._next_look, now + max(_QUIET_S, _QUIET_FACTOR * (now - started)))


def planned_of(cache: Path) -> Planned:
    """What a cache was planned to hold, or holds if it is complete.

    Raises:
        CacheError: it is incomplete and has no plan, or is damaged.
    """
    manifest = load_manifest(cache)
    edges = manifest.identity.bucket_edges
    if not manifest.complete:
        return load_planned(cache, edges)
    return Planned.of(load_index(cache, manifest).lengths, edges)


def join(parts: Sequence[CacheIndex]) -> CacheIndex:
    """The rows of several indices of one cache, part after part."""
    starts = np.cumsum([0, *map(len, parts)])[:-1].tolist()
    stored = [part.stored for part in parts]
    places = [part.places + start for part, start in zip(stored, starts, strict=True)]
    shards = [part.shard_starts + start for part, start in zip(stored, starts, strict=True)]
    return replace(
        parts[0],
        ids=np.concatenate([part.ids for part in parts]),
        buckets=np.concatenate([part.buckets for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        supervised=np.concatenate([part.supervised for part in parts]),
        layouts=tuple(layout for part in parts for layout in part.layouts),
        digests=tuple(digest for part in parts for digest in part.digests),
        stored=replace(
            stored[0],
            places=np.concatenate(places),
            offsets=np.concatenate([part.offsets for part in stored]),
            crcs=np.concatenate([part.crcs for part in stored]),
            shard_starts=np.concatenate(shards),
        ),
    )
