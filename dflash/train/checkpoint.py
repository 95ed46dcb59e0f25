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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import CheckpointError
from dflash.files import digest_file, digest_json, fsync_path, json_bytes
from dflash.pretrained import CONFIG_NAME, WEIGHTS_NAME, write_tensors
from dflash.progress import warn
from dflash.train.optim import Optimizer, moments_of
from dflash.train.parallel import like, whole

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.drafter import Drafter, DrafterConfig

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


class Snapshot(NamedTuple):
    """Everything of a run that is a tensor, whole and on the CPU."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    """`master.*` and `optimizer.*`, float32."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The drafter's tensors by their own names."""
        start = "master."
        return {name[len(start) :]: tensor for name, tensor in self.tensors.items() if name.startswith(start)}


def snapshot(drafter: Drafter, optimizer: Optimizer, *, wanted: bool = True) -> Snapshot:
    """Put the state of a run together. Where it is split among ranks, all of them call this.

    Args:
        drafter: The network.
        optimizer: Its optimizer.
        wanted: Whether this rank writes it; the others get an empty one.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in drafter.named_parameters()}
    parts = {f"master.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            parts[f"optimizer.{names[parameter]}.{key}"] = torch.as_tensor(value)
    tensors = {}
    for name, part in parts.items():  # one at a time: the whole need not fit beside its parts
        tensor = whole(part)
        if wanted:
            tensors[name] = tensor.to("cpu").contiguous()
    return Snapshot(drafter.config, tensors)


def save_checkpoint(
    run: Path, taken: Snapshot, state: TrainState, *, keep: int = 3, spared: int | None = None
) -> Path:
    """Write a checkpoint and, once it is in place, remove what it makes superfluous.

    That is all but `keep - 1` older ones and that of step `spared`, and newer ones: a run goes on from its
    newest whole checkpoint, so those are damaged.

    Raises:
        CheckpointError: a weight is not finite.
        OSError: the disk is full, say; earlier checkpoints are untouched.
        SafetensorError: the same, while tensors were written.
    """
    final = checkpoint_path(run, state.step)
    tmp = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    (tmp / TRAINER_FOLDER).mkdir(parents=True)
    try:
        write_tensors(taken.weights, taken.config, tmp)
        save_file(taken.tensors, tmp / TENSORS_NAME)
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


def checkpoints(run: Path) -> list[Path]:
    """All checkpoint folders of a run, newest first, whole or not."""
    found = [path for path in (run / FOLDER).glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None where it has none yet.

    A damaged one is passed over, with a warning that names it.

    Raises:
        CheckpointError: there are checkpoints, but all of them are damaged.
    """
    found = checkpoints(run)
    for path in found:
        if (damage := damage_of(path)) is None:
            return path
        warn(f"checkpoint {path} is passed over: {damage}")
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {run / FOLDER} is whole; remove them to start afresh"
        )
    return None


def resolve_drafter(path: Path) -> Path:
    """The folder to load: `path`, or of the run at `path` the best checkpoint, else the newest whole one.

    A run marks its best checkpoint with `--keep-best`.

    Raises:
        CheckpointError: there is neither.
    """
    if (path / CONFIG_NAME).exists():
        return path
    newest = best_checkpoint(path) or latest_checkpoint(path)
    if newest is None:
        raise CheckpointError(f"{path} is neither a drafter folder nor a run with a checkpoint")
    return newest


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint has the bytes that were written."""
    return damage_of(checkpoint) is None


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint by the digests that it carries, or None where it is whole."""
    try:
        state = json.loads((checkpoint / STATE_NAME).read_bytes())
        if state.pop("digest") != digest_json(state):
            return f"{STATE_NAME} has changed"
        if checkpoint_path(checkpoint, state["step"]).name != checkpoint.name:
            return f"it is of step {state['step']}, not of that of its name"
        for name in _DIGESTED:
            if digest_file(checkpoint / name) != state["files"][name]:
                return f"{name} has changed or was cut short"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{STATE_NAME} is damaged"
    return None


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
            parameter.copy_(like(_take(tensors, f"master.{name}", parameter.shape, path), parameter))
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            key: _moment(tensors, f"optimizer.{name}.{key}", parameter, path)
            for key in moments_of(optimizer, parameter)
        }
    if tensors:
        raise CheckpointError(f"{path} holds unknown tensors, e.g. {min(tensors)}; it is of another drafter")


def _moment(tensors: dict[str, Tensor], name: str, parameter: Tensor, path: Path) -> Tensor:
    if name.endswith(".step"):
        return _take(tensors, name, (), path).to(parameter.device)
    return like(_take(tensors, name, parameter.shape, path), parameter)


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None or tensor.shape != shape:
        found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
        raise CheckpointError(f"{path}: {name} is {found}, this run needs {tuple(shape)}")
    return tensor
