"""From stage to stage: skip what is whole and unchanged, run the rest, remember both after every one.

The state is written before a stage begins and after it ends. A stage that was cut off is begun again by the
same command, which goes on where it stopped, because the name of its output depends on its settings and
inputs alone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from dflash.errors import ConfigError
from dflash.files import publish_bytes
from dflash.progress import warn
from dflash.recipe.checks import check_settings
from dflash.recipe.decide import Decision, Job, arguments, changed, decide, job_of
from dflash.recipe.execute import Outcome
from dflash.recipe.identity import FileDigests, output
from dflash.recipe.reading import Recipe
from dflash.recipe.stages import Stage
from dflash.recipe.state import Record, RunState, load_state, locked
from dflash.recipe.summary import SUMMARY_NAME, Line, summary

_PLAN = "plan"


class Execute(Protocol):
    """Runs a command; `dflash.recipe.execute.execute` does."""

    def __call__(self, arguments: Sequence[str], *, lock: int | None, quiet: bool = False) -> Outcome:
        """Run `dflash ARGUMENTS`."""


Show = Callable[[str], object]
"""Prints a line."""


@dataclass(frozen=True)
class Options:
    """Which stages are looked at, and how."""

    start: str | None = None
    """The first of them; what is before it stays as it is."""
    only: str | None = None
    force: tuple[str, ...] = ()
    """Stages that are made anew."""
    probe: bool = False
    """Measure the target for the plan."""


class StageEnded(Exception):  # noqa: N818 - not an error of its own: the stage has said why
    """A stage did not end well."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(name, code)
        self.name, self.code = name, code


def selected(recipe: Recipe, options: Options) -> tuple[Stage, ...]:
    """The stages that are looked at.

    Raises:
        ConfigError: an option names a stage that the recipe does not have.
    """
    names = [stage.name for stage in recipe.stages]
    asked = {"--from": [options.start], "--only": [options.only], "--force": options.force}
    for flag, values in asked.items():
        for name in values:
            if name is not None and name not in names:
                raise ConfigError(f"{flag} {name}: this recipe has the stages {', '.join(names)}")
    if options.start and options.only:
        raise ConfigError("--from and --only exclude each other; give one of them")
    first = names.index(options.start) if options.start else 0
    stages = [s for s in recipe.stages[first:] if options.only in (None, s.name)]
    if left_out := [name for name in options.force if name not in [stage.name for stage in stages]]:
        raise ConfigError(f"--force {left_out[0]}: --from or --only leaves that stage out")
    return tuple(stages)


@dataclass
class Pipeline:
    """One start of a recipe."""

    recipe: Recipe
    options: Options
    state: RunState
    execute: Execute
    show: Show
    lock: int | None = None
    places: dict[str, str | None] = field(default_factory=dict)
    """Output of each stage so far."""
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Go through the stages that are left out, for their outputs."""
        self.digests = FileDigests(self.state.files)
        self.stages = selected(self.recipe, self.options)
        self._checked = False
        for stage in self.recipe.stages:
            if stage == self.stages[0]:
                break
            record = self.state.stages.get(stage.name)
            self.places[stage.name] = record.out if record else self._job(stage).out

    def look(self, stage: Stage, pending: frozenset[str] = frozenset()) -> tuple[Job, Decision]:
        """What a stage would be, and whether it runs."""
        job = self._job(stage, pending)
        self.places[stage.name] = job.out
        record = self.state.stages.get(stage.name)
        found, damage = None, f"{job.out} is not there"
        if record and record.done and job.out == record.out and not changed(job, record):
            found, problem = output(stage.kind, job.out, self.digests)
            return job, self._decided(job, problem, found)
        return job, self._decided(job, damage, found)

    def go_through(self) -> None:
        """Run what has to run.

        Raises:
            StageEnded: a stage did not end well, or the run was told to stop behind it.
            DflashError: a setting or an input cannot be used.
        """
        for stage in self.stages:
            job, decision = self.look(stage)
            if stage.name == _PLAN and decision.run:
                decision = self._decided_with_extract(decision)
            self.show(f"{stage.name:<11}{decision.word:<5}{decision.why}")
            if decision.run:
                self._check_once()
                self._check_inputs(job)
                self._run(job, decision)
            record = self.state.stages.get(stage.name)
            self.lines.append(Line(stage.name, decision.run, decision.why, job.out or "", record))

    def _job(self, stage: Stage, pending: frozenset[str] = frozenset()) -> Job:
        return job_of(self.recipe, stage, self.places, self.digests, pending)

    def _decided(self, job: Job, damage: str | None, found: Any) -> Decision:
        record, forced = self.state.stages.get(job.stage.name), job.stage.name in self.options.force
        return decide(job, record, damage, found, forced=forced)

    def _decided_with_extract(self, decision: Decision) -> Decision:
        """A plan is made for an extraction that will run; without one, what is lost of it is not missed."""
        following = self.stages[1 + [stage.name for stage in self.stages].index(_PLAN) :]
        extract = next((stage for stage in following if stage.name == "extract"), None)
        if extract is None or _PLAN in self.options.force or self.look(extract)[1].run:
            return decision
        return Decision(run=False, why="extract has nothing to do")

    def _check_once(self) -> None:
        """All settings, before the first stage begins."""
        if not self._checked:
            check_settings(self.recipe, self.stages)
            self._checked = True

    def _check_inputs(self, job: Job) -> None:
        for key, value in job.inputs.items():
            if value is None:
                raise ConfigError(
                    f"[{job.stage.table}] {key}: {job.values[key] or 'what an earlier stage makes'} is not "
                    "there, or not whole; run the stage that makes it first"
                )

    def _run(self, job: Job, decision: Decision) -> None:
        name, record = job.stage.name, self.state.stages.get(job.stage.name)
        there = self._there_already(job, record, decision)
        if not there:
            self._make_room(job, decision, record)
        argv = arguments(self.recipe, job)
        if name == _PLAN and self.options.probe:
            argv.insert(1, "--probe")
        forced = name in self.options.force
        began = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = Record(job.settings, job.inputs, str(job.out), argv, forced=forced, began=began)
        self.state.stages[name] = record
        self._save()
        outcome = Outcome(0) if there else self._executed(job, argv, record, repair=decision.repair)
        if outcome.code == 0:
            self._finish(job, record, outcome)
        if outcome.code or outcome.signal:
            raise StageEnded(name, outcome.code or outcome.signal)

    def _executed(self, job: Job, argv: list[str], record: Record, *, repair: bool) -> Outcome:
        started = time.perf_counter()
        if repair:
            outcome = self.execute(["cache", "repair", "--quick", str(job.out)], lock=self.lock)
            if outcome.code or outcome.signal:
                return Outcome(outcome.code or outcome.signal)
        outcome = self.execute(argv, lock=self.lock, quiet=job.stage.name == "eval")
        record.seconds = round(time.perf_counter() - started, 1)
        return outcome

    def _finish(self, job: Job, record: Record, outcome: Outcome) -> None:
        """Record a stage as done; what it left must be there."""
        if job.stage.kind == "text":
            publish_bytes(Path(record.out), "".join(f"{line}\n" for line in outcome.output).encode())
        record.output, damage = output(job.stage.kind, record.out, self.digests)
        if damage is not None:
            raise ConfigError(f"{job.stage.name} has ended, but {damage}")
        record.said = [] if job.stage.kind == "text" else outcome.output
        record.done = True
        self._save()

    def _save(self) -> None:
        self.state.files = self.digests.known()
        self.state.save(self.recipe.out)

    def _there_already(self, job: Job, record: Record | None, decision: Decision) -> bool:
        """Whether a file that is only ever whole stands where a kill came between its making and our record.

        Its name is that of these settings and inputs, or it is where this very stage was begun.
        """
        answers = job.stage.kind == "file" and job.stage.by_digest and not decision.fresh
        if not answers or not job.out or not Path(job.out).exists():
            return False
        begun = record is not None and not record.done and record.out == job.out
        return begun or not job.named

    def _make_room(self, job: Job, decision: Decision, record: Record | None) -> None:
        """What stands in the way goes aside; an untouched export of our own is replaced."""
        if job.out is None or job.stage.kind == "text" or not (decision.fresh or job.stage.kind == "folder"):
            return
        if "://" in job.out:
            raise ConfigError(f"{job.out} is to be made anew: remove it, or give another `out`")
        path = Path(job.out)
        if job.stage.kind == "folder" and record and record.done and record.out == job.out:
            found, _ = output("folder", job.out, self.digests)
            if found == record.output:
                shutil.rmtree(path)
                return
        for there in (path, path.with_name(f"{path.name}.partial")):
            if there.exists() or there.is_symlink():
                warn(f"what was there goes aside: {_moved_aside(there)}")


def _moved_aside(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(other)
    return other


def run_recipe(recipe: Recipe, options: Options, execute: Execute, show: Show) -> int:
    """Do what a recipe asks for, and report.

    Returns:
        The exit code: 0, or that of the stage that did not end well.

    Raises:
        DflashError: a setting or an input cannot be used.
    """
    selected(recipe, options)
    try:
        recipe.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot use {recipe.out} as the folder of a run: {error.strerror}") from error
    with locked(recipe.out) as lock:
        pipeline = Pipeline(recipe, options, load_state(recipe.out), execute, show, lock)
        try:
            pipeline.go_through()
        except StageEnded as ended:
            show(
                f"{ended.name} did not end well (exit code {ended.code}); run the same command again to go on"
            )
            return ended.code
        text = summary(pipeline.lines)
        publish_bytes(recipe.out / SUMMARY_NAME, f"{text}\n".encode())
    show(f"\n{text}")
    return 0


def preview(recipe: Recipe, options: Options, execute: Execute, show: Show) -> int:
    """Say what would run and why, and what extraction would take; writes nothing and loads no weights.

    Returns:
        The exit code of the extraction's plan, 0 without one.

    Raises:
        DflashError: a setting or an input cannot be used.
    """
    pipeline = Pipeline(recipe, options, load_state(recipe.out), execute, show)
    pending: set[str] = set()
    plan: Job | None = None
    for stage in pipeline.stages:
        job, decision = pipeline.look(stage, frozenset(pending))
        if stage.name == _PLAN:
            plan = job
            continue
        show(f"{stage.name:<11}{decision.word:<5}{decision.why}; {job.out or stage.place.format('...')}")
        pending |= {stage.name} if decision.run else set()
    if plan is None or "extract" not in pending:
        return 0
    if plan.waits_for:
        show("extraction is planned when regenerate is done")
        return 0
    show("")
    probe = ["--probe"] if options.probe else []
    command, *flags = arguments(recipe, plan)
    return execute([command, *probe, *flags], lock=None).code
