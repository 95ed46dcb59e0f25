"""Whether a stage runs, and why: what it would be made from now against what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash.files import digest_json
from dflash.recipe.identity import FileDigests, identity
from dflash.recipe.reading import Recipe, at_default, command_line, producer, resolved, values_of
from dflash.recipe.stages import Stage
from dflash.recipe.state import Record

_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Job:
    """A stage with everything that decides what comes of it."""

    stage: Stage
    values: dict[str, Any]
    """By parameter, as they are given to the command."""
    settings: dict[str, Any]
    """By parameter, defaults included; no input, no output, nothing that is decided by `dflash run`."""
    by_itself: frozenset[str]
    """Settings that have their command's default."""
    inputs: dict[str, Any]
    """Identity by parameter; None where an input is not there, or not whole."""
    waits_for: tuple[str, ...]
    """Stages whose output is an input, and will be made anew first."""
    out: str | None
    """Where its output is, or will be; None where its name waits for an input."""
    named: bool
    """Whether the recipe says where the output is."""


@dataclass(frozen=True)
class Decision:
    """What happens to a stage."""

    run: bool
    why: str
    fresh: bool = False
    """Whether what is there goes aside first."""
    repair: bool = False
    """Whether a cache is repaired first."""

    @property
    def word(self) -> str:
        """For the terminal."""
        return "run" if self.run else "skip"


def job_of(
    recipe: Recipe,
    stage: Stage,
    places: Mapping[str, str | None],
    digests: FileDigests,
    pending: frozenset[str] = frozenset(),
) -> Job:
    """Resolve a stage.

    Args:
        recipe: The recipe.
        stage: One of its stages.
        places: Outputs of the stages before it.
        digests: Of files.
        pending: Stages that would be made anew before this one.

    Raises:
        DflashError: a setting is refused, or an input that no stage makes is not there.
    """
    values, params = values_of(recipe, stage, places), resolved(recipe, stage)
    sources = {key: producer(recipe, stage, key) for key in stage.inputs}
    waits = tuple(dict.fromkeys(name for name in sources.values() if name in pending))
    inputs = {
        key: _input(kind, values[key], digests, sources[key], pending)
        for key, kind in stage.inputs.items()
        if values.get(key) is not None or sources[key]
    }
    leave = {*stage.inputs, *stage.fixed, "out", "config"}
    settings = _plain(
        {
            key: value is not None if key in stage.coarse else value
            for key, value in params.items()
            if key not in leave
        }
    )
    named = "out" in values and stage.kind != "text"
    by_itself = at_default(recipe, stage, params)
    deciding = {key: v for key, v in settings.items() if key not in stage.free | stage.again | by_itself}
    out = str(values["out"]) if named else _place(recipe, stage, deciding, inputs)
    return Job(stage, values, settings, by_itself, inputs, waits, out, named)


def _input(kind: str, value: Any, digests: FileDigests, source: str | None, pending: frozenset[str]) -> Any:
    """Identity of an input; None for the output of a stage that is not there, or will be another."""
    if source is not None:
        there = value is not None and ("://" in value or Path(value).exists())
        if source in pending or not there:
            return None
    return identity(kind, value, digests)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _place(recipe: Recipe, stage: Stage, deciding: dict[str, Any], inputs: dict[str, Any]) -> str | None:
    """Where the output goes. Defaults are not part of its name, or a new flag would make everything anew."""
    name = stage.place
    if stage.by_digest:
        if None in inputs.values():
            return None
        name = stage.place.format(digest_json([stage.name, deciding, inputs])[:10])
    return str(recipe.out.absolute() / name)


def arguments(recipe: Recipe, job: Job) -> list[str]:
    """The command line of a job behind `dflash`."""
    stage, values = job.stage, dict(job.values)
    if stage.kind != "text":
        values["out"] = job.out
    elif any(param.name == "out" for param in recipe.commands[stage.command].params):
        values.setdefault("out", str(recipe.out.absolute() / "cache"))  # of the plan: whose disk is looked at
    return [stage.command, *command_line(recipe.commands[stage.command], values, stage.table)]


def decide(job: Job, record: Record | None, damage: str | None, found: Any, *, forced: bool) -> Decision:
    """Whether a job runs.

    Args:
        job: The stage as it is asked for now.
        record: Of its last start, if it was ever started.
        damage: What is wrong with what is at its place, if anything.
        found: Identity of what is there.
        forced: Whether `--force` names it.
    """
    begun = record is not None and not record.done
    if forced and not (record and begun and record.forced and record.out == job.out):
        return Decision(run=True, why="--force", fresh=True)
    if job.waits_for:
        return Decision(run=True, why=f"behind {', '.join(job.waits_for)}")
    if record is None or begun or changed(job, record):
        return Decision(run=True, why=_unfinished(job, record))
    if damage is not None or found != record.output:
        return _made_again(job, damage)
    return Decision(run=False, why="; ".join(["whole and unchanged", *_without_effect(job, record)]))


def _unfinished(job: Job, record: Record | None) -> str:
    """Why something that is not there yet is made."""
    if record is None:
        return "has not run yet"
    return "; ".join(changed(job, record)) or "was begun and did not end; goes on"


def _made_again(job: Job, damage: str | None) -> Decision:
    decision = Decision(run=True, why=damage or f"{job.out} is not what this stage left there")
    kind, gone = job.stage.kind, damage is not None and damage.endswith("is not there")
    if kind == "cache":
        return replace(decision, repair=not gone)
    return replace(decision, fresh=not gone and (kind != "run" or damage is not None))


def changed(job: Job, record: Record) -> list[str]:
    """What decides the output and is not as it was; a few words each."""
    new = {key for key in job.by_itself if key not in record.settings}  # flags that a newer dflash has
    lines = [
        f"{_key(job, key)}: was {_short(record.settings.get(key))}, now {_short(value)}"
        for key, value in sorted(job.settings.items())
        if key not in job.stage.free | new and record.settings.get(key) != value
    ]
    lines += [
        f"{_key(job, key)} has changed"
        for key in sorted(job.inputs.keys() | record.inputs.keys())
        if record.inputs.get(key) != job.inputs.get(key)
    ]
    if job.named and record.out != job.out:
        lines.append(f"{job.stage.table}.out: was {record.out}, now {job.out}")
    return lines


def _without_effect(job: Job, record: Record) -> list[str]:
    return [
        f"{_key(job, key)} has changed, which has no effect on finished work"
        for key in sorted(job.stage.free)
        if key in record.settings and record.settings[key] != job.settings.get(key)
    ]


def _key(job: Job, key: str) -> str:
    return f"{job.stage.table}.{key.replace('_', '-')}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
