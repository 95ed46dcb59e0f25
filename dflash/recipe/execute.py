"""Running a stage as a command of its own: its ranks, its memory and its signals are its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dflash.progress import warn

STOPPING = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    """Exit code; that of a signal (130, 143) where one was passed on."""
    output: list[str] = field(default_factory=list)
    """Lines that it printed."""
    signal: int = 0
    """128 and the number of the signal with which this process was asked to stop meanwhile, if it was."""


class Passing:
    """Signals that are passed on to a process."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def note(self, number: int, _frame: object) -> None:
        """Remember a signal and hand it on."""
        self.number = number
        if self.process is not None:
            self.process.send_signal(number)


@contextmanager
def _passed_on() -> Iterator[Passing]:
    passing = Passing()
    before = {number: signal.signal(number, passing.note) for number in STOPPING}
    try:
        yield passing
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute(arguments: Sequence[str], *, lock: int | None, quiet: bool = False) -> Outcome:
    """Run `dflash ARGUMENTS` in a process of its own.

    Args:
        arguments: The command line behind `dflash`.
        lock: File descriptor that the process inherits, if any.
        quiet: Whether what it prints is kept without being shown at its end; errors and progress always are.
    """
    line = [sys.executable, "-m", "dflash.recipe.child", str(os.getpid()), *arguments]
    inherited = () if lock is None else (lock,)
    # A file, not a pipe: where this process is killed, the stage can still print while it saves and ends.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed, _passed_on() as passing:
        # A session of its own: Ctrl-C would reach it from the terminal and from here, and two mean "at once".
        with subprocess.Popen(line, stdout=printed, pass_fds=inherited, start_new_session=True) as process:
            passing.process = process
            if passing.number is not None:
                process.send_signal(passing.number)
            process.wait()
        printed.seek(0)
        text = printed.read()
        if not quiet:
            sys.stdout.write(text)
            sys.stdout.flush()
        signalled = 0 if passing.number is None else 128 + passing.number
        return Outcome(_code(process.returncode, signalled), text.splitlines(), signalled)


def _code(code: int, signalled: int) -> int:
    """Exit code of the run for that of a stage; behind a signal that of the signal, whatever came of it."""
    if code == 0 or signalled:
        return code and signalled
    if code < 0:
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        warn(f"the stage was ended by {signal.Signals(-code).name}{hint}")
        return 128 - code
    return code
