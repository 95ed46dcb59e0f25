"""`dflash import`: a drafter folder of any layout becomes one of ours, value for value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dflash.drafter import DrafterConfig
from dflash.errors import ConfigError
from dflash.export import speculators
from dflash.export.facts import TargetShape
from dflash.export.folder import common_dtype, read_json, read_tensors, renamed, write_folder
from dflash.export.layouts import LAYOUTS, layout_of
from dflash.files import json_bytes
from dflash.pretrained import CONFIG_NAME, WEIGHTS_NAME, check_tensors, zlab_config
from dflash.target_files import load_config


@dataclass(frozen=True)
class Taken:
    """A drafter as read from a folder."""

    layout: str
    config: DrafterConfig
    tensors: dict[str, Tensor]
    """Under our names, in one dtype."""
    target: str | None
    """Name of the target, where the checkpoint gives it."""


def target_shape(name: str) -> TargetShape:
    """Shape of a target, from its configuration alone.

    Raises:
        TargetError: it cannot be found.
    """
    text = load_config(name).get_text_config()
    return TargetShape(text.num_hidden_layers, text.vocab_size)


def read_drafter(folder: Path, target: str | None = None) -> Taken:
    """Read a drafter folder of any layout.

    Args:
        folder: Holds `config.json` and the weights.
        target: The target, where the checkpoint does not say how deep it is and how many rows it has.

    Raises:
        CheckpointError: it is of no known layout, cannot be run here, or its tensors are not exactly those of
            its configuration.
        TargetError: the target cannot be found.
    """
    where = folder / CONFIG_NAME
    raw = read_json(where)
    name = layout_of(raw, where)
    layout = LAYOUTS[name]
    config = layout.read_config(raw, target_shape(target) if target else None, where)
    back = {theirs: ours for ours, theirs in layout.RENAMED.items()}
    tensors = renamed(read_tensors(folder), back)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in layout.IGNORED}
    check_tensors(tensors, config, folder / WEIGHTS_NAME)
    dtype = common_dtype(tensors)
    same = {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}
    return Taken(name, config, same, speculators.named_verifier(raw))


def import_drafter(folder: Path, out: Path, target: str | None = None) -> Taken:
    """Write a drafter folder of any layout as one that `dflash eval` and `dflash train --init-from` read.

    Args:
        folder: What to import.
        out: A folder that does not exist yet.
        target: As for `read_drafter`.

    Raises:
        CheckpointError: as `read_drafter` says.
        TargetError: the target cannot be found.
        ConfigError: `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give a folder that does not")
    taken = read_drafter(folder, target)
    config = zlab_config(taken.config, common_dtype(taken.tensors))
    write_folder(out, taken.tensors, {CONFIG_NAME: json_bytes(config)})
    return taken
