"""Acceptance by position in the block, drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash.evaluate.figures import EvalReport
from dflash.train.mixplot import new_figure, save_figure


def plot_positions(path: Path, reports: Mapping[str, EvalReport]) -> None:
    """Draw the share of cycles that accepted each position, a line a drafter.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(4.0)
    axis = figure.subplots()
    for name, report in reports.items():
        shares = report.total.by_position(report.block_size - 1)
        axis.plot(
            range(1, len(shares) + 1), shares, marker="o", label=f"{name}: tau {report.total.walk_tau:.2f}"
        )
    axis.set(xlabel="position behind the anchor", ylabel="share of cycles that accepted it", ylim=(0, 1))
    axis.legend(frameon=False)
    save_figure(path, figure)
