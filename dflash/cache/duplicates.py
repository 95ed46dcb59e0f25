"""Two index fragments that commit the same thing: what is said of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dflash.cache.manifest import REPAIR
from dflash.errors import CacheCorrupt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from dflash.cache.shard import ShardLayout


def shared_shard(paths: Sequence[Path], ends: Sequence[int], layouts: Sequence[ShardLayout]) -> str:
    """The message for two fragments that commit the same shard."""
    owner: dict[str, Path] = {}
    place = 0
    for layout in layouts:
        path = paths[int(np.searchsorted(ends, place, side="right"))]
        place += layout.samples
        if layout.name in owner:
            return f"{owner[layout.name]} and {path} both commit {layout.name}; {REPAIR}"
        owner[layout.name] = path
    raise AssertionError("called without a shared shard")


def check_unique(
    ids: NDArray[np.uint64], places: NDArray[np.int64], paths: Sequence[Path], ends: Sequence[int]
) -> None:
    """Refuse sorted ids in which one occurs twice."""
    repeats = np.flatnonzero(ids[1:] == ids[:-1])
    if len(repeats):
        row = int(repeats[0])
        one, other = sorted(
            paths[int(np.searchsorted(ends, places[at], side="right"))] for at in (row, row + 1)
        )
        raise CacheCorrupt(
            f"{one} and {other} both commit sample {int(ids[row])} ({len(repeats)} in all); {REPAIR}"
        )
