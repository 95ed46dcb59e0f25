"""What a cache holds, from its manifest, its index and file sizes alone; no shard is read."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.codec_error import CodecError
from dflash.cache.index import load_index, shards_on_disk
from dflash.cache.manifest import load_manifest
from dflash.cache.mirror import mirror_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.cache.index import CacheIndex
    from dflash.cache.manifest import Identity

_BAR = 30


def cache_info(cache: Path) -> dict[str, Any]:
    """Describe a cache, finished or not, as a JSON-ready value; sizes in bytes.

    Raises:
        CacheError: `cache` is not a cache, or its manifest or index is damaged.
    """
    manifest = load_manifest(cache)
    index = load_index(cache, manifest)
    tokens = int(index.lengths.sum(dtype=np.int64))
    shard_bytes = sum(layout.file_size for layout in index.layouts)
    mirror = mirror_of(cache)
    shards = shards_on_disk(cache) if mirror is None else mirror.shard_sizes()
    there = set(shards)
    return {
        "cache": str(cache) if mirror is None else mirror.url,
        "format_version": manifest.format_version,
        "identity": manifest.identity.plain(),
        "digest": manifest.digest(),
        "created": manifest.created,
        "derived": manifest.derived,
        "complete": manifest.complete,
        "samples": len(index),
        "expected_samples": manifest.expected_samples,
        "dropped": dict(manifest.dropped),
        "tokens": tokens,
        "supervised_tokens": int(index.supervised.sum(dtype=np.int64)),
        "shards": len(index.layouts),
        "shard_bytes": shard_bytes,
        "total_bytes": _folder_bytes(cache) if mirror is None else sum(mirror.store.sizes().values()),
        "bytes_per_token": shard_bytes / tokens if tokens else None,
        "missing_shards": [layout.name for layout in index.layouts if layout.name not in there],
        "codec_error": None if manifest.codec_error is None else asdict(manifest.codec_error),
        "buckets": _buckets(manifest.identity, index),
    }


def format_info(info: dict[str, Any]) -> str:
    """The value of `cache_info` as text for a terminal, with a histogram of tokens over buckets."""
    identity = info["identity"]
    layers = len(identity["taps"])
    revision = f" at {identity['revision']}" if identity["revision"] else ""
    command = f"`dflash cache {info['derived']}`" if info["derived"] else "the same `dflash extract`"
    state = "complete" if info["complete"] else f"INCOMPLETE: run {command} again to finish it"
    tokens, per_token = info["tokens"], info["bytes_per_token"]
    share = info["supervised_tokens"] / tokens if tokens else 0.0
    lines = [
        f"{info['cache']}: cache format {info['format_version']}, {state}",
        f"  target      {identity['target']}{revision}",
        f"  taps        {', '.join(map(str, identity['taps']))} of {identity['num_target_layers']} layers",
        f"  states      {layers} x {identity['hidden_size']} {identity['dtype']}, {identity['codec']}",
        f"  samples     {info['samples']:,} of {info['expected_samples']:,}",
        f"  tokens      {tokens:,}, supervised {info['supervised_tokens']:,} ({share:.0%})",
        f"  size        {format_bytes(info['total_bytes'])} in {info['shards']:,} shards"
        + (f", {per_token:,.0f} bytes/token" if per_token else ""),
        f"  identity    {info['digest'][:16]}, created {info['created']}",
    ]
    if info["derived"]:
        lines.append(f"  made by     {command}")
    if info["codec_error"]:
        error = CodecError(**info["codec_error"])
        lines.append(f"  codec       {error.text()} ({error.tokens:,} tokens)")
    lines += [f"  dropped     {count:,} {reason}" for reason, count in sorted(info["dropped"].items())]
    if missing := info["missing_shards"]:
        lines.append(f"  MISSING     {len(missing):,} shards, e.g. {missing[0]}: run `dflash cache verify`")
    return "\n".join([*lines, *_histogram(info["buckets"])])


def format_bytes(count: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def _buckets(identity: Identity, index: CacheIndex) -> list[dict[str, int]]:
    edges = identity.bucket_edges
    samples = np.bincount(index.buckets, minlength=len(edges)).tolist()
    # Float weights are exact up to 2**53 tokens.
    tokens = np.bincount(index.buckets, weights=index.lengths, minlength=len(edges)).astype(np.int64).tolist()
    return [
        {"edge": edge, "samples": count, "tokens": total}
        for edge, count, total in zip(edges, samples, tokens, strict=True)
    ]


def _histogram(buckets: list[dict[str, int]]) -> list[str]:
    total = sum(bucket["tokens"] for bucket in buckets) or 1
    largest = max(bucket["tokens"] for bucket in buckets) or 1
    lines = [f"  {'bucket':>8} {'samples':>12} {'tokens':>16} {'share':>6}"]
    for bucket in buckets:
        bar = "█" * round(_BAR * bucket["tokens"] / largest)
        share = f"{bucket['tokens'] / total:.1%}"
        row = f"  {bucket['edge']:>8,} {bucket['samples']:>12,} {bucket['tokens']:>16,} {share:>6} {bar}"
        lines.append(row.rstrip())
    return lines


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a writer has just renamed it
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118 - ten times faster
    return total
