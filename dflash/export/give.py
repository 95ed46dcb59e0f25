"""`dflash export`: a run's drafter as a folder for other clients, with a model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.drafter import Drafter
from dflash.errors import ConfigError, DflashError
from dflash.export.card import model_card
from dflash.export.facts import Verifier
from dflash.export.folder import common_dtype, renamed, write_folder
from dflash.export.history import history_of
from dflash.export.layouts import Layout, layout_named
from dflash.export.take import Taken, read_drafter, target_shape
from dflash.files import json_bytes
from dflash.pretrained import CONFIG_NAME, check_tensors
from dflash.target_files import load_config
from dflash.train.checkpoint import resolve_drafter

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class ExportConfig:
    """What is exported, and as what."""

    source: Path
    """A run, a checkpoint of it, or a drafter folder of any layout."""
    out: Path
    to: str
    """`zlab`, `transformers` or `speculators`."""
    dtype: str | None = None
    """Dtype of the weights; as stored when None."""
    target: str | None = None
    """The target; by default the one that the run's cache names."""

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            ConfigError: names the value and what is allowed.
        """
        layout_named(self.to)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.out.exists():
            raise ConfigError(f"--out {self.out} exists already; give a folder that does not")


def export_drafter(config: ExportConfig) -> Taken:
    """Write `config.out`; returns what is in it.

    Raises:
        CheckpointError: there is no drafter, or it is not whole.
        ConfigError: `out` exists, or the layout cannot hold this drafter.
        TargetError: the target cannot be found.
    """
    folder = resolve_drafter(config.source)
    history = history_of(folder)
    taken = read_drafter(folder, config.target)
    target = config.target or history.target or taken.target
    dtype = DTYPES[config.dtype] if config.dtype else common_dtype(taken.tensors)
    card = model_card(taken.config, config.to, target, history)
    layout, verifier = layout_named(config.to), _verifier(config, target, taken)
    _write(config.out, layout, taken, dtype, {"README.md": card.encode()}, verifier)
    return taken


def export_network(drafter: Drafter, out: Path, to: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a network that is in memory, without a card.

    Raises:
        ConfigError: `out` exists, or the layout cannot hold this drafter or must know its target.
        CheckpointError: a weight is not finite.
    """
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in drafter.state_dict().items()}
    check_tensors(tensors, drafter.config, out)
    _write(out, layout_named(to), Taken("zlab", drafter.config, tensors, None), dtype, {}, None)


def _write(
    out: Path,
    layout: Layout,
    taken: Taken,
    dtype: torch.dtype,
    files: dict[str, bytes],
    verifier: Verifier | None,
) -> None:
    config = layout.write_config(taken.config, dtype, verifier)
    tensors = {name: t.to(dtype) for name, t in renamed(taken.tensors, layout.RENAMED).items()}
    write_folder(out, tensors, {CONFIG_NAME: json_bytes(config), **files})


def _verifier(config: ExportConfig, name: str | None, taken: Taken) -> Verifier | None:
    """The target as the speculators layout names it; None for the other layouts, or where it is not known."""
    if config.to != "speculators" or name is None:
        return None
    try:
        shape = target_shape(name)
        found = load_config(name).architectures or ()
    except DflashError as error:
        hint = "" if config.target else f" ({name!r} is what the run or the checkpoint names; give --target)"
        raise ConfigError(f"{error}{hint}") from error
    for key, value in vars(shape).items():
        if value != getattr(taken.config, key):
            raise ConfigError(
                f"the target {name} has {key} {value}, the drafter was made for {getattr(taken.config, key)}"
            )
    here = Path(name)
    return Verifier(str(here.resolve()) if here.is_dir() else name, tuple(found))
