"""Commits on their way to an object store, in one order for all who write there.

The fragments of such a cache are named `commit-<n>`. A writer that wants to commit goes through the numbers
that have been given since it planned its work, checks that none of those commits holds a sample of its own,
and creates the first number that is free, which the store lets one writer do. So no two commits hold the same
sample, however long a writer sleeps between any two steps, and whatever became of its claim. One thing could
break that: repair takes numbers out, and a whole repair may fall into the sleep of a writer between its last
look at its claim and its commit.

Until then a commit waits in `unsent/` beside the cache's folder, where a run that was killed finds it again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dflash.cache.fragment import FRAGMENT_SUFFIX, INDEX_FOLDER, fragment_path, renamed_fragment
from dflash.cache.index import load_index
from dflash.cache.manifest import load_manifest
from dflash.errors import CacheCorrupt, CacheError
from dflash.files import publish_bytes, size_of_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dflash.cache.claim import Claim
    from dflash.cache.copies import ShardCopies
    from dflash.cache.index import CacheIndex

UNSENT_FOLDER = "unsent"
_COMMIT = re.compile(rf"commit-([0-9]{{6,}}){re.escape(FRAGMENT_SUFFIX)}")


def is_commit(name: str) -> bool:
    """Whether a fragment, by its path in the cache, was committed in the order of a store."""
    return _COMMIT.fullmatch(name.rpartition("/")[2]) is not None


class Handover:
    """Sends the commits of one process.

    Args:
        copies: The shards of the mirror.
        claim: The right to write.
    """

    def __init__(self, copies: ShardCopies, claim: Claim) -> None:
        self._copies, self._store, self._cache, self._claim = copies, copies.store, copies.cache, claim
        self._folder = self._cache.parent / UNSENT_FOLDER
        names = (path.name for path in (self._cache / INDEX_FOLDER).glob("*"))
        numbers = (int(found[1]) for name in names if (found := _COMMIT.fullmatch(name)))
        self._next = max(numbers, default=-1) + 1
        """Commits below are in the index that the work is planned from."""
        self._later: list[NDArray[np.uint64]] = []
        """Ids that were committed since."""

    def keep(self, unit: str, fragment: bytes) -> None:
        """Put a commit where it waits, its shard being in its place.

        Raises:
            FileExistsError: there is one of this unit.
        """
        self._folder.mkdir(exist_ok=True)
        publish_bytes(self._path(unit), fragment, replace=False)

    def send(self, unit: str) -> None:
        """Send the shard of a waiting commit, then commit it by the next number.

        Raises:
            CacheError: another run has taken over, or has committed some of these samples.
            StoreError: the store does not answer, or refuses.
        """
        index = self._waiting(unit)
        (layout,) = index.layouts
        self._store.create(layout.name, self._cache / layout.name)
        self._claim.check()
        data = self._path(unit).read_bytes()
        while not self._committed(data, index.ids):
            pass
        self._copies.marker(layout.name).touch()
        self._path(unit).unlink()
        self._copies.make_room({layout.name})

    def send_waiting(self) -> None:
        """Send what an earlier run of this machine has left, unless others have committed it meanwhile.

        Raises:
            CacheError: another run has taken over.
            StoreError: the store does not answer, or refuses.
        """
        for path in sorted(self._folder.glob(f"*{FRAGMENT_SUFFIX}")):
            unit = path.name.removesuffix(FRAGMENT_SUFFIX)
            try:
                (layout,) = (waiting := self._waiting(unit)).layouts
            except CacheCorrupt:  # of another cache that was here, or half on the disk
                path.unlink()
                continue
            committed = load_index(self._cache, load_manifest(self._cache)).ids
            if size_of_file(self._cache / layout.name) == layout.file_size and not _meet(
                waiting.ids, committed
            ):
                self.send(unit)
            else:
                path.unlink()

    def _waiting(self, unit: str) -> CacheIndex:
        return load_index(self._cache, load_manifest(self._cache), [self._path(unit)])

    def _path(self, unit: str) -> Path:
        return self._folder / f"{unit}{FRAGMENT_SUFFIX}"

    def _committed(self, data: bytes, ids: NDArray[np.uint64]) -> bool:
        """Try the next number; if it was given already, note what it holds."""
        if any(_meet(ids, others) for others in self._later):
            raise CacheError(
                f"{self._store.url}: another run has committed samples of this one; what is committed stays; "
                "run the same command again when no other is running"
            )
        name = f"commit-{self._next:06d}"
        path, key = fragment_path(self._cache, name), f"{INDEX_FOLDER}/{name}{FRAGMENT_SUFFIX}"
        if not path.exists():
            mine = renamed_fragment(data, name)
            try:
                self._store.create(key, mine)
            except FileExistsError:
                publish_bytes(path, self._store.read(key))
            else:
                publish_bytes(path, mine)
                self._next += 1
                return True
        self._later.append(load_index(self._cache, load_manifest(self._cache), [path]).ids)
        self._next += 1
        return False


def _meet(ids: NDArray[np.uint64], others: NDArray[np.uint64]) -> bool:
    return bool(np.isin(ids, others).any())
