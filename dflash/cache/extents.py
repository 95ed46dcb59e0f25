"""What the index may say of samples: the sizes that extents can have, the rows that fit a shard's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.lossless import most_compressed
from dflash.cache.shard import DATA_START

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dflash.cache.manifest import Identity

ALIGNMENT = 8


def possible_rows(
    column: Mapping[str, NDArray[Any]],
    edges: NDArray[np.int32],
    bucket: NDArray[np.int16],
    samples: NDArray[np.int64],
    identity: Identity,
) -> dict[str, NDArray[np.bool_]]:
    """For each column that the layout determines or bounds, which rows are possible; `edges` start with 0."""
    length, offset, nbytes = column["length"], column["offset"], column["nbytes"]
    edge = edges[1:][bucket]
    first = np.cumsum(samples) - samples
    contiguous = np.empty(len(length), np.bool_)
    contiguous[1:] = offset[:-1] + nbytes[:-1] == offset[1:]
    contiguous[first] = offset[first] == DATA_START
    low, high = extent_bounds(identity, length.astype(np.int64))
    sound = (nbytes >= low) & (nbytes <= high) if low is not high else nbytes == low
    if identity.codec != "raw":
        sound &= nbytes % ALIGNMENT == 0
    return {
        "bucket": column["bucket"] == edge,
        "row": column["row"] == np.arange(len(length)) - np.repeat(first, samples),
        "length": (length <= edge) & (length > edges[bucket]),
        "supervised": (column["supervised"] >= 0) & (column["supervised"] <= length),
        "nbytes": sound,
        "offset": contiguous,
    }


def extent_bounds(
    identity: Identity, tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Least and most bytes of the extents of samples of so many tokens."""
    if identity.codec == "raw":
        size = tokens * identity.bytes_per_token
        return size, size
    rows = tokens * len(identity.taps)
    values = rows * identity.hidden_size
    if identity.codec == "fp8":
        size = aligned(values + 2 * rows)
        return size, size
    if identity.codec == "int8":
        size = 8 + values + 2 * rows
        return aligned(size), aligned(size + rows * (identity.hidden_size + 4))
    return aligned(8 + values), aligned(8 + values + most_compressed(values))


def aligned(size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sizes rounded up to whole eights."""
    return -(-size // ALIGNMENT) * ALIGNMENT
