"""`merge`, `subset`, `rebucket`, `drop-taps`: what each wants of its sources; `derive` makes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.cut import TapCut, cut_manifest
from dflash.cache.derive import Derived, Recipe, Source, derive
from dflash.cache.reader import CacheReader
from dflash.cache.where import select
from dflash.cache.writer import SHARD_BYTES
from dflash.errors import CacheError, CacheMismatch, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dflash.cache.manifest import Manifest

NOT_CHOSEN = "not_in_subset"
"""Reason under which samples are counted that a subset leaves out."""


@dataclass(frozen=True)
class Choice:
    """Which samples a subset takes."""

    where: str | None = None
    """A condition (`dflash.cache.where`); all by default."""
    share: float = 1.0
    """Of those, how many."""
    seed: int = 0
    """Decides which ones, together with their ids alone."""

    def __post_init__(self) -> None:
        """Refuse an impossible share.

        Raises:
            ConfigError: names it.
        """
        if not 0 < self.share <= 1:
            raise ConfigError(f"--sample is {self.share}; it must be above 0 and at most 1")


def merge(sources: Sequence[Path], out: Path, shard_bytes: int = SHARD_BYTES) -> Derived:
    """One cache with the samples of several of the same identity; a sample that several hold comes once.

    The corpora may differ. Where several hold a sample, the first one's bytes are taken.

    Raises:
        CacheMismatch: something else differs; names each field with both values.
        CacheError: a source cannot be used, or `out` cannot be written.
    """
    readers = [CacheReader(source) for source in sources]
    first = readers[0].manifest
    for reader in readers[1:]:
        differences = first.identity.differences(reader.manifest.identity)
        if others := [line for line in differences if not line.startswith("corpus_digest:")]:
            raise CacheMismatch(
                f"{sources[0]} and {reader.cache} cannot be merged: {'; '.join(others)} "
                f"(this: {sources[0]}, other: {reader.cache})"
            )
    wanted, unlike = _once(readers)
    manifest = _merged_manifest([reader.manifest for reader in readers], sum(map(len, wanted)))
    repeated = sum(len(reader.index) for reader in readers) - manifest.expected_samples
    notes = [f"{repeated:,} samples were in more than one cache and are taken once"] if repeated else []
    notes += (
        [f"{unlike:,} of them had other bytes in a later cache; the first one's were taken"] if unlike else []
    )
    arguments = " ".join([*map(str, sources), "--out", str(out)])
    recipe = Recipe("merge", arguments, {}, manifest, shard_bytes=shard_bytes, notes=tuple(notes))
    return derive(out, [Source(r, rows) for r, rows in zip(readers, wanted, strict=True)], recipe)


def subset(cache: Path, out: Path, choice: Choice, shard_bytes: int = SHARD_BYTES) -> Derived:
    """A cache with some of the samples; shards that are kept whole are hard links.

    Raises:
        ConfigError: the condition is malformed.
        CacheError: nothing is chosen, the source cannot be used, or `out` cannot be written.
    """
    reader = CacheReader(cache)
    rows = choose(reader, choice)
    manifest = _fresh(reader.manifest)
    left_out = len(reader.index) - len(rows)
    dropped = manifest.dropped | (
        {NOT_CHOSEN: manifest.dropped.get(NOT_CHOSEN, 0) + left_out} if left_out else {}
    )
    manifest = replace(manifest, expected_samples=len(rows), dropped=dropped)
    words = [str(cache), *(["--where", repr(choice.where)] if choice.where else [])]
    words += ["--sample", f"{choice.share:g}", "--seed", str(choice.seed)] if choice.share < 1 else []
    recipe = Recipe(
        "subset", " ".join([*words, "--out", str(out)]), vars(choice), manifest, shard_bytes=shard_bytes
    )
    return derive(out, [Source(reader, rows)], recipe)


def rebucket(cache: Path, out: Path, edges: Sequence[int], shard_bytes: int = SHARD_BYTES) -> Derived:
    """A cache with the same samples in other length buckets; their stored bytes are copied.

    Raises:
        CacheError: a sample is longer than the last edge, the edges are none, or as for `subset`.
    """
    reader = CacheReader(cache)
    longest = int(reader.index.lengths.max(initial=0))
    if not edges or longest > edges[-1]:
        raise CacheError(
            f"{cache}: its longest sample has {longest} tokens, more than the last of the edges {list(edges)}"
        )
    identity = replace(reader.manifest.identity, bucket_edges=tuple(edges), max_length=edges[-1])
    manifest = replace(_fresh(reader.manifest), identity=identity)
    arguments = f"{cache} --edges {','.join(map(str, edges))} --out {out}"
    recipe = Recipe("rebucket", arguments, {"edges": list(edges)}, manifest, shard_bytes=shard_bytes)
    return derive(out, [Source(reader, np.arange(len(reader.index)))], recipe)


def drop_taps(cache: Path, out: Path, keep: Sequence[int], shard_bytes: int = SHARD_BYTES) -> Derived:
    """A cache with fewer tapped layers, in the order given; what is stored of them stays as it is.

    Raises:
        CacheError: a layer is not among the taps, or as for `subset`.
    """
    reader = CacheReader(cache)
    identity = reader.manifest.identity
    if not keep or len(set(keep)) < len(keep) or not set(keep) <= set(identity.taps):
        raise CacheError(
            f"--keep {list(keep)} must be different layers of the taps {list(identity.taps)} of {cache}"
        )
    columns = [identity.taps.index(tap) for tap in keep]
    manifest, change = cut_manifest(_fresh(reader.manifest), columns), TapCut(reader.manifest, columns)
    arguments = f"{cache} --keep {','.join(map(str, keep))} --out {out}"
    recipe = Recipe("drop-taps", arguments, {"keep": list(keep)}, manifest, change, shard_bytes)
    return derive(out, [Source(reader, np.arange(len(reader.index)))], recipe)


def choose(reader: CacheReader, choice: Choice) -> NDArray[np.int64]:
    """Rows of the index that a choice takes, ascending.

    Raises:
        ConfigError: the condition is malformed.
    """
    rows = select(reader.index, reader.manifest.identity.bucket_edges, choice.where)
    count = round(choice.share * len(rows)) or min(len(rows), 1)
    if count == len(rows):
        return rows
    order = np.argsort(_mixed(reader.index.ids[rows], choice.seed), kind="stable")
    return np.sort(rows[order[:count]])


def _mixed(ids: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """The splitmix64 hash of ids and seed: what is taken does not depend on the order of the samples."""
    value: NDArray[np.uint64] = ids ^ (np.uint64(seed * 0x9E3779B97F4A7C15 % (1 << 64)))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    value ^= value >> np.uint64(31)
    return value


def _once(readers: Sequence[CacheReader]) -> tuple[list[NDArray[np.int64]], int]:
    """Rows of each cache that no earlier one holds, and how many of the others have other checksums."""
    wanted, unlike = [], 0
    ids = np.empty(0, np.uint64)
    crcs = np.empty(0, np.uint32)
    for reader in readers:
        rows = np.arange(len(reader.index))
        mine, checks = reader.index.ids, reader.index.locate(rows).crcs
        place = np.minimum(np.searchsorted(ids, mine), max(len(ids) - 1, 0))
        known = ids[place] == mine if len(ids) else np.zeros(len(mine), np.bool_)
        unlike += int(np.count_nonzero(crcs[place[known]] != checks[known]))
        wanted.append(rows[~known])
        ids, crcs = np.concatenate([ids, mine[~known]]), np.concatenate([crcs, checks[~known]])
        order = np.argsort(ids)
        ids, crcs = ids[order], crcs[order]
    return wanted, unlike


def _merged_manifest(manifests: Sequence[Manifest], samples: int) -> Manifest:
    first = manifests[0]
    corpora = dict.fromkeys(digest for manifest in manifests for digest in manifest.corpora)
    corpora.pop(first.identity.corpus_digest)
    dropped: dict[str, int] = {}
    for manifest in {m.corpora: m for m in reversed(manifests)}.values():
        for reason, count in manifest.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    bad = {sample.id: sample for manifest in reversed(manifests) for sample in manifest.bad}
    return replace(
        _fresh(first),
        expected_samples=samples,
        appended=tuple(corpora),
        dropped=dropped,
        bad=tuple(bad[key] for key in sorted(bad)),
    )


def _fresh(manifest: Manifest, **changes: Any) -> Manifest:
    """A manifest of a cache that is still to be made from this one's."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return replace(manifest, complete=False, content_digest=None, created=now, files={}, **changes)
