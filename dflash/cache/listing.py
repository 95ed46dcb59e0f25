"""`ls`, `show`, `diff`: looking at samples."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.index import load_index
from dflash.cache.manifest import load_manifest
from dflash.cache.parts import check_tokenizer
from dflash.cache.reader import CacheReader
from dflash.cache.where import select
from dflash.errors import CacheCorrupt, CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SORTS = ("id", "length", "bucket", "supervised")
_SUPERVISED, _MASKED, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_MAX_NAMES = 4
"""Ids that the text of a difference names."""


def list_samples(
    cache: Path, *, where: str | None = None, sort: str = "bucket", limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Samples of a cache, finished or not, one row each.

    Args:
        cache: The cache's folder.
        where: A condition (`dflash.cache.where`).
        sort: One of `SORTS`; ties by length, then id.
        limit: Rows at most.

    Raises:
        ConfigError: the condition is malformed.
        CacheError: `cache` is not a cache, or its index is damaged.
    """
    manifest = load_manifest(cache)
    index, edges = load_index(cache, manifest), manifest.identity.bucket_edges
    rows = select(index, edges, where)
    keys: dict[str, NDArray[Any]] = {
        "id": index.ids,
        "length": index.lengths,
        "bucket": index.buckets,
        "supervised": index.supervised,
    }
    rows = rows[np.lexsort((index.ids[rows], index.lengths[rows], keys[sort][rows]))][:limit]
    for part in np.array_split(rows, max(len(rows) // 100_000, 1)):
        places = index.locate(part)
        for row, shard, shard_row in zip(
            part, places.shards.tolist(), places.shard_rows.tolist(), strict=True
        ):
            yield {
                "id": int(index.ids[row]),
                "bucket": edges[index.buckets[row]],
                "length": int(index.lengths[row]),
                "supervised": int(index.supervised[row]),
                "shard": index.layouts[shard].name,
                "row": shard_row,
            }


LIST_HEAD = f"{'id':>20} {'bucket':>8} {'length':>8} {'supervised':>10}  shard:row"


def list_line(sample: dict[str, Any]) -> str:
    """A row of the table."""
    counts = f"{sample['bucket']:>8,} {sample['length']:>8,} {sample['supervised']:>10,}"
    return f"{sample['id']:>20} {counts}  {sample['shard']}:{sample['row']}"


@dataclass(frozen=True, eq=False)
class Shown:
    """A sample as `show` tells it; T tokens, K tapped layers."""

    id: int
    taps: tuple[int, ...]
    pieces: list[tuple[str, bool]]
    """Text of runs of tokens, and whether they are supervised."""
    input_ids: list[int]
    """[T]."""
    loss_mask: list[int]
    """[T]."""
    norms: NDArray[np.float32]
    """[T, K] Euclidean norms over the hidden size."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready value."""
        return {
            "id": self.id,
            "length": len(self.input_ids),
            "text": [{"text": text, "supervised": supervised} for text, supervised in self.pieces],
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
            "norms": {str(tap): self.norms[:, k].tolist() for k, tap in enumerate(self.taps)},
        }

    def text(self, *, colour: bool) -> str:
        """What a terminal shows: supervised text in green, or in brackets where there is no colour."""
        marks = {True: (_SUPERVISED, _RESET), False: (_MASKED, _RESET)}
        if not colour:
            marks = {True: ("[[", "]]"), False: ("", "")}
        body = "".join(marks[kind][0] + _harmless(text) + marks[kind][1] for text, kind in self.pieces)
        head = f"sample {self.id}: {len(self.input_ids):,} tokens, {sum(self.loss_mask):,} supervised"
        return "\n".join(
            [head, "", body, "", f"{'layer':>6} {'median':>10} {'mean':>10} {'largest':>10}  at"]
            + [
                f"{tap:>6} {np.median(norms):>10.1f} {norms.mean():>10.1f} {norms.max():>10.1f}  "
                f"token {int(norms.argmax())}"
                for tap, norms in zip(self.taps, self.norms.T, strict=True)
            ]
        )


def show_sample(cache: Path, sample_id: int) -> Shown:
    """One sample, its text by the cache's own tokenizer.

    Raises:
        CacheError: the cache has no such sample.
        CacheCorrupt: the sample or the tokenizer is damaged.
    """
    with CacheReader(cache, allow_incomplete=True) as reader:
        ids = reader.index.ids
        row = int(np.searchsorted(ids, np.uint64(sample_id))) if 0 <= sample_id < 1 << 64 else len(ids)
        if row == len(ids) or int(ids[row]) != sample_id:
            raise CacheError(f"{cache} holds no sample {sample_id}; `dflash cache ls {cache}` lists them")
        (sample,) = reader.read([row])
        tokenizer = load_tokenizer(reader)
    mask = sample.loss_mask.astype(np.bool_)
    bounds = np.flatnonzero(np.diff(mask)) + 1
    runs = zip(np.split(sample.input_ids, bounds), np.split(mask, bounds), strict=True)
    return Shown(
        id=sample_id,
        taps=reader.manifest.identity.taps,
        pieces=[(tokenizer.decode(ids.tolist()), bool(kind[0])) for ids, kind in runs],
        input_ids=sample.input_ids.tolist(),
        loss_mask=sample.loss_mask.tolist(),
        norms=sample.hidden_states.float().norm(dim=-1).numpy(),
    )


def load_tokenizer(reader: CacheReader) -> Any:
    """The cache's own tokenizer, a `PreTrainedTokenizer`.

    Raises:
        CacheError: the cache was made without one.
        CacheCorrupt: it is damaged.
    """
    from transformers import AutoTokenizer

    folder = check_tokenizer(reader.cache, reader.manifest)
    if not folder.is_dir():
        raise CacheError(
            f"{folder} is not there: this cache was made without a tokenizer, so no text can be shown"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, LookupError, ImportError) as error:
        raise CacheCorrupt(f"{folder}: not a tokenizer ({str(error).splitlines()[0]})") from error


def _harmless(text: str) -> str:
    """Text without control characters, which could do things to a terminal."""
    return "".join(
        c if c in "\n\t" or not unicodedata.category(c).startswith("C") else f"\\u{ord(c):04x}" for c in text
    )


@dataclass(frozen=True)
class Difference:
    """What `diff` found; this is the first cache, other the second."""

    identity: list[str]
    """Fields that differ, with both values."""
    only_here: list[int]
    """Ids."""
    only_there: list[int]
    other_bytes: list[int]
    """Ids that both hold with different checksums."""
    both: int
    """Samples that both hold."""

    @property
    def same(self) -> bool:
        """Whether both hold the same samples, byte for byte, under the same identity."""
        return not (self.identity or self.only_here or self.only_there or self.other_bytes)

    def text(self) -> str:
        """What a terminal shows."""
        if self.same:
            return f"the same: {self.both:,} samples, byte for byte"
        lines = [f"identity: {line}" for line in self.identity] + [f"in both: {self.both:,} samples"]
        groups = {
            "only in the first": self.only_here,
            "only in the second": self.only_there,
            "with other bytes": self.other_bytes,
        }
        for name, ids in groups.items():
            if ids:
                more = ", ..." if len(ids) > _MAX_NAMES else ""
                lines.append(f"{name}: {len(ids):,} samples: {', '.join(map(str, ids[:_MAX_NAMES]))}{more}")
        return "\n".join(lines)


def diff(one: Path, other: Path) -> Difference:
    """Compare two caches by their manifests and indexes; no shard is read.

    Raises:
        CacheError: one is not a cache, or its manifest or index is damaged.
    """
    manifests = load_manifest(one), load_manifest(other)
    first, second = (load_index(path, m) for path, m in zip((one, other), manifests, strict=True))
    _, here, there = np.intersect1d(first.ids, second.ids, assume_unique=True, return_indices=True)
    unlike = first.locate(here).crcs != second.locate(there).crcs
    return Difference(
        identity=manifests[0].identity.differences(manifests[1].identity),
        only_here=np.setdiff1d(first.ids, second.ids, assume_unique=True).tolist(),
        only_there=np.setdiff1d(second.ids, first.ids, assume_unique=True).tolist(),
        other_bytes=first.ids[here[unlike]].tolist(),
        both=len(here),
    )
