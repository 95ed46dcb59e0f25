"""The codec `lossless`: a bfloat16's exponents say little and compress well, its sign and mantissa do not.

Exponents of neighbouring values are alike, and those of one layer have one distribution. So the exponent
plane lies layer by layer, each layer being a zstd block of its own or more, with its own code; the plane of
signs and mantissas is kept as it is.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zstandard

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

LEVEL = 1
_HEAD = struct.Struct("<Q")


def most_compressed(size: Any) -> Any:
    """Most bytes of a zstd frame of so many bytes: what zstd's own bound gives, and a little more."""
    return size + size // 256 + 128


class LosslessCodec:
    """Byte planes of bfloat16 states; bit for bit, NaN and negative zero included.

    Args:
        shape: (K, H).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape

    def encode(self, states: Tensor) -> NDArray[np.uint8]:
        """Size of the compressed exponents (u64), signs and mantissas [T, K, H], exponents [K, T, H]."""
        bits = states.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
        exponents = (bits.transpose(1, 0, 2) >> 7).astype(np.uint8)  # [K, T, H]; the sign falls out
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(exponents.tobytes())
        plain = ((bits >> 8 & 0x80) | (bits & 0x7F)).astype(np.uint8)
        size = _HEAD.size + plain.nbytes + len(packed)
        extent = np.zeros(-(-size // 8) * 8, np.uint8)
        extent[:8] = np.frombuffer(_HEAD.pack(len(packed)), np.uint8)
        extent[8 : 8 + plain.nbytes] = plain.reshape(-1)
        extent[8 + plain.nbytes : size] = np.frombuffer(packed, np.uint8)
        return extent

    def parse(self, extent: Tensor, tokens: int) -> Tensor:
        """The states, in memory of their own."""
        layers, hidden = self._shape
        count = tokens * layers * hidden
        data = extent.numpy()
        size = _HEAD.unpack_from(data.data)[0]
        if 8 + count + size > len(data) or data[8 + count + size :].any() or len(data) - size - count > 15:
            raise ValueError(f"{size} bytes of exponents in an extent of {len(data)}")
        exponents = _inflate(data[8 + count : 8 + count + size], count).reshape(layers, tokens, hidden)
        plain = data[8 : 8 + count].reshape(tokens, layers, hidden)
        bits = plain.astype(np.uint16)
        bits |= (bits & 0x80) << 8
        bits &= 0x807F
        bits |= exponents.transpose(1, 0, 2).astype(np.uint16) << 7
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _inflate(packed: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Decompress a frame that states its size; one that states another is refused before memory is taken."""
    try:
        stated = zstandard.frame_content_size(packed.data)
        if stated != size:
            raise ValueError(f"exponents of {stated} bytes, not {size}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed.data), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"damaged exponents ({error})") from error
