"""The layout of z-lab's package, vLLM and SGLang, which is also that of our own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dflash.drafter import DrafterConfig
from dflash.export.facts import TargetShape, Verifier
from dflash.pretrained import parse_config, zlab_config

RENAMED: dict[str, str] = {}
"""Beginnings of tensor names that differ: ours to theirs."""
IGNORED: frozenset[str] = frozenset()
"""Tensors that may stand beside the drafter's own."""


def recognises(raw: dict[str, Any]) -> bool:
    """Whether a `config.json` is of this layout."""
    return "dflash_config" in raw and "speculators_model_type" not in raw


def write_config(config: DrafterConfig, dtype: torch.dtype, _verifier: Verifier | None) -> dict[str, Any]:
    """`config.json` for weights of that dtype."""
    return zlab_config(config, dtype)


def read_config(raw: dict[str, Any], _target: TargetShape | None, where: Path) -> DrafterConfig:
    """Read a `config.json`.

    Raises:
        CheckpointError: it is incomplete, or of a network that cannot be run.
    """
    return parse_config(raw, where)
