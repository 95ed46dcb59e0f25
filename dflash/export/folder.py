"""Reading and writing folders of any layout: all or nothing, with an exact check of the tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import CheckpointError, ConfigError
from dflash.files import fsync_path
from dflash.pretrained import WEIGHTS_NAME

INDEX_NAME = f"{WEIGHTS_NAME}.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        CheckpointError: there is none.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent} holds no drafter ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or from several behind an index.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        if not (folder / INDEX_NAME).exists():
            return dict(load_file(folder / WEIGHTS_NAME))
        parts = sorted(set(read_json(folder / INDEX_NAME)["weight_map"].values()))
        if any(Path(part).name != part for part in parts):
            raise CheckpointError(f"{folder / INDEX_NAME} names files outside its folder")
        return {name: tensor for part in parts for name, tensor in load_file(folder / part).items()}
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} holds no drafter ({error}); is it all there?") from error


def renamed(tensors: Mapping[str, Tensor], beginnings: Mapping[str, str]) -> dict[str, Tensor]:
    """The same tensors under names of another layout."""
    return {_renamed(name, beginnings): tensor for name, tensor in tensors.items()}


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    for before, after in beginnings.items():
        if name.startswith(before):
            return after + name[len(before) :]
    return name


def common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The narrowest dtype that holds all of them exactly."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))


def write_folder(out: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> None:
    """Write a folder that is whole or absent.

    Raises:
        ConfigError: `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; give a folder that does not")
    tmp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    tmp.mkdir(parents=True)
    try:
        save_file(dict(tensors), tmp / WEIGHTS_NAME, metadata={"format": "pt"})
        # safetensors lets only the owner read; a server may be another user
        (tmp / WEIGHTS_NAME).chmod(0o644)
        for name, data in files.items():
            (tmp / name).write_bytes(data)
        for path in (*tmp.iterdir(), tmp):
            fsync_path(path)
        tmp.rename(out)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    fsync_path(out.parent)
