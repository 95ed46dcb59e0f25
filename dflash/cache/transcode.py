"""`dflash cache transcode`: the same samples in another codec, without the target.

1. The new cache's manifest is written with the codec's scales frozen in it, or the one that an earlier run
   has begun is taken up.
2. Threads take the shards of the source one by one. A shard is read, decoded and encoded in small batches,
   and committed whole; those that are committed already are left out. So a killed run goes on where it was.
3. When all samples are there, the cache is marked complete. The source is only read.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash.cache.calibration import calibration_rows, with_codec
from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.derive import take_parts
from dflash.cache.index import fragment_paths, load_index
from dflash.cache.manifest import MANIFEST_NAME, Manifest, create_cache, load_manifest
from dflash.cache.reader import CacheReader
from dflash.cache.scales import CALIBRATION_LENGTH
from dflash.cache.writer import CacheWriter, finalize, sweep_uncommitted
from dflash.errors import CacheError, CacheMismatch
from dflash.progress import Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH_BYTES = 32 << 20
"""Decoded states that a thread holds at once, but for a longer sample."""
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Transcoded:
    """What was done, and what the new cache holds."""

    source: Path
    cache: Path
    manifest: Manifest
    samples: int
    tokens: int
    new_tokens: int
    """Transcoded by this run."""
    source_bytes: int
    """Of all shards, as `bytes`."""
    bytes: int

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        error = self.manifest.codec_error
        return {
            "source": str(self.source),
            "cache": str(self.cache),
            "codec": self.manifest.identity.codec,
            "samples": self.samples,
            "tokens": self.tokens,
            "new_tokens": self.new_tokens,
            "source_bytes": self.source_bytes,
            "bytes": self.bytes,
            "ratio": self.bytes / self.source_bytes,
            "codec_error": error and vars(error),
        }

    def text(self) -> str:
        """For the terminal."""
        codec, error = self.manifest.identity.codec, self.manifest.codec_error
        text = (
            f"{self.cache}: {self.samples:,} samples, {self.tokens:,} tokens in {codec}, "
            f"{self.bytes / 1e9:,.2f} GB, {self.bytes / self.source_bytes:.3f} of {self.source}"
        )
        return text if error is None else f"{text}\n{error.text()}"


def transcode(source: Path, out: Path, codec: str, jobs: int | None = None) -> Transcoded:
    """Write the samples of a finished cache into another one, or finish one that was begun.

    Args:
        source: A cache; it is only read.
        out: Folder of the new cache.
        codec: Its codec.
        jobs: Threads; one for each core by default.

    Raises:
        CacheError: the source's states cannot be brought into this codec, or `out` holds something else.
        CacheIncomplete: extraction of the source has not finished.
        CacheCorrupt: the source is damaged.
    """
    if out.resolve() == source.resolve():
        raise CacheError(f"{out} is the source itself; --out must be another folder")
    with CacheReader(source) as reader:
        _check_codecs(source, reader.manifest, codec)
        arguments = f"{source} --codec {codec} --out {out}"
        fresh = replace(_manifest(reader, out, codec), derived=f"transcode {arguments}", files={})
        manifest = create_cache(out, fresh)
        foreign = [path.name for path in fragment_paths(out) if not path.name.startswith(_prefix(reader))]
        if foreign or manifest.expected_samples != reader.manifest.expected_samples:
            raise CacheMismatch(
                f"{out} holds another cache, made of these or other samples; use another folder"
            )
        if not manifest.complete:
            sweep_uncommitted(out)
            take_parts(reader, out, manifest, "transcode", {"codec": codec, "arguments": arguments})
        new_tokens = _transcode_shards(reader, out, manifest, jobs or os.cpu_count() or 1)
        done = finalize(out)
        layouts, before = load_index(out, done).layouts, reader.index.layouts
        return Transcoded(
            source,
            out,
            done,
            samples=len(reader.index),
            tokens=int(reader.index.lengths.sum(dtype=np.int64)),
            new_tokens=new_tokens,
            source_bytes=sum(layout.file_size for layout in before),
            bytes=sum(layout.file_size for layout in layouts),
        )


def _prefix(reader: CacheReader) -> str:
    """Begins the names of the new cache's units: another one for other samples."""
    return f"transcode-{(reader.manifest.content_digest or '')[:12]}-"


def _check_codecs(source: Path, manifest: Manifest, codec: str) -> None:
    old = manifest.identity.codec
    if codec not in CODECS:
        raise CacheError(f"codec {codec!r} is not one of {', '.join(CODECS)}")
    if codec == old:
        raise CacheError(f"{source} is stored in {codec} already; copy the folder instead")
    if old in LOSSY_CODECS:
        raise CacheError(
            f"{source} is stored in {old}, and what that has lost does not come back: {codec} would pass for "
            "exact states, or lose more; start from a raw or lossless cache, or extract again"
        )


def _manifest(reader: CacheReader, out: Path, codec: str) -> Manifest:
    """The new cache's manifest; scales that an earlier run has frozen stay."""
    fresh = replace(
        reader.manifest,
        complete=False,
        content_digest=None,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if (out / MANIFEST_NAME).is_file():
        there = load_manifest(out)
        if there.identity.codec == codec:
            identity = replace(fresh.identity, codec=codec, codec_digest=there.identity.codec_digest)
            return replace(fresh, identity=identity)
    return with_codec(fresh, codec, _first_states(reader) if codec in LOSSY_CODECS else None)


def _first_states(reader: CacheReader) -> torch.Tensor:
    rows = calibration_rows(reader.index.ids, reader.index.lengths)
    parts = [reader.read([row])[0].hidden_states[:CALIBRATION_LENGTH].clone() for row in rows.tolist()]
    return torch.cat(parts)


def _transcode_shards(reader: CacheReader, out: Path, manifest: Manifest, jobs: int) -> int:
    """Transcode what is not committed yet; returns its tokens."""
    index = reader.index
    left = np.flatnonzero(~np.isin(index.ids, load_index(out, manifest).ids))
    extents = index.locate(left)
    order = np.lexsort((extents.offsets, extents.shards))
    left, shards = left[order], extents.shards[order]
    parts = np.split(left, np.flatnonzero(np.diff(shards)) + 1) if len(left) else []
    tokens = int(index.lengths[left].sum(dtype=np.int64))
    pool = ThreadPoolExecutor(jobs, "transcode", initializer=lambda: torch.set_num_threads(1))
    with Progress("transcode", tokens) as progress, pool:
        try:
            futures = {pool.submit(_transcode_shard, reader, out, manifest, rows): rows for rows in parts}
            for future in as_completed(futures):
                future.result()
                progress.advance(int(index.lengths[futures[future]].sum(dtype=np.int64)))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return tokens


def _transcode_shard(reader: CacheReader, out: Path, manifest: Manifest, rows: NDArray[np.int64]) -> None:
    """Transcode the samples of one shard, in the order of the file, into one shard."""
    number = int(reader.index.locate(rows[:1]).shards[0])
    sizes = reader.index.lengths[rows].astype(np.int64) * manifest.identity.bytes_per_token
    batches = np.cumsum(sizes) // BATCH_BYTES
    with CacheWriter(out, manifest, f"{_prefix(reader)}{number:06d}", _NO_LIMIT) as writer:
        for batch in np.split(rows, np.flatnonzero(np.diff(batches)) + 1):
            for sample in reader.read(batch):
                writer.write(sample)
