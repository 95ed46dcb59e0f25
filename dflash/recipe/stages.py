"""The stages of a recipe: which command does the work, what it reads and leaves, what counts as a change.

A stage's inputs are known by content, its settings by the values that its command resolves, defaults
included. What a stage leaves is found again by its name: the digest of both is part of it, so that changed
settings or data never meet the output of others, and former ones find theirs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stage:
    """One step of a recipe."""

    name: str
    table: str
    """Table of the recipe with its settings; without that table the stage is left out."""
    command: str
    """Name of the command, below `dflash`."""
    kind: str
    """What it leaves: `file`, `cache`, `run`, `folder`, or `text`, what the command prints."""
    place: str
    """Name below the recipe's folder; `{}` stands for the digest."""
    inputs: Mapping[str, str]
    """Parameter to kind of what is read: `target`, `data`, `cache`, `drafter`, `run`, or `file`."""
    wires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where a parameter comes from that the table leaves out: the first there is of keys of `[run]` and, with
    an `@`, outputs of stages."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that a recipe must not set, and what they are."""
    free: frozenset[str] = frozenset()
    """Parameters that decide how the work is done, not what comes of it: changing them makes nothing anew."""
    again: frozenset[str] = frozenset()
    """Parameters with which finished work is gone on with, in the same place."""
    needs: frozenset[str] = frozenset()
    """Parameters without which the command does nothing, beside those that it calls required."""
    without: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Parameters that are neither wired nor needed where the table gives this one."""
    coarse: frozenset[str] = frozenset()
    """Parameters of which only counts whether they are given."""

    @property
    def by_digest(self) -> bool:
        """Whether the name of the output carries the digest."""
        return "{}" in self.place


_EXTRACT_FREE = frozenset(
    {"tokens_per_batch", "shard_mb", "max_bad", "max_divergence", "tp", "order", "force", "nproc"}
)
_TRAIN_FREE = frozenset(
    {
        *(
            "save_every",
            "keep",
            "eval_every",
            "keep_best",
            "log",
            "max_bad_steps",
            "skip_corrupt",
            "parallel",
        ),
        *("max_wait", "on_starved", "window_bytes", "nproc", "activation_checkpointing", "compile"),
    }
)
_ASKING = frozenset({"server", "concurrency", "retries", "timeout", "rate_limit", "batch_size"})

STAGES = (
    Stage(
        "regenerate",
        "regenerate",
        "regenerate",
        "file",
        "answers-{}.jsonl",
        inputs={"target": "target", "data": "data"},
        wires={"target": ("target",), "data": ("data",)},
        free=_ASKING - {"server"},
        coarse=frozenset({"server"}),
    ),
    Stage(
        "plan",
        "extract",
        "extract",
        "text",
        "plan.txt",
        inputs={"target": "target", "data": "data"},
        wires={"target": ("target",), "data": ("@regenerate", "data")},
        fixed={"plan": True, "probe": False, "append": False},
        free=_EXTRACT_FREE,
    ),
    Stage(
        "extract",
        "extract",
        "extract",
        "cache",
        "cache-{}",
        inputs={"target": "target", "data": "data"},
        wires={"target": ("target",), "data": ("@regenerate", "data")},
        fixed={"plan": False, "probe": False, "append": False},
        free=_EXTRACT_FREE,
    ),
    Stage(
        "train",
        "train",
        "train",
        "run",
        "train-{}",
        inputs={"cache": "cache", "init_from": "drafter"},
        wires={"cache": ("@extract",)},
        fixed={"resume": True},
        free=_TRAIN_FREE,
        again=frozenset({"max_minutes"}),
    ),
    Stage(
        "eval",
        "eval",
        "eval",
        "text",
        "eval.json",
        inputs={"target": "target", "drafters": "drafter", "data": "data"},
        wires={"target": ("target",), "drafters": ("@train",), "data": ("holdout",)},
        fixed={"as_json": True, "markdown": False},
        free=frozenset({"plot"}),
        needs=frozenset({"target", "drafters"}),
        without={"server": frozenset({"target", "drafters"})},
    ),
    Stage(
        "export",
        "export",
        "export",
        "folder",
        "export",
        inputs={"source": "drafter", "target": "target"},
        wires={"source": ("@train",), "target": ("target",)},
    ),
    Stage(
        "report",
        "report",
        "report",
        "file",
        "report.html",
        inputs={"runs": "run", "evals": "file"},
        wires={"runs": ("@train",), "evals": ("@eval",)},
    ),
)
NAMES = tuple(stage.name for stage in STAGES)
RUN_KEYS = ("out", "target", "data", "holdout")
"""Keys of `[run]`."""
TABLES = ("run", *dict.fromkeys(stage.table for stage in STAGES))


def stages_of(tables: Mapping[str, Any]) -> tuple[Stage, ...]:
    """The stages whose tables are there, in the order in which they run."""
    return tuple(stage for stage in STAGES if stage.table in tables)
