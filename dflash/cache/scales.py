"""The channel scales of the codec `int8`: found once from the first samples, kept in the manifest.

A few channels of the residual stream are always large. Divided by its own scale every channel fills the eight
bits of a row's scale about alike.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash.cache.quantised import CREST
from dflash.errors import CacheCorrupt

if TYPE_CHECKING:
    from torch import Tensor

    from dflash.cache.manifest import Manifest

CALIBRATION_TOKENS = 4096
"""Tokens that the scales are found from."""
CALIBRATION_LENGTH = 512
"""Tokens of one sample among them, at most."""
EVENNESS = 0.75
"""Power of a channel's root mean square that is its scale. With 1 all channels have the same relative error;
a little less spends more of the bits on the large ones, and the error of a whole row is smallest."""


def calibrate(states: Tensor) -> Tensor:
    """Channel scales, float32 [K, H] that bfloat16 can hold, from states [T, K, H]."""
    values = states.float().nan_to_num(0.0, 0.0, 0.0)  # rows that are not finite are reported elsewhere
    sizes = values.abs()
    usual = sizes.amax(-1) <= CREST * sizes.mean(-1)  # [T, K]; a massive token says nothing of the others
    weights = torch.where(usual.any(0), usual, True).float()[..., None]
    power = (values.square() * weights).sum(0) / weights.sum(0)  # [K, H]
    scales = power ** (EVENNESS / 2)
    least = scales.amax(-1, keepdim=True).clamp_min(2.0**-60) * 2.0**-12  # a channel that is always zero
    return torch.maximum(scales, least).to(torch.bfloat16).float()


def scales_text(scales: Tensor) -> tuple[str, str]:
    """Channel scales as the manifest holds them, and their digest."""
    data = scales.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
    return base64.b64encode(data).decode(), hashlib.sha256(data).hexdigest()


def channel_scales(manifest: Manifest) -> Tensor:
    """Float32 [K, H] of a cache whose codec is int8.

    Raises:
        CacheCorrupt: the manifest's scales are not those of its identity.
    """
    identity = manifest.identity
    shape = (len(identity.taps), identity.hidden_size)
    try:
        data = base64.b64decode(manifest.channel_scales or "", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    scales = (
        torch.from_numpy(np.frombuffer(data, "<i2").astype(np.int16)).view(torch.bfloat16).float()
        if len(data) == 2 * shape[0] * shape[1]
        else None
    )
    if (
        scales is None
        or hashlib.sha256(data).hexdigest() != identity.codec_digest
        or not bool(((scales > 0) & scales.isfinite()).all())
    ):
        raise CacheCorrupt(
            "manifest.json: its channel scales do not fit its codec digest; it was edited or damaged"
        )
    return scales.view(shape)
