"""The order of sample ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sort_ids(ids: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Ids [N] ascending, and the place that each had; equal ones in the order of their places.

    Numbers are sorted several times faster than places by their numbers, so what is sorted is the upper bits
    of each id with its place in the lower ones. Ids are hashes: hardly any two agree in so many bits, and the
    few that do are put right in a pass that costs little where nearly all is sorted.
    """
    bits = np.uint64(max(len(ids) - 1, 0).bit_length())
    keys = ids >> bits
    keys <<= bits
    keys |= np.arange(len(ids), dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    places = keys.view(np.int64)
    found = ids[places]
    if (found[1:] < found[:-1]).any():
        rest = np.argsort(found, kind="stable")
        found, places = found[rest], places[rest]
    return found, places
