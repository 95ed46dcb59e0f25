"""`speeds.json`: how fast extraction went through each length bucket, for a model of a live target.

It is a measurement beside the cache, no part of it: nothing needs it, and it may be removed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dflash.files import publish_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SPEEDS_NAME = "speeds.json"


def save_speeds(cache: Path, speeds: Mapping[int, float]) -> None:
    """Record the tokens a second of some buckets, by edge; other buckets keep what earlier runs recorded."""
    if speeds:
        known = _read(cache) | dict(speeds)
        publish_json(cache / SPEEDS_NAME, {str(edge): round(speed, 3) for edge, speed in known.items()})


def load_speeds(cache: Path, edges: Sequence[int]) -> list[float] | None:
    """Tokens a second of each bucket, `[buckets]`, or None where nothing usable is recorded.

    A bucket without a record gets the speed of the slowest.
    """
    speeds = _read(cache)
    return [speeds.get(edge, min(speeds.values())) for edge in edges] if speeds else None


def _read(cache: Path) -> dict[int, float]:
    try:
        recorded = json.loads((cache / SPEEDS_NAME).read_bytes())
        return {int(edge): float(speed) for edge, speed in recorded.items() if float(speed) > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
