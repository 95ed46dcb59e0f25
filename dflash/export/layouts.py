"""The layouts by name, and which of them a folder has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from dflash.drafter import DrafterConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.export import speculators, transformers, zlab
from dflash.export.facts import TargetShape, Verifier


class Layout(Protocol):
    """What the module of a layout offers."""

    RENAMED: dict[str, str]
    IGNORED: frozenset[str]

    def recognises(self, raw: dict[str, Any]) -> bool:
        """Whether a `config.json` is of this layout."""

    def write_config(
        self, config: DrafterConfig, dtype: torch.dtype, verifier: Verifier | None
    ) -> dict[str, Any]:
        """`config.json` for weights of that dtype."""

    def read_config(self, raw: dict[str, Any], target: TargetShape | None, where: Path) -> DrafterConfig:
        """Read a `config.json`."""


LAYOUTS: dict[str, Layout] = {"zlab": zlab, "transformers": transformers, "speculators": speculators}


def layout_named(name: str) -> Layout:
    """The layout of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"--to {name!r} is not one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def layout_of(raw: dict[str, Any], where: Path) -> str:
    """Name of the layout that a `config.json` has.

    Raises:
        CheckpointError: none that is known here.
    """
    for name, layout in LAYOUTS.items():
        if layout.recognises(raw):
            return name
    raise CheckpointError(
        f"{where} is not of a DFlash drafter: its model_type is {raw.get('model_type')!r}, and it has no "
        f"dflash_config or speculators_model_type; known layouts are {', '.join(LAYOUTS)}"
    )
