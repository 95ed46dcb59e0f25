"""A cache in an object store, and the local folder through which everything else works on it.

    <folder>/dflash-remote.json     the URL
    <folder>/cache/                 manifest, index, head and tokenizer as in the store; of the shards, those
                                    that were read or written last, within a bound
    <folder>/copies/                an empty file for each shard in `cache/` that the store has too
    <folder>/unsent/                commits on their way to the store
    <folder>/locks/, writing        so that several processes fetch a file once, and one run writes
    <folder>/machine                a random name, so that a later run knows an earlier one of this machine

The store is what counts. A commit reaches it as it does a disk: first the shard, then the index fragment,
both only where nothing of that name is there yet, and only by the one run that may write (`claim`,
`handover`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dflash.cache.claim import Claim, claimed, locked
from dflash.cache.copies import ShardCopies
from dflash.cache.fragment import FRAGMENT_SUFFIX, INDEX_FOLDER
from dflash.cache.handover import UNSENT_FOLDER, Handover, is_commit
from dflash.cache.manifest import MANIFEST_NAME, TARGET_CONFIG_NAME, load_manifest
from dflash.cache.parts import TOKENIZER_FOLDER, part_names
from dflash.cache.planned import PLANNED_NAME
from dflash.cache.shard import SHARDS_FOLDER, is_shard_name
from dflash.errors import CacheError
from dflash.files import publish_bytes, publish_json, size_of_file
from dflash.head import HEAD_NAME
from dflash.provenance import RECORD_NAME
from dflash.store import Listed, Store, is_url, path_of_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MARKER = "dflash-remote.json"
FOLDER_VARIABLE = "DFLASH_LOCAL_CACHE"
"""Environment variable: where mirrors are; by default `mirrors` in `$DFLASH_HOME` or `~/.cache/dflash`."""
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


@contextmanager
def writing(cache: Path) -> Iterator[Mirror | None]:
    """Be the one run that writes to a cache in an object store until the block ends; elsewhere nothing.

    Raises:
        CacheError: another run is writing, or there is no cache.
        StoreError: the store does not answer, or refuses.
    """
    mirror = mirror_of(cache)
    if mirror is None:
        yield None
        return
    with mirror.writing():
        mirror.pull()
        yield mirror


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
        self.copies = ShardCopies(self.store, cache)
        self.claim: Claim | None = None
        self.commits: Handover | None = None
        """Takes commits, once this process may write and has seen what is there."""

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

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one run that writes to this cache until the block ends.

        Raises:
            CacheError: another run is writing; says who, since when and what to do.
            StoreError: the store does not answer, or refuses.
        """
        folder = self.cache.parent
        with locked(folder / "writing", self.url), claimed(self.store, _machine(folder)) as self.claim:
            yield

    def begin(self) -> None:
        """Make what is no shard that of the store, if it has the cache, and get ready to commit.

        What this machine has committed and not sent is sent, unless others have committed these samples.

        Raises:
            CacheError: another run has taken over.
            StoreError: the store does not answer, or refuses.
        """
        try:
            self._pull(self.store.read(MANIFEST_NAME), writing=True)
        except FileNotFoundError:  # what is here is left of a cache that the store has no more
            for folder in (self.cache, self.cache.parent / UNSENT_FOLDER):
                shutil.rmtree(folder, ignore_errors=True)
        self.commits = Handover(self.copies, self.held())
        self.commits.send_waiting()

    def join(self, number: int) -> None:
        """Pull, and get ready to commit beside the rank that holds the claim of this number.

        Raises:
            CacheError: there is no cache in the store.
            StoreError: the store does not answer, or refuses.
        """
        self.pull()
        self.claim = Claim(self.store, number)
        self.commits = Handover(self.copies, self.claim)

    def held(self) -> Claim:
        """The claim, once it is sure that it still holds.

        Raises:
            CacheError: another run has taken over.
            StoreError: the store does not answer, or refuses.
        """
        if self.claim is None:
            raise CacheError(f"{self.url} has changed since this command began; run it again")
        self.claim.check()
        return self.claim

    def finished(self) -> bool:
        """Whether the store has the cache and it is complete; what is no shard is here then.

        Raises:
            CacheCorrupt: its manifest is damaged.
            StoreError: the store does not answer, or refuses.
        """
        try:
            self._pull(self.store.read(MANIFEST_NAME))
        except FileNotFoundError:
            return False
        return load_manifest(self.cache).complete

    def pull(self) -> None:
        """Make manifest, index, head and tokenizer those of the store.

        Raises:
            CacheError: there is no cache in the store.
            StoreError: the store does not answer, or refuses.
        """
        try:
            manifest = self.store.read(MANIFEST_NAME)
        except FileNotFoundError as error:
            raise CacheError(f"{self.url} is not a cache: it has no {MANIFEST_NAME}") from error
        self._pull(manifest)

    def _pull(self, manifest: bytes, *, writing: bool = False) -> None:
        """The rest; the manifest was read before, since when it says complete no fragment comes after it."""
        # Before the listing: what another process of this machine commits is in the store first.
        here = [path.relative_to(self.cache).as_posix() for path in self.cache.glob(f"{INDEX_FOLDER}/*")]
        there = self.store.listed()
        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(self._pull_one, self._changed(there)))
        self.cache.mkdir(exist_ok=True)
        publish_bytes(self.cache / MANIFEST_NAME, manifest)
        # What the store does not have was taken out by a repair, or a tool is about to send it.
        every = writing or load_manifest(self.cache).complete
        for name in here:
            if _FRAGMENT.fullmatch(name) and name not in there and (every or is_commit(name)):
                (self.cache / name).unlink(missing_ok=True)

    def _changed(self, there: Mapping[str, Listed]) -> Iterator[tuple[str, Listed]]:
        """What has to be fetched; of the parts, which come and go as a whole, those of another size."""
        for name, entry in there.items():
            path = self.cache / name
            if name in {RECORD_NAME, PLANNED_NAME} or (
                (_PARTS.fullmatch(name) and size_of_file(path) != entry.size)
                or (_FRAGMENT.fullmatch(name) and not _is_same(path, entry))
            ):
                yield name, entry

    def push_parts(self) -> None:
        """Send manifest, head, tokenizer and the rest that is no shard and no index.

        Raises:
            CacheError: another run has taken over, or has begun a cache there since this one looked.
            StoreError: the store does not answer, or refuses.
        """
        self.held()
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
            CacheError: another run has taken over.
            StoreError: the store does not answer, or refuses.
        """
        self.held()
        self.store.replace(name, (self.cache / name).read_bytes())

    def push_repaired(self, committed: Iterable[str]) -> None:
        """Make the store's index and parts those that a repair has left, and remove what nothing commits.

        Raises:
            CacheError: another run has taken over.
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

    def shard_sizes(self) -> dict[str, int]:
        """Bytes of the shards in the store."""
        return {name: size for name, size in self.store.sizes(SHARDS_FOLDER).items() if is_shard_name(name)}

    def sweep(self, committed: Iterable[str]) -> list[str]:
        """Remove shards that nothing commits from the store of a finished cache."""
        rubbish = sorted(self.shard_sizes().keys() - set(committed))
        for name in rubbish:
            self.store.remove(name)
        return rubbish

    def _pull_one(self, wanted: tuple[str, Listed]) -> None:
        name, entry = wanted
        path = self.cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.copies.locked(name):
            publish_bytes(path, self.store.read(name))
            os.utime(path, (entry.written, entry.written))


def _is_same(path: Path, entry: Listed) -> bool:
    """Whether a local fragment is that of the store: after a repair another may have its name and size."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, int(found.st_mtime)) == entry


def _machine(folder: Path) -> str:
    """What names a mirror's folder among those of all machines."""
    path = folder / "machine"
    with suppress(FileExistsError):
        publish_bytes(path, uuid.uuid4().hex.encode(), replace=False)
    return path.read_text()
