"""The shape of the drafter that a cache calls for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash.cache.manifest import REPAIR, TARGET_CONFIG_NAME
from dflash.cache.parts import check_part
from dflash.drafter import DrafterConfig
from dflash.errors import CacheCorrupt, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.cache.manifest import Manifest


@dataclass(frozen=True)
class NetworkConfig:
    """What the user chooses of the drafter; the rest follows from the target."""

    layers: int = 5
    """Draft layers."""
    block_size: int = 16
    """B, the anchor included."""
    mask_token_id: int | None = None
    """By default the unused row that extraction found in the target's embedding."""

    def __post_init__(self) -> None:
        """Refuse a network without layers.

        Raises:
            ConfigError: names the value.
        """
        if self.layers < 1:
            raise ConfigError(f"--layers is {self.layers}; it must be at least 1")


def target_config(cache: Path) -> dict[str, Any]:
    """`target_config.json` of a cache: the text model's configuration and the mask token that was found.

    Raises:
        CacheCorrupt: it is missing or damaged.
    """
    path = cache / TARGET_CONFIG_NAME
    try:
        value = json.loads(path.read_bytes())
        value["config"], value["mask_token_id"]  # both must be there
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheCorrupt(f"{path} is missing or damaged ({error!r}); {REPAIR}") from error
    return value  # type: ignore[no-any-return]


def drafter_config(
    network: NetworkConfig, cache: Path, manifest: Manifest, taps: tuple[int, ...] | None = None
) -> DrafterConfig:
    """The drafter's configuration: widths, heads and RoPE base of the target, depth and block as chosen.

    It reads the layers `taps`, by default all that the cache holds. RoPE is plain and one-dimensional over
    the whole head, also where the target uses M-RoPE or rotates only a part (contract, section 1).

    Raises:
        ConfigError: no mask token is known, or one that cannot be used.
        CacheCorrupt: the cache's copy of the target's configuration is damaged.
    """
    check_part(cache, manifest, TARGET_CONFIG_NAME)
    stored = target_config(cache)
    mask = network.mask_token_id if network.mask_token_id is not None else stored["mask_token_id"]
    if mask is None:
        raise ConfigError(
            "this target has no unused embedding row for the mask; name one with --mask-token-id"
        )
    c, identity = stored["config"], manifest.identity
    heads = c["num_attention_heads"]
    eos = c.get("eos_token_id")
    return DrafterConfig(
        hidden_size=identity.hidden_size,
        intermediate_size=c["intermediate_size"],
        num_hidden_layers=network.layers,
        num_attention_heads=heads,
        num_key_value_heads=c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or identity.hidden_size // heads,
        vocab_size=identity.vocab_size,
        block_size=network.block_size,
        mask_token_id=mask,
        target_layer_ids=identity.taps if taps is None else taps,
        num_target_layers=identity.num_target_layers,
        rope_theta=float(_rope_theta(c)),
        rms_norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=c["max_position_embeddings"],
        bos_token_id=c.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=c.get("pad_token_id"),
    )


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    if "rope_theta" in parameters:
        return parameters["rope_theta"]  # type: ignore[no-any-return]
    # one set of parameters a kind of layer (Gemma 3): the drafter's layers are full attention
    full = parameters.get("full_attention") or {}
    return full.get("rope_theta") or config.get("rope_theta") or 10000.0
