"""Sending a whole cache from a folder to an object store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.cache.index import fragment_paths, load_index
from dflash.cache.manifest import MANIFEST_NAME, load_manifest
from dflash.cache.mirror import Mirror, mirror_of
from dflash.cache.parts import part_names
from dflash.errors import CacheError
from dflash.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.cache.index import CacheIndex


def push_cache(cache: Path, url: str, *, show: bool = True) -> int:
    """Send a cache to an object store: shards, index, parts, and the manifest last.

    What the store has already is left, so a push that was interrupted goes on where it stopped.

    Args:
        cache: The cache's folder.
        url: Where it goes; a store without another cache there.
        show: Whether to show progress.

    Returns:
        Bytes of the shards.

    Raises:
        CacheError: the store holds something else there, or another run is writing.
        StoreError: the store does not answer, or refuses.
    """
    mirror, index = Mirror.at(url), load_index(cache, load_manifest(cache))
    try:
        with mirror.writing():
            _send(cache, mirror, index, show=show)
            mirror.held()
            mirror.store.create(MANIFEST_NAME, (cache / MANIFEST_NAME).read_bytes())
    except FileExistsError as error:
        raise CacheError(f"{error.filename} holds something else; choose an empty place") from error
    return sum(layout.file_size for layout in index.layouts)


def _send(cache: Path, mirror: Mirror, index: CacheIndex, *, show: bool) -> None:
    """Send all but the manifest; shards of a cache in another store are fetched from there.

    Raises:
        FileExistsError: the store holds another cache there, or other bytes.
    """
    store, source = mirror.store, mirror_of(cache)
    sizes, total = store.sizes(), sum(layout.file_size for layout in index.layouts)
    if MANIFEST_NAME in sizes:
        store.create(MANIFEST_NAME, (cache / MANIFEST_NAME).read_bytes())  # refuses before anything is sent
    with Progress("push", total >> 20, "MiB", enabled=show) as progress:
        for layout, digest in zip(index.layouts, index.digests, strict=True):
            if sizes.get(layout.name) != layout.file_size:
                if source is not None and source.url != mirror.url:
                    source.copies.fetch([(layout, digest)])
                store.create(layout.name, cache / layout.name)
            progress.advance(layout.file_size >> 20)
    for path in fragment_paths(cache):
        store.create(path.relative_to(cache).as_posix(), path.read_bytes())
    for name in part_names(cache):
        store.create(name, (cache / name).read_bytes())


def push_made(cache: Path) -> None:
    """Send a cache that has just been made in the folder of a mirror to its store; nothing for other folders.

    Raises:
        CacheError: the store holds something else there, or another run is writing.
        StoreError: the store does not answer, or refuses.
    """
    mirror = mirror_of(cache)
    if mirror is not None:
        push_cache(cache, mirror.url)
