"""Finished or running trainings, read back from their folders: `run.json` and `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash.errors import ConfigError
from dflash.provenance import RECORD_NAME

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """What a run has recorded."""

    path: Path
    config: dict[str, Any]
    """Resolved configuration."""
    steps: list[dict[str, Any]]
    """One line of figures a step, at least one."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One line of figures a walk over the held-out samples."""
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """One line a step that changed nothing because it was not finite."""

    @property
    def tail(self) -> list[dict[str, Any]]:
        """The last tenth of the steps, at least one."""
        return self.steps[-max(len(self.steps) // 10, 1) :]

    @property
    def after_warmup(self) -> list[dict[str, Any]]:
        """The steps behind the warm-up of the learning rate, and behind the first tenth in any case."""
        warmup = float(self.config.get("optim", {}).get("warmup", 0.0))
        return self.steps[int(len(self.steps) * max(warmup, 0.1)) :]

    @property
    def walk(self) -> dict[str, Any]:
        """The last walk over held-out samples; empty for a run without one."""
        return self.evaluations[-1] if self.evaluations else {}

    @property
    def bucket_edges(self) -> list[int]:
        """Upper edges of the cache's buckets."""
        return list(self.config["bucket_edges"])

    def mean(self, name: str) -> float | None:
        """Mean of a figure over the tail, without the steps that have none."""
        return _mean([step[name] for step in self.tail if step.get(name) is not None])

    def mean_by(self, name: str) -> list[float | None]:
        """Means of a list-valued figure over the tail; None for entries that no step of it has."""
        columns = zip(*(step[name] for step in self.tail), strict=True)
        return [_mean([value for value in column if value is not None]) for column in columns]


def load_run(path: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it is no run of `dflash train`, has no steps yet, or a line cannot be read.
    """
    record = path / RECORD_NAME
    try:
        config = dict(json.loads(record.read_bytes())["config"])
    except OSError as error:
        raise ConfigError(f"{path} is not a run: {record.name} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{record} is not the record of a run ({error!r})") from error
    if "bucket_edges" not in config:
        raise ConfigError(f"{record} is not the record of a `dflash train` of this version: no bucket_edges")
    lines = _load_lines(path / METRICS_NAME)
    evaluations = [line for line in lines if line.get("kind") == "evaluation"]
    steps = [line for line in lines if "kind" not in line]
    if not steps:
        raise ConfigError(f"{path} holds no steps of `dflash train`, so there is nothing to show")
    skipped = [line for line in lines if line.get("kind") == "skipped"]
    return Run(path, config, steps, evaluations, skipped)


def bucket_losses(path: Path, edges: Sequence[int]) -> list[float]:
    """Each bucket's mean loss over the last tenth of a run, `[buckets]`; the run's mean where it saw none.

    Raises:
        ConfigError: the folder is no run, or one on a cache with other buckets.
    """
    run = load_run(path)
    losses = run.mean_by("loss_by_bucket")
    if (theirs := run.bucket_edges) != list(edges):
        raise ConfigError(
            f"--losses {path}: its buckets end at {theirs}, those of this cache at {list(edges)}; "
            "give a run on a cache with the same buckets"
        )
    whole = run.mean("loss") or 0.0
    return [whole if loss is None else loss for loss in losses]


def _load_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            figures = json.loads(line)
            figures["step"]
            if "kind" not in figures:
                figures["loss"], figures["tokens"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # a run that is still going, or was killed, may have written half of its last line
            raise ConfigError(f"{path}: line {number} is not a step's figures ({error!r})") from error
        found.append(figures)
    return found


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
