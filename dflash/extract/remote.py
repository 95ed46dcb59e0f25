"""What extraction does besides when its cache is in an object store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dflash.board import Board
from dflash.cache.index import load_index
from dflash.cache.manifest import BadSample, Manifest, load_manifest
from dflash.cache.mirror import Mirror
from dflash.cache.writer import finalize


@contextmanager
def may_write(mirror: Mirror | None, board: Board, *, append: bool) -> Iterator[None]:
    """Be the one run that writes to the store until the block ends, unless there is nothing to write.

    Raises:
        CacheError: another run is writing; says who, since when and what to do.
        StoreError: the store does not answer, or refuses.
    """
    if mirror is None or not board.world.is_main or (mirror.finished() and not append):
        yield
        return
    with mirror.writing():
        mirror.begin()
        yield


def claim_of(mirror: Mirror | None) -> int:
    """Number of the claim that this process holds; 0 for none."""
    return 0 if mirror is None or mirror.claim is None else mirror.claim.number


def writer_name(mirror: Mirror | None, rank: int) -> str:
    """What a rank's units are called; in a store like no other's, also of a cache that was pushed there."""
    return f"rank{rank}" if mirror is None else f"rank{rank}-{uuid.uuid4().hex[:12]}"


def finalized(cache: Path, mirror: Mirror | None, bad: Sequence[BadSample]) -> Manifest:
    """The manifest of the finished cache; one in an object store learns of it last.

    Raises:
        CacheError: samples are missing, something is damaged, or another run has taken over.
        StoreError: the store does not answer, or refuses.
    """
    if mirror is None:
        return finalize(cache, bad)
    mirror.pull()  # what ranks on other machines have committed
    before = load_manifest(cache)
    if not before.complete:
        mirror.held()  # before the manifest says complete, even here
    manifest = finalize(cache, bad, mirror.shard_sizes())
    if manifest == before:
        return manifest
    mirror.push_file()
    mirror.sweep(layout.name for layout in load_index(cache, manifest).layouts)
    return manifest
