"""Codecs: how the hidden states of a sample become the bytes of its extent, and back.

    raw        the states as they are
    lossless   exponents compressed, sign and mantissa as they are (`lossless.py`)
    int8, fp8  one byte a value with scales (`quantised.py`); decoded on the device that uses the states

Every extent but `raw`'s ends on a multiple of 8 bytes. The bytes are specified in docs/cache-format.md.
Dimensions: T tokens of a sample, K tapped layers, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dflash.cache.lossless import LosslessCodec
from dflash.cache.quantised import CodedStates, Fp8Codec, Int8Codec
from dflash.cache.scales import channel_scales

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dflash.cache.manifest import Identity, Manifest

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Codec(Protocol):
    """One way to store states [T, K, H]."""

    def encode(self, states: Tensor) -> NDArray[np.uint8]:
        """The extent of a sample.

        Raises:
            ValueError: a lossy codec was given NaN or infinity.
        """

    def parse(self, extent: Tensor, tokens: int) -> Tensor | CodedStates:
        """States [T, K, H] in the bytes of an extent (uint8, on the CPU); coded where a device decodes them.

        What comes back may share the extent's memory.

        Raises:
            ValueError: the bytes are not an extent of so many tokens.
        """


class RawCodec:
    """The states' own bytes, row-major.

    Args:
        identity: Of the cache.
    """

    def __init__(self, identity: Identity) -> None:
        self._dtype = TORCH_DTYPES[identity.dtype]
        self._shape = (-1, len(identity.taps), identity.hidden_size)

    def encode(self, states: Tensor) -> NDArray[np.uint8]:
        """The tensor's bytes; a copy only where it is not contiguous on the CPU."""
        return states.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    def parse(self, extent: Tensor, tokens: int) -> Tensor:
        """A view of the bytes."""
        return extent.view(self._dtype).view(tokens, *self._shape[1:])


class StoredCodec:
    """Extents as they are: for copies between caches of one identity."""

    def encode(self, states: Tensor) -> NDArray[np.uint8]:
        """The extent that was read."""
        return states.numpy()

    def parse(self, extent: Tensor, tokens: int) -> Tensor:
        """The extent, whatever is in it."""
        del tokens
        return extent


def codec_of(manifest: Manifest) -> Codec:
    """The codec of a cache.

    Raises:
        CacheCorrupt: its channel scales are damaged.
    """
    identity = manifest.identity
    if identity.codec == "raw":
        return RawCodec(identity)
    shape = (len(identity.taps), identity.hidden_size)
    if identity.codec == "lossless":
        return LosslessCodec(shape)
    if identity.codec == "fp8":
        return Fp8Codec(shape)
    return Int8Codec(channel_scales(manifest))


def decoded(states: Tensor | CodedStates) -> Tensor:
    """States [T, K, H] in the cache's dtype, whatever the codec."""
    return states.decode() if isinstance(states, CodedStates) else states
