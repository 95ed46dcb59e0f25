"""What a terminal shows of a training run: how far it is, how it learns, and the mix of lengths by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from typing_extensions import Self

    from dflash.train.record import RunLog


class Dashboard(Progress):
    """`Progress` that draws with rich on a terminal; elsewhere, plain lines as ever.

    Args:
        log: The run's figures.
        total: Tokens of the whole run.
        done: Tokens that were consumed before this start.
        enabled: Only the first rank shows anything.
        console: Where to draw; standard error by default.
    """

    def __init__(
        self, log: RunLog, total: int, *, done: int = 0, enabled: bool = True, console: Console | None = None
    ) -> None:
        super().__init__("train", total, done=done, enabled=enabled)
        self._log, self._console = log, console
        self._live: Live | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self.on_terminal:
            from rich.console import Console
            from rich.live import Live

            console = self._console or Console(stderr=True)
            self._live = Live(console=console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[arg-type]
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def on_terminal(self) -> bool:
        """Whether there is a terminal to draw on."""
        return super().on_terminal or (self._stream is not None and self._console is not None)

    def draw(self, *, final: bool = False) -> None:
        """Show the figures as they are now."""
        if self._live is not None:
            self._live.update(self.picture(), refresh=True)
        else:
            super().draw(final=final)

    def picture(self) -> RenderableType:
        """Progress, the run's headline, and a bar a bucket whose mark is its quota."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(max(self.total, 1), min(self.done, self.total), width=24), Text(self.figures())
        )
        mix = Table.grid(padding=(0, 1))
        for edge, share, owed in self._log.recent_mix():
            # a bar is full at twice its quota, so that half full is right for every bucket
            bar = ProgressBar(2.0, min(share / owed, 2.0) if owed else 0.0, width=24)
            mix.add_row(bar, Text(f"to {edge:,} tokens"), Text(f"{share:.1%} of {owed:.1%} owed"))
        return Group(head, Text(self._log.headline()), mix)
