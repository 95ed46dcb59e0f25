"""Fewer tapped layers of a cache, whatever its codec: what is stored of the others stays as it is.

Codes and scales of int8 and fp8 are taken out layer by layer and never decoded, so that what they decode to
does not change by a bit. Lossless extents are decoded and encoded anew, which loses nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dflash.cache.codec import codec_of
from dflash.cache.quantised import CodedStates
from dflash.cache.scales import channel_scales, scales_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.cache.manifest import Manifest
    from dflash.cache.reader import Sample


def cut_manifest(manifest: Manifest, columns: Sequence[int]) -> Manifest:
    """The manifest of the same samples with these layers, by their place on axis K, in this order.

    Raises:
        CacheCorrupt: its channel scales are damaged.
    """
    identity = replace(manifest.identity, taps=tuple(manifest.identity.taps[column] for column in columns))
    text = None
    if identity.codec == "int8":
        text, digest = scales_text(channel_scales(manifest)[list(columns)])
        identity = replace(identity, codec_digest=digest)
    error = manifest.codec_error
    return replace(
        manifest, identity=identity, channel_scales=text, codec_error=error and error.of_layers(columns)
    )


class TapCut:
    """Takes layers out of stored samples.

    Args:
        before: Manifest of the cache that they are read from.
        columns: The layers that are kept, by their place on axis K, in their new order.
    """

    def __init__(self, before: Manifest, columns: Sequence[int]) -> None:
        self._columns = list(columns)
        self._before, self._after = codec_of(before), codec_of(cut_manifest(before, columns))

    def __call__(self, sample: Sample) -> Sample:
        """A sample whose `hidden_states` are an extent, uint8 [bytes], with another extent.

        Raises:
            ValueError: it is no extent of this codec.
        """
        states = self._before.parse(sample.hidden_states, len(sample.input_ids))
        if isinstance(states, CodedStates):
            extent = states.of_layers(self._columns).extent()
        else:
            extent = self._after.encode(states[:, self._columns].contiguous())
        return replace(sample, hidden_states=torch.from_numpy(extent))
