"""Where a run's weights come from: drawn by the seed, or those of another drafter that is trained further."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dflash.drafter import Drafter, DrafterConfig, init_weights
from dflash.errors import ConfigError
from dflash.pretrained import load_drafter
from dflash.train.checkpoint import resolve_drafter

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.head import HeadFacts

_FLAGS = {"num_hidden_layers": "--layers", "mask_token_id": "--mask-token-id"}
_MUST_MATCH = ("hidden_size", "vocab_size", "num_target_layers", "target_layer_ids", *_FLAGS)


def initial_drafter(config: DrafterConfig, facts: HeadFacts, seed: int, source: Path | None) -> Drafter:
    """A float32 drafter to start from.

    Args:
        config: What the cache and the flags call for.
        facts: How the target scales embeddings and caps logits, for clients that read the raw tables.
        seed: Of drawn weights.
        source: A run or a drafter folder to take the weights from; widths of heads and MLP are then its own,
            and blocks may have another size, since no weight depends on it.

    Raises:
        CheckpointError: there is no drafter, or its tensors are not exactly those of its configuration.
        ConfigError: it is of another target, other taps or another depth.
    """
    scale, cap = facts.embed_scale, facts.logit_softcap
    config = replace(config, input_embedding_scale=scale, final_logit_softcapping=cap)
    if source is None:
        drafter = Drafter(config)
        init_weights(drafter, seed)
        return drafter
    folder = resolve_drafter(source)
    loaded = load_drafter(folder, torch.float32)
    theirs = loaded.config
    for name in _MUST_MATCH:
        wanted, found = getattr(config, name), getattr(theirs, name)
        if wanted != found:
            hint = f"; give {_FLAGS[name]} {found}" if name in _FLAGS else ", so it cannot be trained on it"
            raise ConfigError(
                f"--init-from {folder}: its {name} is {found}, this cache and run have {wanted}{hint}"
            )
    loaded.config = replace(
        theirs,
        block_size=config.block_size,
        input_embedding_scale=scale,
        final_logit_softcapping=cap,
    )
    return loaded.requires_grad_(True)
