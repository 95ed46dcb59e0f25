"""Local copies of the shards of a cache in an object store: fetched when they are read, within a bound.

A shard is checked against its digest when it arrives, and the ones unused longest make room.
"""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dflash.cache.shard import DATA_START, SHARDS_FOLDER, ShardLayout, is_shard_name, shard_digest
from dflash.errors import CacheCorrupt, CacheError, StoreError
from dflash.files import TMP_SUFFIX, size_of_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from dflash.store import Store

BOUND_VARIABLE = "DFLASH_LOCAL_CACHE_GB"
"""Environment variable: gigabytes of shards that one mirror keeps at most."""
DEFAULT_BOUND_GB = 256.0
_FETCHES = 4


class ShardCopies:
    """The shards in a mirror's folder. Several processes may use one folder.

    Args:
        store: Of the cache.
        cache: The local folder; empty files in `copies/` beside it tell which shards the store has too.

    Raises:
        CacheError: the bound is no number.
    """

    def __init__(self, store: Store, cache: Path) -> None:
        self.store, self.cache = store, cache
        self._bound = int(_bound_gb() * 1e9)
        self._making_room = threading.Lock()

    def fetch(self, shards: Iterable[tuple[ShardLayout, str]]) -> None:
        """Make sure that these shards, each with its digest, are here; several are fetched at a time.

        Raises:
            CacheCorrupt: a shard is missing in the store, or damaged there: it was fetched twice.
            StoreError: the store does not answer, or refuses.
        """
        wanted = list(shards)
        missing = [(layout, digest) for layout, digest in wanted if not self._touch(layout.name)]
        if not missing:
            return
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(self._fetch_one, *zip(*missing, strict=True)))
        self.make_room({layout.name for layout, _ in wanted})

    def forget(self, name: str) -> None:
        """Remove the local copy of a shard that turned out to be bad: the next read fetches it again."""
        self.marker(name).unlink(missing_ok=True)

    def fetch_ahead(self, shards: Iterable[tuple[ShardLayout, str]], stop: threading.Event) -> None:
        """Fetch shards in this order until the bound is reached or `stop` is set; errors wait for the reader.

        For a thread beside training. What is needed before its turn is fetched by the read that needs it.
        """
        total = sum(size_of_file(path) for path in self.paths())
        for layout, digest in shards:
            if stop.is_set():
                return
            if self._touch(layout.name):
                continue
            total += layout.file_size
            if total > self._bound:
                return
            try:
                self._fetch_one(layout, digest)
            except StoreError:
                return
            except CacheError:
                total -= layout.file_size

    def _fetch_one(self, layout: ShardLayout, digest: str) -> None:
        path = self.cache / layout.name
        with self.locked(layout.name):
            if self._touch(layout.name):  # another process was faster
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            for attempt in (1, 2):
                tmp = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{TMP_SUFFIX}")
                try:
                    problem = self._arrived(layout, digest, tmp)
                    if problem is None:
                        tmp.replace(path)
                        self.marker(layout.name).touch()
                        return
                finally:
                    tmp.unlink(missing_ok=True)
                if attempt == 2:
                    raise CacheCorrupt(
                        f"{self.store.url}/{layout.name}: {problem}, twice; "
                        f"run `dflash cache repair {self.store.url}`, then `dflash extract` again"
                    )

    def _arrived(self, layout: ShardLayout, digest: str, tmp: Path) -> str | None:
        """Fetch a shard to `tmp`; what is wrong with it."""
        try:
            self.store.download(layout.name, tmp, layout.file_size)
        except FileNotFoundError:
            return "missing though its samples were committed"
        return content_problem(tmp, layout, digest)

    def paths(self) -> list[Path]:
        """The shards that are here, copies or not."""
        found = (self.cache / SHARDS_FOLDER).glob("*/*")
        return [path for path in found if is_shard_name(path.relative_to(self.cache).as_posix())]

    def _touch(self, name: str) -> bool:
        """Whether a copy of a shard is here; it counts as used now."""
        try:
            os.utime(self.cache / name)
        except FileNotFoundError:
            return False
        return self.marker(name).exists()

    def marker(self, name: str) -> Path:
        """The file that says that a local shard is a copy of one in the store."""
        folder = self.cache.parent / "copies"
        folder.mkdir(exist_ok=True)
        return folder / name.replace("/", "--")

    def make_room(self, keep: set[str]) -> None:
        """Remove the copies of shards unused longest, down to the bound, but none of those in `keep`."""
        with self._making_room:
            found = [(path, path.stat()) for path in self.paths() if path.exists()]
            excess = sum(stat.st_size for _, stat in found) - self._bound
            for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
                if excess <= 0:
                    return
                name = path.relative_to(self.cache).as_posix()
                if name not in keep and self.marker(name).exists():
                    self.marker(name).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
                    excess -= stat.st_size

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Only one process of this machine at a time fetches an object."""
        folder = self.cache.parent / "locks"
        folder.mkdir(exist_ok=True)
        with (folder / name.replace("/", "--")).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def content_problem(path: Path, layout: ShardLayout, digest: str) -> str | None:
    """What is wrong with a shard of the right size."""
    with path.open("rb", buffering=0) as file:
        if file.read(DATA_START) != layout.header():
            return "its header is not that of the committed shard"
        if digest and shard_digest(file) != digest:
            return "its bytes have changed, they do not fit its digest"
    return None


def _bound_gb() -> float:
    text = os.environ.get(BOUND_VARIABLE, "")
    try:
        value = float(text) if text else DEFAULT_BOUND_GB
    except ValueError:
        value = 0.0
    if value <= 0:
        raise CacheError(f"{BOUND_VARIABLE}={text!r} is not a number of gigabytes above 0")
    return value
