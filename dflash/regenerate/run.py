"""Answer every conversation anew and keep what was answered, whatever happens."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from dflash.errors import CorpusError, ServerError
from dflash.extract.conversation import Message, Unusable
from dflash.progress import Progress
from dflash.regenerate.answers import Answer, looks_like_refusal
from dflash.regenerate.config import RegenerateConfig
from dflash.regenerate.journal import Journal
from dflash.regenerate.server import RequestFailed, Server
from dflash.regenerate.tasks import Task, load_tasks
from dflash.stopping import StopFlag, stop_signals

WINDOW = 4096
"""Conversations that are sorted by length together when the target here answers."""
_POLL_S = 0.2
_PARTING_S = 2.0
"""Seconds that requests under way get to end when the run does."""


@dataclass
class RegenerateReport:
    """What came of it."""

    out: Path
    rows: int = 0
    tokens: int = 0
    """Tokens of the answers, those of earlier starts included."""
    new_tokens: int = 0
    seconds: float = 0.0
    dropped: dict[str, int] = field(default_factory=dict)
    """Conversations left out, by reason."""
    refusals: int = 0
    """Answers of this start that begin as refusals do; they are kept."""
    stopped: str | None = None

    def text(self) -> str:
        """For the terminal."""
        if self.stopped:
            return f"stopped by {self.stopped}; run the same command again to go on"
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items()))
        rate = self.new_tokens / self.seconds if self.seconds else 0.0
        written = f"{self.rows:,} conversations, {self.tokens:,} tokens of answers ({rate:,.0f} tokens/s)"
        return (
            f"{written}: {self.out}\n"
            f"left out: {left_out or 'none'}; {self.refusals:,} answers begin like refusals"
        )


def regenerate(config: RegenerateConfig) -> RegenerateReport:
    """Write `config.out`, going on where an earlier start has ended.

    Raises:
        CorpusError: the data cannot be used.
        ConfigError: `out` is finished, or was begun with other settings or data.
        ServerError: the server is away or refuses everything; what was answered is kept.
        TargetError: the target cannot be loaded.
    """
    tasks, dropped = load_tasks(config.data)
    with Journal(config.out, config.identity()) as journal, stop_signals() as stop:
        _check_same_data(tasks, journal)
        left = [task for task in tasks if task.number not in journal.settled]
        run = _Run(config, journal, stop, RegenerateReport(config.out))
        started = time.perf_counter()
        with Progress("regenerate", len(tasks), "conversations", done=len(tasks) - len(left)) as bar:
            run.bar = bar
            failed = _by_server(run, left) if config.server else _by_target(run, left)
        run.report.seconds = time.perf_counter() - started
        run.report.stopped = stop.name
        if failed and stop.name is None:
            raise ServerError(
                f"{failed:,} of {len(tasks):,} conversations got no answer; the others are kept in "
                f"{journal.path}: run the same command again to ask for them once more"
            )
        if stop.name is None:
            run.report.rows = journal.finish()
        run.report.tokens = journal.tokens
        run.report.dropped = dict(dropped + journal.dropped)
        return run.report


def _check_same_data(tasks: Sequence[Task], journal: Journal) -> None:
    for number, name in journal.settled.items():
        if number >= len(tasks) or tasks[number].id != name:
            raise CorpusError(
                f"{journal.path} holds an answer to {name!r}, which is not conversation {number} of this "
                "data; give the data it was begun with, or another --out"
            )


@dataclass
class _Run:
    """What both ways of answering work with."""

    config: RegenerateConfig
    journal: Journal
    stop: StopFlag
    report: RegenerateReport
    bar: Progress | None = None

    def settle(self, task: Task, answers: Sequence[Answer]) -> None:
        """Keep a conversation, or say why not."""
        reasons = [a.reason_to_drop(keep_truncated=self.config.keep_truncated) for a in answers]
        tokens = sum(answer.tokens for answer in answers)
        self.report.refusals += sum(looks_like_refusal(answer.text) for answer in answers)
        self.report.new_tokens += tokens
        if reason := next(filter(None, reasons), None):
            self.drop(task, reason)
            return
        messages = task.prompt([answer.message() for answer in answers])
        row: dict[str, Any] = {"id": task.id, "messages": messages}
        self.journal.keep(task.number, row | ({} if task.kind is None else {"kind": task.kind}), tokens)
        self.advance()

    def drop(self, task: Task, reason: str) -> None:
        """Leave a conversation out."""
        self.journal.drop(task.number, task.id, reason)
        self.advance()

    def advance(self) -> None:
        """Show one more."""
        if self.bar is not None:
            seconds = max(time.monotonic() - self.bar.started, 1e-9)
            self.bar.advance(1, f"{self.report.new_tokens / seconds:,.0f} tokens/s")


def _by_server(run: _Run, tasks: Sequence[Task]) -> int:
    """Ask a server, many conversations at once; how many got no answer."""
    if not tasks:
        return 0
    render = None
    if run.config.api == "completions":
        from dflash.regenerate.local import Prompter  # loads torch, which a client need not

        render = Prompter(run.config).ids
    with (
        closing(Server(run.config, lambda: run.stop.name is not None, render)) as server,
        _Workers(run.config.concurrency, server) as workers,
    ):
        return _collect(run, workers, tasks)


class _Workers:
    """Threads that ask. Daemons: a process that is told to stop does not wait for answers under way."""

    def __init__(self, count: int, server: Server) -> None:
        self._server = server
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self.done: queue.Queue[tuple[Task, list[Answer] | Exception]] = queue.Queue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        self._server.give_up()
        deadline = time.monotonic() + _PARTING_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def submit(self, task: Task) -> None:
        """Have a conversation answered; it comes out of `done`."""
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self.done.put((task, list(_turns(task, self._server.answer))))
            except Exception as error:  # noqa: BLE001, PERF203 - handed to the thread that collects
                self.done.put((task, error))


def _collect(run: _Run, workers: _Workers, tasks: Sequence[Task]) -> int:
    waiting, failures = iter(tasks), _Failures(run)
    under_way = 0
    while run.stop.name is None:
        # Few more than can be asked at once: on a stop, what waits here is simply not asked.
        while under_way < run.config.concurrency + 1 and (task := next(waiting, None)) is not None:
            workers.submit(task)
            under_way += 1
        if not under_way:
            break
        try:
            task, outcome = workers.done.get(timeout=_POLL_S)  # wakes up to see a signal
        except queue.Empty:
            continue
        under_way -= 1
        if isinstance(outcome, Exception):
            failures.note(task, outcome)
        else:
            run.settle(task, outcome)
            failures.in_a_row = 0
    return failures.count


class _Failures:
    """Conversations without an answer; too many in a row mean that the server is away."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.count = self.in_a_row = 0

    def note(self, task: Task, error: Exception) -> None:
        """Count one.

        Raises:
            ServerError: the server is away.
            Exception: `error`, where it is not about this conversation alone.
        """
        if not isinstance(error, RequestFailed):
            raise error
        if error.for_good:
            self._run.drop(task, "refused_by_server")
            return
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        if self.in_a_row >= self._run.config.concurrency:
            raise ServerError(
                f"--server {self._run.config.server} stays away: {error}; {len(self._run.journal.settled):,} "
                "conversations are kept, run the same command again to go on"
            )


def _turns(task: Task, answer: Callable[[list[Message]], Answer]) -> Iterator[Answer]:
    """Answer turn after turn, each in the context of those before it; an empty one ends the conversation."""
    messages: list[Message] = []
    for _ in task.asked:
        given = answer(task.prompt(messages))
        yield given
        if not given.text.strip():
            return
        messages.append(given.message())


def _by_target(run: _Run, tasks: Sequence[Task]) -> int:
    """Let the target answer here; nothing fails."""
    if not tasks:
        return 0
    from dflash.regenerate.local import LocalTarget

    target = LocalTarget(run.config)
    for first in range(0, len(tasks), WINDOW):
        open_ = [(task, list[Answer]()) for task in tasks[first : first + WINDOW]]
        while open_ and run.stop.name is None:
            open_ = _round(run, target, open_)
    return 0


def _round(run: _Run, target: Any, open_: list[tuple[Task, list[Answer]]]) -> list[tuple[Task, list[Answer]]]:
    """One more turn for the conversations of about the shortest prompts; those that go on are given back."""
    prompts: list[tuple[list[int], Task, list[Answer]]] = []
    for task, answers in open_:
        try:
            ids = target.prompter.ids(task.prompt([answer.message() for answer in answers]))
        except Unusable as reason:
            run.drop(task, str(reason))
            continue
        prompts.append((ids, task, answers))
    prompts.sort(key=lambda entry: len(entry[0]))
    going: list[tuple[Task, list[Answer]]] = []
    for start in range(0, len(prompts), run.config.batch_size):
        some = prompts[start : start + run.config.batch_size]
        if run.stop.name is not None:
            break
        given = target.answers([ids for ids, _, _ in some], some[0][1].number)
        for answer, (_, task, answers) in zip(given, some, strict=True):
            answers.append(answer)
            if len(answers) < len(task.asked) and answer.text.strip():
                going.append((task, answers))
            else:
                run.settle(task, answers)
    return going
