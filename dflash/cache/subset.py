"""A reader that knows only some of a cache's samples, so that what trains never meets what evaluates."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dflash.cache.reader import CacheReader


def subset(reader: CacheReader, rows: NDArray[np.int64]) -> CacheReader:
    """The same cache with these rows of its index alone; open shards are shared with `reader`.

    Its index has a digest of its own, so a sampler's position on it belongs to these samples only.

    Args:
        reader: The whole cache.
        rows: Rows of its index, ascending.
    """
    view = copy.copy(reader)
    view.index = reader.index.select(rows)
    return view
