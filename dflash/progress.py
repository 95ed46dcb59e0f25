"""Progress of long work: done/total, rate, time left; a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_PLAIN_LINE_EVERY_S = 15.0


class Progress:
    """A progress bar as a context manager.

    Args:
        label: What is being done, e.g. `"extract"`.
        total: Units of work to do.
        unit: What the rate counts, e.g. `"tokens"`.
        done: Units that were already done when this run started (they do not count towards the rate).
        enabled: False silences it (every rank but the first).
    """

    def __init__(
        self, label: str, total: int, unit: str = "tokens", *, done: int = 0, enabled: bool = True
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self._start_done = done
        self._stream: TextIO | None = sys.stderr if enabled else None
        self._note = ""
        self.started = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self.started = self._last_line = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(final=True)

    @property
    def on_terminal(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._stream is not None and self._stream.isatty()

    @property
    def rate(self) -> float:
        """Units a second since this run started."""
        return (self.done - self._start_done) / max(time.monotonic() - self.started, 1e-9)

    def advance(self, units: int, note: str = "") -> None:
        """Count `units` more as done; `note` is shown behind the figures."""
        self.done += units
        self._note = note or self._note
        now = time.monotonic()
        if now - self._last_line >= (0.1 if self.on_terminal else _PLAIN_LINE_EVERY_S):
            self._last_line = now
            self._write()

    def text(self) -> str:
        """The line as it would be shown now."""
        return f"{self.figures()} | {self._note}" if self._note else self.figures()

    def figures(self) -> str:
        """The line without its note."""
        share = self.done / self.total if self.total else 1.0
        rate = self.rate
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        parts = [
            f"{self.label} {share:4.0%}",
            f"{self.done:,}/{self.total:,} {self.unit}",
            f"{rate:,.0f} {self.unit}/s",
            f"{format_seconds(left)} left"
            if self.done < self.total
            else format_seconds(time.monotonic() - self.started),
        ]
        return " | ".join(parts)

    def _write(self, *, final: bool = False) -> None:
        if self._stream is None:
            return
        if self.on_terminal:
            self.draw(final=final)
        else:
            self._stream.write(self.text() + "\n")
            self._stream.flush()

    def draw(self, *, final: bool = False) -> None:
        """Show the line on a terminal, over the one before it; for good at the end."""
        assert self._stream is not None  # `_write` has looked
        filled = int(24 * self.done / self.total) if self.total else 24
        bar = "█" * min(filled, 24) + "░" * (24 - min(filled, 24))
        self._stream.write(f"\r\x1b[K{bar} {self.text()}" + ("\n" if final else ""))
        self._stream.flush()


def format_seconds(seconds: float) -> str:
    """`75.2` as `1:15`; hours where there are any."""
    if seconds == float("inf"):
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def warn(text: str) -> None:
    """A line about something that the work goes on in spite of."""
    sys.stderr.write(f"Warning: {text}\n")
    sys.stderr.flush()
