"""Disk space: what a corpus will take, and what is free where it shall go."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash.errors import ConfigError

TOKEN_BYTES = 5
"""Beside the states: a token id and a bit of the mask in a byte of its own."""
SAMPLE_BYTES = 8 + 48
"""Offset in the shard, and row of the index."""


def bytes_needed(lengths: Sequence[int] | np.ndarray, bytes_per_token: int) -> int:
    """Bytes that samples take in a cache.

    Args:
        lengths: Tokens of each sample.
        bytes_per_token: Size of one token's hidden states `[K, H]`.
    """
    return (
        int(np.sum(lengths, dtype=np.int64)) * (bytes_per_token + TOKEN_BYTES) + len(lengths) * SAMPLE_BYTES
    )


def free_space(path: Path) -> int:
    """Free bytes where this path is, or would be once it is created."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def check_space(
    out: Path, lengths: Sequence[int] | np.ndarray, bytes_per_token: int, *, force: bool = False
) -> None:
    """Refuse to start what cannot fit.

    Raises:
        ConfigError: samples of these lengths need more than is free, and `force` is false.
    """
    needed, free = bytes_needed(lengths, bytes_per_token), free_space(out)
    if needed > free and not force:
        raise ConfigError(
            f"{out}: {needed / 1e9:,.1f} GB are still to be written, {free / 1e9:,.1f} GB are free; "
            "choose another disk, fewer taps or less data, or start anyway with --force"
        )
