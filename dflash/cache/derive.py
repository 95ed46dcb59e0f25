"""Making a cache from others without the target: what `merge`, `subset`, `rebucket` and `drop-taps` share.

1. What is wanted is planned as pieces, one for each shard of the new cache: a shard of a source that is kept
   whole is linked, other samples are copied in the bytes that they are stored in. The plan is a pure function
   of sources and settings.
2. The new cache gets a manifest, and the parts that training needs.
3. Pieces are made one by one, each committed by an index fragment of its own; every sample that is copied is
   checked against its checksum. A rerun leaves out what is committed, so a killed one goes on where it was.
4. The cache is marked complete. The sources are only read.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.codec import StoredCodec
from dflash.cache.fragment import MAX_FRAGMENT_ROWS, IndexRow, encode_fragment, fragment_path
from dflash.cache.index import fragment_paths, load_index
from dflash.cache.info import format_bytes
from dflash.cache.manifest import REPAIR, create_cache
from dflash.cache.parts import check_part, part_names, record_parts
from dflash.cache.reader import CacheReader
from dflash.cache.shard import ShardLayout, ShardStream, shard_digest, shard_name, unit_of
from dflash.cache.verify import shard_problem
from dflash.cache.writer import SHARD_BYTES, commit_shard, finalize, sweep_uncommitted
from dflash.errors import CacheCorrupt, CacheError, CacheMismatch
from dflash.files import TMP_SUFFIX, digest_json, publish, publish_bytes
from dflash.progress import Progress
from dflash.provenance import RECORD_NAME, write_run_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from dflash.cache.manifest import Manifest
    from dflash.cache.reader import Sample

BATCH_BYTES = 32 << 20
"""Stored bytes of the samples that are in memory at once, but for a longer sample."""


@dataclass(frozen=True, eq=False)
class Source:
    """Samples of one cache."""

    reader: CacheReader
    rows: NDArray[np.int64]
    """Rows of its index that are wanted, ascending."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One shard of the new cache."""

    unit: str
    """Name of the fragment that commits it, and of the shard where it is written anew."""
    bucket: int
    """0-based, in the new cache."""
    source: int
    rows: NDArray[np.int64]
    """Rows of the source's index, in the order of the shard."""
    linked: int | None
    """Number of the source's shard that is taken as it is."""
    nbytes: int


@dataclass(frozen=True)
class Recipe:
    """What is made."""

    name: str
    """The tool, e.g. `subset`."""
    arguments: str
    """The rest of its command line, for people."""
    settings: dict[str, Any]
    """What decides the result besides the sources, JSON-ready."""
    manifest: Manifest
    """Of the new cache; its `expected_samples` are all samples of the sources that are wanted."""
    change: Callable[[Sample], Sample] | None = None
    """Applied to each sample, whose `hidden_states` are its extent; without one that is copied.

    It raises ValueError for what is no extent of the source's codec.
    """
    shard_bytes: int = SHARD_BYTES
    notes: tuple[str, ...] = ()
    """What else the user should know."""


@dataclass(frozen=True)
class Derived:
    """What was made."""

    cache: Path
    samples: int
    tokens: int
    linked: int
    """Shards taken as they are."""
    written: int
    """Shards written anew."""
    written_bytes: int
    """Bytes of the latter."""
    resumed: int
    """Shards that an earlier run had made."""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready value."""
        return vars(self) | {"cache": str(self.cache), "notes": list(self.notes)}

    def text(self) -> str:
        """What a terminal shows."""
        made = f"{self.linked:,} shards linked, {self.written:,} written ({format_bytes(self.written_bytes)})"
        before = f", {self.resumed:,} of them by an earlier run" if self.resumed else ""
        head = f"{self.cache}: {self.samples:,} samples, {self.tokens:,} tokens; {made}{before}"
        return "\n".join([head, *self.notes])


def derive(out: Path, sources: Sequence[Source], recipe: Recipe) -> Derived:
    """Make a cache from others, or finish one that an earlier run has begun.

    Args:
        out: Folder of the new cache.
        sources: Where its samples are; no id is wanted twice.
        recipe: What is made of them.

    Raises:
        CacheError: nothing is wanted, or `out` is a source, holds something else or cannot be written.
        CacheCorrupt: a sample or part of a source is damaged.
    """
    folders = [source.reader.cache for source in sources]
    if not sum(len(source.rows) for source in sources):
        raise CacheError(f"{folders[0]}: no sample is left with these settings; nothing was made")
    if out.resolve() in [folder.resolve() for folder in folders]:
        raise CacheError(f"{out} is a source itself; --out must be another folder")
    manifest = replace(recipe.manifest, derived=f"{recipe.name} {recipe.arguments}")
    pieces = plan(sources, recipe, _tag(sources, recipe))
    try:
        done = _open(out, manifest, pieces)
        if not done.complete:
            settings = {"arguments": recipe.arguments} | recipe.settings
            take_parts(sources[0].reader, out, done, recipe.name, settings)
        resumed = _make(out, sources, recipe, done, pieces)
        index = load_index(out, finalize(out))
    except OSError as error:
        raise CacheError(f"cannot write {out}: {error}; run the same command again to go on") from error
    finally:
        for source in sources:
            source.reader.close()
    copied = {piece.unit for piece in pieces if piece.linked is None}
    return Derived(
        cache=out,
        samples=len(index),
        tokens=int(index.lengths.sum(dtype=np.int64)),
        linked=len(pieces) - len(copied),
        written=len(copied),
        written_bytes=sum(layout.file_size for layout in index.layouts if unit_of(layout.name) in copied),
        resumed=resumed,
        notes=recipe.notes,
    )


def plan(sources: Sequence[Source], recipe: Recipe, tag: str) -> list[Piece]:
    """The shards of the new cache, source by source: first those that are linked, then others by bucket."""
    pieces: list[Piece] = []
    names: set[str] = set()
    for number, source in enumerate(sources):
        whole = _whole_shards(source, recipe, names)
        names |= {source.reader.index.layouts[shard].name for shard in whole}
        for bucket, linked, rows, nbytes in _parts(source, recipe, whole):
            pieces.append(Piece(f"{tag}-{len(pieces):06d}", bucket, number, rows, linked, nbytes))
    return pieces


def _whole_shards(source: Source, recipe: Recipe, taken: set[str]) -> list[int]:
    """Numbers of the shards that the new cache can have as they are."""
    index = source.reader.index
    if recipe.change is not None or source.reader.manifest.digest() != recipe.manifest.digest():
        return []
    kept = np.bincount(index.locate(source.rows).shards, minlength=len(index.layouts))
    return [
        number
        for number, layout in enumerate(index.layouts)
        if kept[number] == layout.samples and layout.name not in taken
    ]


def _parts(
    source: Source, recipe: Recipe, whole: Sequence[int]
) -> Iterator[tuple[int, int | None, NDArray[np.int64], int]]:
    """Bucket, number of the linked shard if any, rows and bytes of each shard that comes from a source."""
    index, edges = source.reader.index, np.array(recipe.manifest.identity.bucket_edges)
    places = index.locate(source.rows)
    order = np.lexsort((places.shard_rows, places.shards))
    rows, shards, sizes = source.rows[order], places.shards[order], places.nbytes[order]
    buckets = np.searchsorted(edges, index.lengths[rows])
    starts = np.searchsorted(shards, whole, side="left").tolist()
    ends = np.searchsorted(shards, whole, side="right").tolist()
    for number, start, end in zip(whole, starts, ends, strict=True):
        yield int(buckets[start]), number, rows[start:end], int(sizes[start:end].sum())
    copied = ~np.isin(shards, whole)
    for bucket in range(len(edges)):
        mine = copied & (buckets == bucket)
        for cut in _cuts(sizes[mine], recipe.shard_bytes):
            yield bucket, None, rows[mine][cut], int(sizes[mine][cut].sum())


def _cuts(sizes: NDArray[np.int64], limit: int) -> Iterator[slice]:
    """Runs of samples of about `limit` bytes together."""
    start, total = 0, 0
    for place, size in enumerate(sizes.tolist()):
        total += size
        if total >= limit or place + 1 - start >= MAX_FRAGMENT_ROWS or place + 1 == len(sizes):
            yield slice(start, place + 1)
            start, total = place + 1, 0


def _tag(sources: Sequence[Source], recipe: Recipe) -> str:
    """Begins the names of the new cache's units: another one for other sources or settings."""
    value = {
        "sources": [source.reader.manifest.content_digest for source in sources],
        "identity": recipe.manifest.digest(),
        "settings": recipe.settings,
        "shard_bytes": recipe.shard_bytes,
    }
    return f"{recipe.name}-{digest_json(value)[:12]}"


def _open(out: Path, manifest: Manifest, pieces: Sequence[Piece]) -> Manifest:
    """The new cache's manifest, or that of one that the same command has begun."""
    there = create_cache(out, manifest)
    ours = {piece.unit for piece in pieces}
    foreign = [path.name for path in fragment_paths(out) if path.stem not in ours]
    if foreign or there.expected_samples != manifest.expected_samples:
        made = f"`dflash cache {there.derived}`" if there.derived else "`dflash extract`"
        raise CacheMismatch(
            f"{out} holds another cache, made by {made} of these or other samples; use another folder"
        )
    if not there.complete:
        sweep_uncommitted(out)
    return there


def take_parts(
    reader: CacheReader, out: Path, manifest: Manifest, command: str, settings: dict[str, Any]
) -> None:
    """Link or copy head, tokenizer and configuration, check them, and record them with this run."""
    for name in part_names(reader.cache):
        if name != RECORD_NAME:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            if not (out / name).exists():
                publish(out / name, lambda tmp, name=name: link_or_copy(reader.cache / name, tmp))  # type: ignore[misc]
            check_part(out, reader.manifest, name)
    write_run_record(out, f"cache {command}", settings)
    record_parts(out, manifest)


def _make(
    out: Path, sources: Sequence[Source], recipe: Recipe, manifest: Manifest, pieces: Sequence[Piece]
) -> int:
    """Make the pieces that are not committed yet; returns how many were."""
    committed = {path.stem for path in fragment_paths(out)}
    left = [piece for piece in pieces if piece.unit not in committed]
    total, before = (sum(piece.nbytes for piece in some) for some in (pieces, left))
    done = total - before
    with Progress(recipe.name, total >> 20, "MiB", done=done >> 20) as progress:
        for piece in left:
            source = sources[piece.source]
            if piece.linked is None:
                _write_piece(out, source.reader, recipe, manifest, piece)
            else:
                _link_piece(out, source.reader, piece)
            done += piece.nbytes
            progress.advance((done >> 20) - progress.done)
    return len(pieces) - len(left)


def _link_piece(out: Path, reader: CacheReader, piece: Piece) -> None:
    """Commit a source's shard, linked where the file system can, else copied and checked."""
    index, number = reader.index, piece.linked or 0
    layout, digest = index.layouts[number], index.digests[number]
    reader.fetch([number])
    if problem := shard_problem(reader.cache, layout, ""):
        raise CacheCorrupt(f"{reader.cache / layout.name}: {problem}; {REPAIR}")
    path = out / layout.name
    path.parent.mkdir(parents=True, exist_ok=True)
    fragment_path(out, piece.unit).parent.mkdir(exist_ok=True)

    def take(tmp: Path) -> None:
        if not link_or_copy(reader.cache / layout.name, tmp) and digest:
            with tmp.open("rb", buffering=0) as file:
                if shard_digest(file) != digest:
                    raise CacheCorrupt(
                        f"{reader.cache / layout.name}: its bytes have changed, they do not fit its digest; "
                        f"{REPAIR}"
                    )

    publish(path, take, replace=False)
    places = index.locate(piece.rows)
    columns: dict[str, Any] = {
        "id": index.ids[piece.rows],
        "bucket": np.full(len(piece.rows), layout.edge, np.int32),
        "shard": np.zeros(len(piece.rows), np.int32),
        "row": places.shard_rows.astype(np.int32),
        "length": index.lengths[piece.rows],
        "supervised": index.supervised[piece.rows],
        "offset": places.offsets,
        "nbytes": places.nbytes,
        "crc32c": places.crcs,
    }
    data = encode_fragment(
        [layout.name], columns, piece.unit, reader.manifest.digest(), [digest] if digest else ()
    )
    publish_bytes(fragment_path(out, piece.unit), data, replace=False)


def _write_piece(out: Path, reader: CacheReader, recipe: Recipe, manifest: Manifest, piece: Piece) -> None:
    """Write samples into a new shard and commit it."""
    edge = manifest.identity.bucket_edges[piece.bucket]
    name = shard_name(edge, piece.unit)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    fragment_path(out, piece.unit).parent.mkdir(exist_ok=True)
    stream = ShardStream(out / f"{name}.{os.getpid()}.part{TMP_SUFFIX}", StoredCodec())
    rows: list[IndexRow] = []
    try:
        for sample in _read_in_batches(reader, piece.rows):
            offset, nbytes, crc = stream.append(_changed(reader, recipe, sample))
            supervised = int(sample.loss_mask.sum())
            rows.append(IndexRow(sample.id, len(sample.input_ids), supervised, offset, nbytes, crc))
        layout = ShardLayout(name, manifest, edge, stream.samples, stream.tokens, stream.coded_bytes)
        commit_shard(out, stream, layout, rows, piece.unit)
    except BaseException:
        stream.discard()
        raise


def _changed(reader: CacheReader, recipe: Recipe, sample: Sample) -> Sample:
    if recipe.change is None:
        return sample
    try:
        return recipe.change(sample)
    except ValueError as error:
        raise CacheCorrupt(
            f"{reader.cache}: sample {sample.id} fits its checksum, but not its codec: {error}"
        ) from error


def _read_in_batches(reader: CacheReader, rows: NDArray[np.int64]) -> Iterator[Sample]:
    """Stored samples in this order, in bounded memory."""
    batches = np.cumsum(reader.index.locate(rows).nbytes) // BATCH_BYTES
    for batch in np.split(rows, np.flatnonzero(np.diff(batches)) + 1):
        yield from reader.read_stored(batch)


def link_or_copy(source: Path, target: Path) -> bool:
    """Make `target` the same file as `source`; a copy where that cannot be. True where it is the same."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True
