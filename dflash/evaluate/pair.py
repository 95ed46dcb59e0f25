"""A target and its drafter, opened together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.decode.drafting import check_fit
from dflash.dist import device_of
from dflash.drafter import Drafter
from dflash.errors import CheckpointError, ConfigError
from dflash.pretrained import load_drafter
from dflash.target import DTYPES, Target, load_tokenizer
from dflash.train.checkpoint import resolve_drafter
from dflash.world import World


def open_pair(
    target: str, drafter: Path, *, dtype: str, trust_remote_code: bool = False
) -> tuple[Target, Drafter, Any]:
    """Target, drafter and tokenizer for decoding, on this machine's device.

    Raises:
        TargetError: the target cannot be loaded.
        CheckpointError: the drafter cannot be loaded or does not fit.
    """
    device = device_of(World())
    network = load_drafter(resolve_drafter(drafter), DTYPES[dtype])
    network.eval().requires_grad_(False)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    try:
        model = Target(
            target,
            network.config.target_layer_ids,
            dtype=DTYPES[dtype],
            device=device,
            trust_remote_code=trust_remote_code,
        )
    except ConfigError as error:
        raise CheckpointError(
            f"the drafter in {drafter} does not fit the target {target}: {error}"
        ) from error
    check_fit(network, model)
    return model, network.to(device), tokenizer
