"""Fixing a codec for a cache: its scales, found from the first samples, and what it costs them.

Both are decided once, before the first sample is written, and kept in the manifest: every rank and every
later run takes them from there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash.cache.codec import codec_of
from dflash.cache.codec_error import LOSSY_CODECS, CodecError
from dflash.cache.manifest import Manifest
from dflash.cache.quantised import CodedStates
from dflash.cache.scales import CALIBRATION_LENGTH, CALIBRATION_TOKENS, calibrate, scales_text

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def calibration_rows(ids: NDArray[np.uint64], lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows of the samples to look at: those of the smallest ids, which are as good as drawn by chance.

    Args:
        ids: [N].
        lengths: [N], tokens; of each sample `CALIBRATION_LENGTH` are looked at.
    """
    order = np.argsort(ids)
    tokens = np.cumsum(np.minimum(lengths[order], CALIBRATION_LENGTH))
    return order[: int(np.searchsorted(tokens, CALIBRATION_TOKENS)) + 1]


def with_codec(manifest: Manifest, codec: str, states: Tensor | None = None) -> Manifest:
    """A manifest for the same samples in another codec.

    Args:
        manifest: Of any codec.
        codec: One of `CODECS`.
        states: Some tokens' states [T, K, H], bfloat16 on the CPU; the lossy codecs need them.

    Raises:
        CacheError: the codec does not fit the cache's dtype.
    """
    if codec not in LOSSY_CODECS or states is None:
        identity = replace(manifest.identity, codec=codec, codec_digest=None)
        return replace(manifest, identity=identity, channel_scales=None, codec_error=None)
    states = states[torch.isfinite(states.float().sum(dim=(1, 2)))]
    text, digest = scales_text(calibrate(states)) if codec == "int8" else (None, None)
    identity = replace(manifest.identity, codec=codec, codec_digest=digest)
    coded = replace(manifest, identity=identity, channel_scales=text)
    return replace(coded, codec_error=measured(coded, states))


def measured(manifest: Manifest, states: Tensor) -> CodecError:
    """What the codec of a manifest does to states [T, K, H]: their error and the share that escapes."""
    found, escaped = coded_copy(manifest, states)
    error = (found.float() - states.float()).norm(dim=-1) / states.float().norm(dim=-1).clamp_min(1e-30)
    return CodecError(
        tokens=len(states),
        relative_error=tuple(round(value, 6) for value in error.median(dim=0).values.tolist()),
        escaped=tuple(round(value, 6) for value in escaped.tolist()),
    )


def coded_copy(manifest: Manifest, states: Tensor) -> tuple[Tensor, Tensor]:
    """States [T, K, H] after a way through the codec of a manifest, and the share of escaped rows [K]."""
    codec = codec_of(manifest)
    coded = codec.parse(torch.from_numpy(codec.encode(states)), len(states))
    layers = states.shape[1]
    if not isinstance(coded, CodedStates):
        return coded, torch.zeros(layers)
    rows = torch.zeros(0, dtype=torch.int64) if coded.escaped is None else coded.escaped
    return coded.decode(), torch.bincount(rows % layers, minlength=layers) / max(len(states), 1)
