"""What a terminal shows of a run, and that nothing but a terminal gets it."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from dflash.train.dashboard import Dashboard
from dflash.train.record import RunLog


@pytest.fixture
def log(tmp_path) -> RunLog:
    """A run's log behind two steps and a walk."""
    log = RunLog(tmp_path, (128, 4096), (0.25, 0.75), enabled=True)
    for step in (1, 2):
        log.add({"step": step, "loss": 3.0, "anchor_tau": 1.5}, np.array([[30, 70]]), 0.1, held=[60, 140])
    log.add_evaluation({"kind": "evaluation", "step": 2, "walk_tau": 1.87})
    return log


def test_a_terminal_shows_progress_figures_and_a_bar_a_bucket(log) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Dashboard(log, 1000, console=console) as bar:
        bar.advance(400, log.summary(0.0))
    text = console.file.getvalue()
    for part in (
        "train  40% | 400/1,000 tokens",
        "tokens/s",
        " left",
        "step 2, loss 3.000, anchor tau 1.50, walk tau 1.87, waiting for data 0.0%",
        "to 128 tokens",
        "30.0% of 25.0% owed",
        "70.0% of 75.0% owed",
    ):
        assert part in text, part
    assert text.endswith("\n\x1b[?25h")  # what comes next starts a line, and the cursor is back


def test_elsewhere_there_are_plain_lines(log, capsys) -> None:
    with Dashboard(log, 1000) as bar:
        bar.advance(1000, log.summary(0.0))
    (line,) = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line
    assert line.startswith("train 100% | 1,000/1,000 tokens")
    assert "walk tau 1.87" in line
    assert "mix ▅▄" in line


def test_other_ranks_show_nothing(log, capsys) -> None:
    with Dashboard(log, 1000, enabled=False) as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


def test_a_dashboard_can_be_drawn_before_the_first_step(tmp_path) -> None:
    empty = RunLog(tmp_path, (128, 4096), (0.0, 1.0), enabled=True)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Dashboard(empty, 0, console=console):
        pass
    assert "step 0" in console.file.getvalue()
