"""Where figures go besides `metrics.jsonl`: TensorBoard, Weights & Biases, trackio, by the same names.

A name is that of the field in `metrics.jsonl`, with the slot or the bucket's upper edge behind it where the
field is a list: `loss`, `walk_tau`, `accuracy/1`, `loss_by_bucket/512`.
"""

from __future__ import annotations

import secrets
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash.errors import ConfigError
from dflash.files import publish_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

LOGGERS = ("tensorboard", "wandb", "trackio")
PROJECT = "dflash"


class Logger(Protocol):
    """Something that takes figures."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Take the figures of a step; a step may come twice, with other names."""

    def close(self) -> None:
        """Write out what is held back."""


class TensorBoard:
    """Event files in `RUN/tensorboard`.

    Args:
        run: The run's folder.
        done: Steps that were done before this start; events behind them are taken back.
    """

    def __init__(self, run: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=done + 1)

    def __str__(self) -> str:
        return "tensorboard"

    def log(self, step: int, figures: dict[str, float]) -> None:
        """A scalar a figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class Tracker:
    """Weights & Biases or trackio, which share an interface; a resumed run goes on in the same curves.

    Args:
        name: Of the package.
        run: What its `init` returned.
    """

    def __init__(self, name: str, run: Any) -> None:
        self._name, self._run = name, run

    def __str__(self) -> str:
        return self._name

    @classmethod
    def wandb(cls, run: Path, config: Mapping[str, Any]) -> Self:
        """A run at Weights & Biases, named after the folder; its id is kept in `RUN/wandb-id`."""
        package = import_module("wandb")
        return cls(
            "wandb",
            package.init(
                project=PROJECT,
                id=_kept_id(run, "wandb"),
                name=run.name,
                dir=str(run),
                config=dict(config),
                resume="allow",
            ),
        )

    @classmethod
    def trackio(cls, run: Path, config: Mapping[str, Any]) -> Self:
        """A run in trackio's local store, named after the folder and the id in `RUN/trackio-id`.

        By its name alone trackio tells runs apart, and folders of other runs may be called the same.
        """
        package = import_module("trackio")
        name = f"{run.name}-{_kept_id(run, 'trackio')}"
        settings = {"project": PROJECT, "name": name, "config": dict(config), "resume": "allow"}
        return cls("trackio", package.init(**settings))

    def log(self, step: int, figures: dict[str, float]) -> None:
        """All figures at once."""
        self._run.log(figures, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _kept_id(run: Path, logger: str) -> str:
    """What a run is called at a logger, the same at every start."""
    path = run / f"{logger}-id"
    if not path.exists():
        publish_bytes(path, secrets.token_hex(4).encode())
    return path.read_text()


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers that are unknown or not installed, before a run begins.

    Raises:
        ConfigError: names the logger and how to install it.
    """
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"--log {name!r} is not one of {', '.join(LOGGERS)}")
        if find_spec(name) is None:
            raise ConfigError(f"--log {name} needs the package {name}: pip install 'dflash-trainer[{name}]'")


def open_loggers(names: Sequence[str], run: Path, config: Mapping[str, Any], done: int) -> list[Logger]:
    """The loggers of these names, behind `done` steps of a run; only the first rank opens any.

    Raises:
        ConfigError: one cannot start, because nobody is logged in, say.
    """
    makers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoard(run, done),
        "wandb": lambda: Tracker.wandb(run, config),
        "trackio": lambda: Tracker.trackio(run, config),
    }
    return [_opened(name, makers[name]) for name in names]


def _opened(name: str, make: Callable[[], Logger]) -> Logger:
    try:
        return make()
    except Exception as error:
        raise ConfigError(f"--log {name} cannot start ({error}); leave it out, or see to it") from error


def scalars(line: Mapping[str, Any], edges: Sequence[int]) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl` under flat names; what is missing or no number is left out.

    Args:
        line: The line.
        edges: Upper edges of the buckets.
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if name == "step":
            continue
        if isinstance(value, dict):
            inner = {f"{name}_{key}": part for key, part in value.items()}
            found |= scalars(inner, edges)
        elif isinstance(value, (list, tuple)):
            labels = edges if len(value) == len(edges) and _of_buckets(name) else range(1, len(value) + 1)
            found |= {f"{name}/{label}": part for label, part in zip(labels, value, strict=False)}
        else:
            found[name] = value
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _of_buckets(name: str) -> bool:
    return name.endswith("_by_bucket") or name in {"mix_shares", "mix_quota"}
