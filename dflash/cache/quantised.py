"""The codecs `int8` and `fp8`: one byte a value, a scale for each row, decoded wherever the states are used.

A row is one token's state behind one tapped layer, [H]. fp8 (e4m3) has a scale a row. int8 has a scale a row
times a fixed scale for each channel of each layer; a row in which one value towers over the others would lose
those, so it escapes: its bfloat16 values are kept, the upper bytes in the place of the codes, the lower ones
behind them.

Decoding is `code * (row scale * channel scale)`, each product rounded to float32, and the result to bfloat16:
the same bits on every device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

CREST = 20.0
"""A row escapes when its largest value is above so many times the mean of its values, in channel scales.
Normal rows are around 5, those with massive activations above 50."""
INT8_MAX, FP8_MAX = 127.0, 448.0
_LEAST_SCALE = 2.0**-126
"""Rows with a smaller scale are zero: devices may flush subnormal numbers."""
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 26
"""Values that are worked on at once: on the CPU they stay in its cache, on a GPU they bound the memory."""
_HEAD = struct.Struct("<II")
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@dataclass(frozen=True)
class CodedStates:
    """States [T, K, H] of one sample or of several, one after another, still coded."""

    codes: Tensor
    """uint8 [T, K, H]: bits of int8 or e4m3, or the upper bytes of an escaped row."""
    scales: Tensor
    """bfloat16 [T, K], one a row."""
    channels: Tensor | None = None
    """float32 [K, H], with int8; the codes are fp8 where it is None."""
    escaped: Tensor | None = None
    """int64 [E], ascending: numbers t * K + k of escaped rows; None with fp8."""
    lower: Tensor | None = None
    """uint8 [E, H], lower bytes of the escaped rows."""

    def first(self, tokens: int) -> CodedStates:
        """The states of the first tokens."""
        part = replace(self, codes=self.codes[:tokens], scales=self.scales[:tokens])
        if self.escaped is None or self.lower is None:
            return part
        count = int(torch.searchsorted(self.escaped, tokens * self.codes.shape[1]))
        return replace(part, escaped=self.escaped[:count], lower=self.lower[:count])

    def of_layers(self, columns: Sequence[int]) -> CodedStates:
        """The states of these layers, by their place on axis K, in this order."""
        chosen = torch.tensor(columns)
        part = replace(
            self,
            codes=self.codes[:, chosen],
            scales=self.scales[:, chosen],
            channels=None if self.channels is None else self.channels[chosen],
        )
        if self.escaped is None or self.lower is None:
            return part
        layers = self.codes.shape[1]
        place = torch.full((layers,), -1)
        place[chosen] = torch.arange(len(columns))  # -1 of a layer that is left out
        kept = place[self.escaped % layers]
        numbers, order = (self.escaped // layers * len(columns) + kept)[kept >= 0].sort()
        return replace(part, escaped=numbers, lower=self.lower[kept >= 0][order])

    def extent(self) -> NDArray[np.uint8]:
        """The bytes in which a cache stores one sample, on the CPU."""
        if self.escaped is None or self.lower is None:
            return _extent(self.codes, self.scales)
        head = torch.from_numpy(np.array([len(self.escaped), 0], "<u4"))
        return _extent(head, self.codes, self.lower, self.escaped.to(torch.int32), self.scales)

    def decode(self) -> Tensor:
        """bfloat16 [T, K, H], on the device of the codes."""
        out = torch.empty(self.codes.shape, dtype=torch.bfloat16, device=self.codes.device)
        for part in _chunks(self.codes):
            out[part] = self._decoded(self.codes[part], self.scales[part, :, None].float())
        if self.escaped is not None and self.lower is not None:
            rows = self.codes.flatten(0, 1)[self.escaped]
            bits = rows.to(torch.int32) << 8 | self.lower.to(torch.int32)
            out.view(torch.int16).flatten(0, 1)[self.escaped] = bits.to(torch.int16)
        return out

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.channels is None:
            return _e4m3(codes).mul_(scales)
        return (scales * self.channels).mul_(codes.view(torch.int8))


def join(parts: Sequence[CodedStates]) -> CodedStates:
    """The states of several samples of one cache, one after another."""
    first = parts[0]
    whole = replace(
        first, codes=torch.cat([p.codes for p in parts]), scales=torch.cat([p.scales for p in parts])
    )
    if first.escaped is None:
        return whole
    starts = np.cumsum([0, *(p.scales.numel() for p in parts)])[:-1].tolist()
    escaped = [p.escaped + start for p, start in zip(parts, starts, strict=True) if p.escaped is not None]
    lower = [p.lower for p in parts if p.lower is not None]
    return replace(whole, escaped=torch.cat(escaped), lower=torch.cat(lower))


class Fp8Codec:
    """e4m3 codes [T, K, H], then scales [T, K].

    Args:
        shape: (K, H).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape

    def encode(self, states: Tensor) -> NDArray[np.uint8]:
        """The extent; refuses NaN and infinity with a ValueError."""
        states = states.detach().cpu()
        codes = torch.empty(states.shape, dtype=torch.uint8)
        scales = torch.empty(states.shape[:2], dtype=torch.bfloat16)
        for part in _chunks(states):
            values = states[part].float()
            scale, inverse = _scale(values.abs().amax(-1), FP8_MAX)
            scales[part] = scale
            scaled = values.mul_(inverse[..., None]).clamp_(-FP8_MAX, FP8_MAX)
            codes[part] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return CodedStates(codes, scales).extent()

    def parse(self, extent: Tensor, tokens: int) -> CodedStates:
        """Views of the extent."""
        layers, hidden = self._shape
        count = tokens * layers * hidden
        return CodedStates(
            extent[:count].view(tokens, layers, hidden), _scales(extent[count:], tokens, layers)
        )


class Int8Codec:
    """Number of escaped rows E (u32), a zero (u32), codes, lower bytes [E, H], rows (u32) [E], scales [T, K].

    Args:
        channels: float32 [K, H], all positive.
    """

    def __init__(self, channels: Tensor) -> None:
        self._channels = channels

    def encode(self, states: Tensor) -> NDArray[np.uint8]:
        """The extent; refuses NaN and infinity with a ValueError."""
        states = states.detach().cpu().contiguous()
        codes = torch.empty(states.shape, dtype=torch.uint8)
        scales = torch.empty(states.shape[:2], dtype=torch.bfloat16)
        escapes = torch.empty(states.shape[:2], dtype=torch.bool)
        inverse_channels = self._channels.reciprocal()
        for part in _chunks(states):
            values = states[part].float().mul_(inverse_channels)
            sizes = values.abs()
            peak = sizes.amax(-1)
            scale, inverse = _scale(peak, INT8_MAX)
            scales[part], escapes[part] = scale, peak > CREST * sizes.mean(-1)
            scaled = values.mul_(inverse[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX)
            codes[part] = scaled.to(torch.int8).view(torch.uint8)
        escaped = escapes.flatten().nonzero().flatten()
        bits = states.view(torch.int16).flatten(0, 1)[escaped].to(torch.int32)
        codes.flatten(0, 1)[escaped] = (bits >> 8 & 0xFF).to(torch.uint8)
        scales.flatten()[escaped] = 0
        return CodedStates(codes, scales, self._channels, escaped, (bits & 0xFF).to(torch.uint8)).extent()

    def parse(self, extent: Tensor, tokens: int) -> CodedStates:
        """Views of the extent, but for the few row numbers."""
        layers, hidden = self._channels.shape
        count, zero = _HEAD.unpack_from(extent.numpy().data)
        values, rows = tokens * layers * hidden, tokens * layers
        size = 8 + values + count * (hidden + 4) + 2 * rows
        if zero or count > rows or len(extent) != -(-size // 8) * 8:
            raise ValueError(f"{count} escaped rows in an extent of {len(extent)} bytes")
        _, codes, lower, numbers, scales = torch.split(
            extent, [8, values, count * hidden, count * 4, len(extent) - 8 - values - count * (hidden + 4)]
        )
        escaped = numbers.view(torch.int32).long()
        if count and (
            bool((escaped.diff() <= 0).any()) or not 0 <= int(escaped[0]) <= int(escaped[-1]) < rows
        ):
            raise ValueError("escaped rows are not ascending, or are outside the sample")
        return CodedStates(
            codes.view(tokens, layers, hidden),
            _scales(scales, tokens, layers),
            self._channels,
            escaped,
            lower.view(count, hidden),
        )


def _e4m3(codes: Tensor) -> Tensor:
    """Values of e4m3 codes, float32; on the CPU by a table, which is three times as fast as torch."""
    if codes.device.type != "cpu":
        return codes.view(torch.float8_e4m3fn).float()
    return torch.from_numpy(np.take(_E4M3, codes.numpy()))


def _scale(peak: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Row scales in bfloat16 that bring peaks to the largest code, and their inverses in float32."""
    if not bool(torch.isfinite(peak).all()):
        raise ValueError("hidden states hold NaN or Inf, which a lossy codec cannot store")
    scale = (peak / largest).to(torch.bfloat16)
    scale = torch.where(scale >= _LEAST_SCALE, scale, 0.0)
    wide = scale.float()
    return scale, torch.where(wide > 0, wide.reciprocal(), 0.0)


def _chunks(states: Tensor) -> Iterator[slice]:
    """Slices of the tokens of [T, K, H]."""
    most = _CHUNK if states.device.type == "cpu" else _DEVICE_CHUNK
    tokens = max(1, most // states.shape[1:].numel())
    return (slice(start, start + tokens) for start in range(0, len(states), tokens))


def _extent(*parts: Tensor) -> NDArray[np.uint8]:
    """Parts one after another, zeros up to a multiple of 8 bytes."""
    size = sum(part.nbytes for part in parts)
    extent = np.zeros(-(-size // 8) * 8, np.uint8)
    start = 0
    for part in parts:
        extent[start : start + part.nbytes] = part.reshape(-1).view(torch.uint8).numpy()
        start += part.nbytes
    return extent


def _scales(data: Tensor, tokens: int, layers: int) -> Tensor:
    """The scales at the beginning of what is left of an extent; behind them are at most 7 zeros."""
    size = 2 * tokens * layers
    if not size <= len(data) < size + 8 or bool(data[size:].any()):
        raise ValueError(f"{len(data)} bytes of scales, not {size}")
    return data[:size].view(torch.bfloat16).view(tokens, layers)
