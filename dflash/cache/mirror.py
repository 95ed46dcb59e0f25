"""A cache in an object store, and the local folder through which everything else works on it.

    <folder>/dflash-remote.json     the URL
    <folder>/cache/                 manifest, index, head and tokenizer as in the store; of the shards, those
                                    that were read or written last, within a bound
    <folder>/copies/                an empty file for each shard in `cache/` that the store has too
    <folder>/locks/                 so that several processes fetch a file once

The store is what counts. A commit reaches it as it does a disk: first the shard, then the index fragment,
both only where nothing of that name is there yet. Shards are fetched when they are read, checked against
their digest when they arrive, and the ones unused longest make room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.cache.index import FRAGMENT_SUFFIX, INDEX_FOLDER, fragment_path
from dflash.cache.manifest import MANIFEST_NAME, TARGET_CONFIG_NAME, load_manifest
from dflash.cache.parts import TOKENIZER_FOLDER, part_names
from dflash.cache.planned import PLANNED_NAME
from dflash.cache.shard import (
    DATA_START,
    SHARDS_FOLDER,
    ShardLayout,
    is_shard_name,
    shard_digest,
    unit_of,
)
from dflash.errors import CacheCorrupt, CacheError, StoreError
from dflash.files import TMP_SUFFIX, publish_bytes, publish_json, size_of_file
from dflash.head import HEAD_NAME
from dflash.provenance import RECORD_NAME
from dflash.store import Store, is_url, path_of_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MARKER = "dflash-remote.json"
FOLDER_VARIABLE = "DFLASH_LOCAL_CACHE"
"""Environment variable: where mirrors are; by default `mirrors` in `$DFLASH_HOME` or `~/.cache/dflash`."""
BOUND_VARIABLE = "DFLASH_LOCAL_CACHE_GB"
"""Environment variable: gigabytes of shards that one mirror keeps at most."""
DEFAULT_BOUND_GB = 256.0
_FETCHES = 4
_SINGLE = (RECORD_NAME, TARGET_CONFIG_NAME, HEAD_NAME, PLANNED_NAME)
_PARTS = re.compile(
    "|".join(map(re.escape, _SINGLE)) + rf"|{TOKENIZER_FOLDER}(/[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}){{1,4}}"
)
_FRAGMENT = re.compile(rf"{INDEX_FOLDER}/[A-Za-z0-9][A-Za-z0-9_.-]{{0,99}}{re.escape(FRAGMENT_SUFFIX)}")


def local_folder(place: str, *, pull: bool = True) -> Path:
    """The folder in which the cache at a path or URL is worked on.

    Args:
        place: A path, or a URL of `file` or of an object store.
        pull: Bring what is not a shard up to date with the store.

    Raises:
        StoreError: the store does not answer, or refuses.
        CacheError: there is no cache at this URL.
        ConfigError: the URL cannot be used, or the extra `remote` is not installed.
    """
    if not is_url(place):
        return Path(place)
    path = path_of_url(place)
    if path is not None:
        return path
    mirror = Mirror.at(place)
    if pull:
        mirror.pull()
    return mirror.cache


def mirror_of(cache: Path) -> Mirror | None:
    """The mirror whose folder this is; None for a cache of its own."""
    try:
        value = json.loads((cache.parent / MARKER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CacheError(f"{cache.parent / MARKER}: {error}; remove this folder") from error
    return Mirror(str(value["url"]), cache)


class Mirror:
    """The local folder of a cache in an object store. Several processes may use one folder.

    Args:
        url: Of the cache in the store.
        cache: The local folder; its parent holds the marker.
    """

    def __init__(self, url: str, cache: Path) -> None:
        self.url, self.cache = url, cache
        self.store = Store(url)
        self._bound = int(_bound_gb() * 1e9)
        self._making_room = threading.Lock()

    @classmethod
    def at(cls, url: str) -> Mirror:
        """The mirror of this URL, its folder made if it is not there."""
        home = Path(os.environ.get("DFLASH_HOME") or Path.home() / ".cache" / "dflash").expanduser()
        root = Path(os.environ.get(FOLDER_VARIABLE) or home / "mirrors").expanduser()
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", url.rstrip("/").rpartition("/")[2])[:40]
        folder = root / f"{name}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            publish_json(folder / MARKER, {"url": url.rstrip("/")})
        except OSError as error:
            raise CacheError(f"cannot keep a mirror of {url}: {error}; set {FOLDER_VARIABLE}") from error
        return cls(url.rstrip("/"), folder / "cache")

    def pull(self, *, writing: bool = False) -> None:
        """Make manifest, index, head and tokenizer those of the store.

        Commits that this machine has not handed over to the store yet are handed over when writing goes on,
        unless others have committed since: then their samples may be there already, and they are dropped.

        Raises:
            CacheError: there is no cache in the store and none is going to be written.
            StoreError: the store does not answer, or refuses.
        """
        try:  # before the listing: when it says complete, no fragment comes after it
            manifest = self.store.read(MANIFEST_NAME)
        except FileNotFoundError as error:
            if not writing:
                raise CacheError(f"{self.url} is not a cache: it has no {MANIFEST_NAME}") from error
            # What is here is left of a cache that the store has no more.
            shutil.rmtree(self.cache, ignore_errors=True)
            return
        there = self.store.sizes()
        here = {path.relative_to(self.cache).as_posix() for path in self.cache.glob(f"{INDEX_FOLDER}/*")}
        unsent = sorted(name for name in here if _FRAGMENT.fullmatch(name) and name not in there)
        # Some change their content; the others come and go as a whole.
        wanted = [
            name
            for name, size in there.items()
            if name in {RECORD_NAME, PLANNED_NAME}
            or (
                (_PARTS.fullmatch(name) or _FRAGMENT.fullmatch(name))
                and size != size_of_file(self.cache / name)
            )
        ]
        others_committed = any(_FRAGMENT.fullmatch(name) for name in wanted)
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(self._pull_one, wanted))
        self.cache.mkdir(exist_ok=True)
        publish_bytes(self.cache / MANIFEST_NAME, manifest)
        # A process of this machine may be about to send one; a finished cache expects none any more.
        finished = not writing and load_manifest(self.cache).complete
        for name in unsent:
            if writing and not others_committed:
                self._send_again(name)
            elif writing or finished:
                self._drop(name)

    def push_parts(self) -> None:
        """Send manifest, head, tokenizer and the rest that is no shard and no index.

        Raises:
            CacheError: another process has begun a cache there since this one looked.
            StoreError: the store does not answer, or refuses.
        """
        manifest = (self.cache / MANIFEST_NAME).read_bytes()
        if MANIFEST_NAME not in self.store.sizes():
            try:
                self.store.create(MANIFEST_NAME, manifest)
            except FileExistsError as error:
                raise CacheError(
                    f"{error.filename} was written by another process just now; run the same command again"
                ) from error
        for name in part_names(self.cache):
            self.store.replace(name, (self.cache / name).read_bytes())
        self.store.replace(MANIFEST_NAME, manifest)

    def push_file(self, name: str = MANIFEST_NAME) -> None:
        """Replace a file in the store, usually the manifest, by the local one.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        self.store.replace(name, (self.cache / name).read_bytes())

    def push_repaired(self, committed: Iterable[str]) -> None:
        """Make the store's index and parts those that a repair has left, and remove what nothing commits.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        self.push_file()
        for name, size in self.store.sizes().items():
            here = size_of_file(self.cache / name)
            if not (_PARTS.fullmatch(name) or _FRAGMENT.fullmatch(name)) or here == size:
                continue
            if here < 0:
                self.store.remove(name)
            else:
                self.store.replace(name, (self.cache / name).read_bytes())
        self.sweep(committed)

    def commit(self, shard: str, fragment: str) -> None:
        """Send a shard and then the index fragment that commits it; then make room.

        Raises:
            FileExistsError: another writer has written one of that name; neither counts as this one's.
            StoreError: the store does not answer, or refuses.
        """
        self.store.create(shard, self.cache / shard)
        path = fragment_path(self.cache, fragment)
        self.store.create(f"{INDEX_FOLDER}/{path.name}", path.read_bytes())
        self._copy_of(shard).touch()
        self._make_room({shard})

    def taken_units(self) -> list[str]:
        """Names of all shards and fragments in the store, committed or not."""
        return [name.rpartition("/")[2] for name in self.store.sizes() if not _PARTS.fullmatch(name)]

    def shard_sizes(self) -> dict[str, int]:
        """Bytes of the shards in the store."""
        return {name: size for name, size in self.store.sizes(SHARDS_FOLDER).items() if is_shard_name(name)}

    def sweep(self, committed: Iterable[str]) -> list[str]:
        """Remove shards that nothing commits from the store of a finished cache."""
        rubbish = sorted(self.shard_sizes().keys() - set(committed))
        for name in rubbish:
            self.store.remove(name)
        return rubbish

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
        self._make_room({layout.name for layout, _ in wanted})

    def forget(self, name: str) -> None:
        """Remove the local copy of a shard that turned out to be bad: the next read fetches it again."""
        self._copy_of(name).unlink(missing_ok=True)

    def fetch_ahead(self, shards: Iterable[tuple[ShardLayout, str]], stop: threading.Event) -> None:
        """Fetch shards in this order until the bound is reached or `stop` is set; errors wait for the reader.

        For a thread beside training. What is needed before its turn is fetched by the read that needs it.
        """
        total = sum(size_of_file(path) for path in self._shard_paths())
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
        with self._locked(layout.name):
            if self._touch(layout.name):  # another process was faster
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            for attempt in (1, 2):
                tmp = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{TMP_SUFFIX}")
                try:
                    problem = self._arrived(layout, digest, tmp)
                    if problem is None:
                        tmp.replace(path)
                        self._copy_of(layout.name).touch()
                        return
                finally:
                    tmp.unlink(missing_ok=True)
                if attempt == 2:
                    raise CacheCorrupt(
                        f"{self.url}/{layout.name}: {problem}, twice; run `dflash cache repair {self.url}`, "
                        "then `dflash extract` again"
                    )

    def _arrived(self, layout: ShardLayout, digest: str, tmp: Path) -> str | None:
        """Fetch a shard to `tmp`; what is wrong with it."""
        try:
            self.store.download(layout.name, tmp, layout.file_size)
        except FileNotFoundError:
            return "missing though its samples were committed"
        return arrival_problem(tmp, layout, digest)

    def _pull_one(self, name: str) -> None:
        path = self.cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(name):
            publish_bytes(path, self.store.read(name))

    def _send_again(self, fragment: str) -> None:
        """Hand a commit over that the store does not have; without its shard it is no commit any more."""
        shard = self._shard_of(fragment)
        if shard is None:
            self._drop(fragment)
        else:
            self.commit(shard.relative_to(self.cache).as_posix(), _unit(fragment))

    def _drop(self, fragment: str) -> None:
        """Take back a commit that the store does not have."""
        shard = self._shard_of(fragment)
        (self.cache / fragment).unlink(missing_ok=True)
        if shard is not None:
            shard.unlink(missing_ok=True)

    def _shard_of(self, fragment: str) -> Path | None:
        """The shard that a fragment of one shard commits, if it is here."""
        return next((path for path in self._shard_paths() if unit_of(path.name) == _unit(fragment)), None)

    def _shard_paths(self) -> list[Path]:
        paths = (self.cache / SHARDS_FOLDER).glob("*/*")
        return [path for path in paths if is_shard_name(path.relative_to(self.cache).as_posix())]

    def _touch(self, name: str) -> bool:
        """Whether a copy of a shard is here; it counts as used now."""
        try:
            os.utime(self.cache / name)
        except FileNotFoundError:
            return False
        return self._copy_of(name).exists()

    def _copy_of(self, name: str) -> Path:
        """The file that says that a local shard is a copy of one in the store."""
        folder = self.cache.parent / "copies"
        folder.mkdir(exist_ok=True)
        return folder / name.replace("/", "--")

    def _make_room(self, keep: set[str]) -> None:
        """Remove the copies of shards unused longest, down to the bound, but none of those in `keep`."""
        with self._making_room:
            found = [(path, path.stat()) for path in self._shard_paths() if path.exists()]
            excess = sum(stat.st_size for _, stat in found) - self._bound
            for path, stat in sorted(found, key=lambda item: item[1].st_mtime):
                if excess <= 0:
                    return
                name = path.relative_to(self.cache).as_posix()
                if name not in keep and self._copy_of(name).exists():
                    self._copy_of(name).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
                    excess -= stat.st_size

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Only one process of this machine at a time fetches an object."""
        folder = self.cache.parent / "locks"
        folder.mkdir(exist_ok=True)
        with (folder / name.replace("/", "--")).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def arrival_problem(path: Path, layout: ShardLayout, digest: str) -> str | None:
    """What is wrong with a shard that has just been fetched; its size is right."""
    with path.open("rb", buffering=0) as file:
        if file.read(DATA_START) != layout.header():
            return "its header is not that of the committed shard"
        if digest and shard_digest(file) != digest:
            return "its bytes have changed, they do not fit its digest"
    return None


def _unit(fragment: str) -> str:
    return Path(fragment).name.removesuffix(FRAGMENT_SUFFIX)


def _bound_gb() -> float:
    text = os.environ.get(BOUND_VARIABLE, "")
    try:
        value = float(text) if text else DEFAULT_BOUND_GB
    except ValueError:
        value = 0.0
    if value <= 0:
        raise CacheError(f"{BOUND_VARIABLE}={text!r} is not a number of gigabytes above 0")
    return value
