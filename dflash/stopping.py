"""Being asked to stop: SIGTERM and Ctrl-C finish what is under way, instead of cutting it off."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class StopFlag:
    """Set by a signal."""

    name: str | None = None


def exit_code(name: str) -> int:
    """Exit code of a process that a signal has ended: `SIGINT` gives 130, `SIGTERM` 143."""
    return 128 + signal.Signals[name].value


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Within the block, SIGTERM and SIGINT ask for a stop behind the current step; a second one acts now."""
    flag = StopFlag()

    def note(number: int, _frame: object) -> None:
        if flag.name is not None:
            raise KeyboardInterrupt
        flag.name = signal.Signals(number).name

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield flag
        return
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
