"""`speeds.json`: how fast extraction went through each length bucket, for a model of a live target.

It is a measurement beside the cache, no part of it: nothing needs it, and it may be removed. A damaged one
counts as none, and `dflash cache verify` tells of it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dflash.cache.sealed import load_sealed, save_sealed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SPEEDS_NAME = "speeds.json"


def save_speeds(cache: Path, speeds: Mapping[int, float]) -> None:
    """Record the tokens a second of some buckets, by edge; other buckets keep what earlier runs recorded."""
    if speeds:
        known = _read(cache) | dict(speeds)
        save_sealed(cache / SPEEDS_NAME, {str(edge): round(speed, 3) for edge, speed in known.items()})


def load_speeds(cache: Path, edges: Sequence[int]) -> list[float] | None:
    """Tokens a second of each bucket, `[buckets]`, or None where nothing usable is recorded.

    A bucket without a record gets the speed of the slowest.
    """
    speeds = _read(cache)
    return [speeds.get(edge, min(speeds.values())) for edge in edges] if speeds else None


def check_speeds(cache: Path) -> None:
    """Refuse a damaged record; none at all is fine.

    Raises:
        ValueError: says what is wrong with it in a few words.
        OSError: it cannot be read.
    """
    with suppress(FileNotFoundError):
        _load(cache)


def _read(cache: Path) -> dict[int, float]:
    try:
        return _load(cache)
    except (OSError, ValueError):
        return {}


def _load(cache: Path) -> dict[int, float]:
    try:
        speeds = {int(edge): float(speed) for edge, speed in load_sealed(cache / SPEEDS_NAME).items()}
    except TypeError as error:
        raise ValueError("not speeds by bucket") from error
    if not all(speed > 0 for speed in speeds.values()):
        raise ValueError("not speeds by bucket")
    return speeds
