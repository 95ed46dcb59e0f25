"""Keeping memory from step to step: on a CPU fresh pages cost a training step up to a tenth of its time."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_MOST = (1 << 30, 1 << 25)
"""Bytes below which an allocation comes from memory that is kept; older versions allow the second at most."""


def keep_memory() -> bool:
    """Let the C library keep large freed tensors for the next ones, instead of giving each back at once.

    A step frees and allocates the same sizes again and again, so what is kept is used.

    Returns:
        Whether the C library could be told; others than glibc cannot, and nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MOST)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))
