"""Checkpoints of a run, `RUN/checkpoints/step-000100/`: servable, and enough to resume bit for bit.

    config.json, model.safetensors    the drafter in bf16, in the layout that servers load
    trainer/state.safetensors         float32 master weights and optimizer moments
    trainer/state.json                step, sampler position, settings, digests of each file and of itself

A checkpoint is written into a hidden folder, flushed, and renamed, so that it is whole or absent. The newest
one is found by what is whole, not by its name.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import CheckpointError
from dflash.files import digest_file, digest_json, fsync_path, json_bytes
from dflash.pretrained import CONFIG_NAME, WEIGHTS_NAME, write_drafter
from dflash.train.optim import Optimizer, moments_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.drafter import Drafter

FOLDER = "checkpoints"
BEST_NAME = "best"
# In a folder of their own: vLLM loads every *.safetensors file beside the model as weights.
TRAINER_FOLDER = "trainer"
STATE_NAME = f"{TRAINER_FOLDER}/state.json"
TENSORS_NAME = f"{TRAINER_FOLDER}/state.safetensors"
_DIGESTED = (CONFIG_NAME, WEIGHTS_NAME, TENSORS_NAME)
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class TrainState:
    """What a run needs beside tensors to go on as if it had never stopped."""

    step: int
    """Optimizer steps done."""
    sampler: dict[str, Any]
    """Position of the sampler behind the last consumed step."""
    settings: dict[str, Any]
    """Resolved settings that must not change within a run."""
    mix: dict[str, Any] | None = None
    """What has been counted of the length mix; None counts it from here."""
    best: dict[str, Any] | None = None
    """Step of the last evaluation, and step and value of the best walk; None before the first."""


def checkpoint_path(run: Path, step: int) -> Path:
    """Folder of the checkpoint behind `step` steps."""
    return run / FOLDER / f"step-{step:06d}"


def save_checkpoint(
    run: Path,
    drafter: Drafter,
    optimizer: Optimizer,
    state: TrainState,
    *,
    keep: int = 3,
    spared: int | None = None,
) -> Path:
    """Write a checkpoint and, once it is in place, remove what it makes superfluous.

    That is all but `keep - 1` older ones and that of step `spared`, and newer ones: a run goes on from its
    newest whole checkpoint, so those are damaged.

    Raises:
        CheckpointError: a weight is not finite.
        OSError: the disk is full, say; earlier checkpoints are untouched.
    """
    final = checkpoint_path(run, state.step)
    tmp = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    (tmp / TRAINER_FOLDER).mkdir(parents=True)
    try:
        write_drafter(drafter, tmp)
        save_file(_tensors(drafter, optimizer), tmp / TENSORS_NAME)
        _write_state(tmp, state)
        for path in (*tmp.rglob("*"), tmp):
            fsync_path(path)
        shutil.rmtree(final, ignore_errors=True)
        tmp.rename(final)
        fsync_path(final.parent)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    found = checkpoints(run)
    here = found.index(final)
    for path in (*found[:here], *found[here + keep :]):
        if spared is not None and path == checkpoint_path(run, spared):
            continue
        shutil.rmtree(path, ignore_errors=True)
    return final


def mark_best(run: Path, step: int | None) -> None:
    """Let `RUN/checkpoints/best` be a link to the checkpoint of this step; no link for None or 0."""
    link = run / FOLDER / BEST_NAME
    if not step:
        link.unlink(missing_ok=True)
        return
    name = checkpoint_path(run, step).name
    if link.is_symlink() and link.readlink().name == name:
        return
    tmp = link.with_name(f".{BEST_NAME}.tmp")
    tmp.unlink(missing_ok=True)
    tmp.symlink_to(name)  # relative, so that a run's folder can be moved
    tmp.replace(link)
    fsync_path(link.parent)


def best_checkpoint(run: Path) -> Path | None:
    """The whole checkpoint that a run marks as its best, or None."""
    link = run / FOLDER / BEST_NAME
    if not link.is_symlink():
        return None
    path = link.parent / link.readlink().name
    return path if is_whole(path) else None


def _write_state(folder: Path, state: TrainState) -> None:
    files = {name: digest_file(folder / name) for name in _DIGESTED}
    value = json.loads(json_bytes({**vars(state), "files": files}))
    (folder / STATE_NAME).write_bytes(json_bytes({**value, "digest": digest_json(value)}))


def _tensors(drafter: Drafter, optimizer: Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in drafter.named_parameters()}
    tensors = {f"master.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            tensors[f"optimizer.{names[parameter]}.{key}"] = torch.as_tensor(value)
    return {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}


def checkpoints(run: Path) -> list[Path]:
    """All checkpoint folders of a run, newest first, whole or not."""
    found = [path for path in (run / FOLDER).glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None where it has none yet.

    Raises:
        CheckpointError: there are checkpoints, but all of them are damaged.
    """
    found = checkpoints(run)
    whole = next((path for path in found if is_whole(path)), None)
    if found and whole is None:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {run / FOLDER} is whole; remove them to start afresh"
        )
    return whole


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint has the bytes that were written."""
    try:
        state = json.loads((checkpoint / STATE_NAME).read_bytes())
        if state.pop("digest") != digest_json(state):
            return False
        return all(digest_file(checkpoint / name) == state["files"][name] for name in _DIGESTED)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def load_state(checkpoint: Path) -> TrainState:
    """Read the state beside the tensors.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = checkpoint / STATE_NAME
    try:
        raw = json.loads(path.read_bytes())
        return TrainState(raw["step"], raw["sampler"], raw["settings"], raw.get("mix"), raw.get("best"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a training state ({error!r})") from error


def restore(checkpoint: Path, drafter: Drafter, optimizer: Optimizer) -> None:
    """Put master weights and optimizer moments back, exactly.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape.
    """
    path = checkpoint / TENSORS_NAME
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); resume from an earlier checkpoint"
        ) from error
    parameters = dict(drafter.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_take(tensors, f"master.{name}", parameter.shape, path))
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            key: _take(tensors, f"optimizer.{name}.{key}", () if key == "step" else parameter.shape, path).to(
                parameter.device
            )
            for key in moments_of(optimizer, parameter)
        }
    if tensors:
        raise CheckpointError(f"{path} holds unknown tensors, e.g. {min(tensors)}; it is of another drafter")


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.shape != shape:
        found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
        raise CheckpointError(f"{path}: {name} is {found}, this run needs {tuple(shape)}")
    return tensor
