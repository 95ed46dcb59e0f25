"""`run-state.json`: what each stage was last made from, and what it left. It is only ever replaced."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError
from dflash.files import publish_json
from dflash.progress import warn

STATE_NAME = "run-state.json"
_FORMAT = 1
_ORPHAN_S = 180.0
"""How long the stage of a killed run may take to save and end."""


@dataclass
class Record:
    """The last start of a stage."""

    settings: dict[str, Any]
    inputs: dict[str, Any]
    out: str
    """Path or URL of what it leaves."""
    argv: list[str]
    """Of its command."""
    done: bool = False
    forced: bool = False
    """Whether it was begun anew because `--force` said so."""
    output: Any = None
    """Identity of what it left, once it is done."""
    began: str = ""
    seconds: float = 0.0
    said: list[str] = field(default_factory=list)
    """What the command printed."""


@dataclass
class RunState:
    """Everything that is remembered between two starts."""

    stages: dict[str, Record] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    """Digests of files, as `FileDigests` keeps them."""

    def save(self, folder: Path) -> None:
        """Replace the file in one step."""
        stages = {name: asdict(record) for name, record in self.stages.items()}
        publish_json(folder / STATE_NAME, {"format": _FORMAT, "stages": stages, "files": self.files})


def load_state(folder: Path) -> RunState:
    """Read the state of a folder; that of a new one is empty.

    One that is damaged counts as none: every stage looks at what is there anyway, and says so.
    """
    path = folder / STATE_NAME
    try:
        value = json.loads(path.read_bytes())
        if value["format"] > _FORMAT:
            raise ConfigError(f"{path} was written by a newer dflash; install that, or give another --out")
        return RunState({name: Record(**r) for name, r in value["stages"].items()}, dict(value["files"]))
    except FileNotFoundError:
        return RunState()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn(f"{path} cannot be used ({error!r}); every stage looks anew at what is there")
        return RunState()


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Keep other runs off a folder for the length of the block.

    There are two locks: of the run, and of its stage, which the stage's command inherits and so keeps where
    the run is killed.

    Returns:
        The file descriptor that holds the lock of the stage.

    Raises:
        ConfigError: another run is at work there.
    """
    names = (".dflash-run.lock", ".dflash-stage.lock")
    run, stage = (os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644) for name in names)
    try:
        if not _taken(run):
            raise ConfigError(
                f"another `dflash run` is at work in {folder}; wait for it, or give another --out"
            )
        _wait_for(stage, folder)
        yield stage
    finally:
        os.close(stage)
        os.close(run)


def _taken(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _wait_for(stage: int, folder: Path) -> None:
    """Wait until a stage of a run that was killed has saved what it has, and is gone."""
    if _taken(stage):
        return
    warn(f"a stage of a run that was killed is still ending in {folder}; waiting for it")
    deadline = time.monotonic() + _ORPHAN_S
    while not _taken(stage):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"a stage of a run that was killed still works in {folder}; end its process, then run again"
            )
        time.sleep(0.1)
