"""A seeded permutation of `range(size)` that needs no memory: any position is computed on its own.

A Feistel network on pairs (left, right) with left < a and right < b, where a * b is the smallest such product
that covers `size` (a = ceil(sqrt(size))). Each round adds a keyed hash of one half to the other, modulo that
half's size, which can be undone and is therefore a bijection of the a * b pairs. Values at or above `size`
are fed through again until they fall inside ("cycle walking"); fewer than one value in sqrt(size) needs it.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_WORD = (1 << 64) - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # those of splitmix64
_HALF = np.uint64(32)
_FEW = 12  # up to here Python is faster than numpy


def derive_key(*parts: str | int) -> bytes:
    """A 16-byte key that differs whenever any of `parts` does."""
    text = "\x1f".join(str(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def keyed_below(key: bytes, counter: int, limit: int) -> int:
    """A number in `range(limit)` that depends on `key` and `counter` alone, as good as a uniform draw."""
    word = hashlib.blake2b(counter.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(word, "little") * limit >> 64


class Permutation:
    """A bijection of `range(size)` chosen by `key`; size must be below 2**63."""

    def __init__(self, size: int, key: bytes) -> None:
        self.size = size
        left = isqrt(size - 1) + 1 if size > 1 else 1
        # Even rounds change the left half, odd rounds the right one.
        self._halves = (left, -(-size // left))
        # One digest of 64 bytes holds all eight round keys.
        words = hashlib.blake2b(key, digest_size=8 * ROUNDS).digest()
        self._round_keys = [int.from_bytes(words[at : at + 8], "little") for at in range(0, len(words), 8)]

    def __getitem__(self, index: int) -> int:
        """The value at one position, in constant time; `index` must be in `range(size)`."""
        value = self._once(index)
        while value >= self.size:
            value = self._once(value)
        return value

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The values at positions `start` to `stop - 1`, int64 `[stop - start]`, as one by one."""
        if stop - start < _FEW:  # a bucket of three samples is passed through again and again
            return np.array([self[index] for index in range(start, stop)], np.int64)
        values = self._once_vector(np.arange(start, stop, dtype=np.uint64))
        while (outside := np.flatnonzero(values >= self.size)).size:
            values[outside] = self._once_vector(values[outside])
        return values.astype(np.int64)

    def _once(self, value: int) -> int:
        halves = list(divmod(value, self._halves[1]))
        for number, key in enumerate(self._round_keys):
            side = number & 1
            mixed = (halves[1 - side] + key) * _MULTIPLIERS[0] & _WORD
            mixed = (mixed ^ mixed >> 32) * _MULTIPLIERS[1] & _WORD
            shift = (mixed >> 32) * self._halves[side] >> 32
            halves[side] = (halves[side] + shift) % self._halves[side]
        return halves[0] * self._halves[1] + halves[1]

    def _once_vector(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        # The same arithmetic as `_once`: uint64 arrays wrap around silently, as the masks do there.
        sizes = [np.uint64(half) for half in self._halves]
        left, right = np.divmod(values, sizes[1])
        halves = [left, right]
        for number, key in enumerate(self._round_keys):
            side = number & 1
            mixed = (halves[1 - side] + np.uint64(key)) * np.uint64(_MULTIPLIERS[0])
            mixed = (mixed ^ (mixed >> _HALF)) * np.uint64(_MULTIPLIERS[1])
            moved = halves[side] + ((mixed >> _HALF) * sizes[side] >> _HALF)
            # Both summands are below the half's size: one subtraction is the remainder, and faster.
            halves[side] = moved - sizes[side] * (moved >= sizes[side])
        joined: npt.NDArray[np.uint64] = halves[0] * sizes[1] + halves[1]
        return joined
