"""The curves of several runs over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash.train.compare import FloatArray
from dflash.train.mixplot import new_figure, save_figure
from dflash.train.runs import Run

_SMOOTH = 20
"""Steps of the running mean at most; the steps themselves are drawn faintly."""


def plot_runs(path: Path, runs: Sequence[Run]) -> None:
    """Draw loss, acceptance, held-out walk and the mix's distance from its quota over the tokens consumed.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(10.0)
    loss, tau, walk, mix = figure.subplots(4, sharex=True)
    for number, run in enumerate(runs):
        tokens = np.cumsum([step["tokens"] for step in run.steps]) / 1e6
        style = {"color": f"C{number % 10}", "label": str(run.path)}
        _curve(loss, tokens, [step["loss"] for step in run.steps], style)
        _curve(tau, tokens, [step["anchor_tau"] or 1.0 for step in run.steps], style)
        _walks(walk, run, dict(zip([step["step"] for step in run.steps], tokens, strict=True)), style)
        mix.plot(tokens, [step["mix"]["variation"][0]["last"] for step in run.steps], linewidth=1, **style)
    loss.set(ylabel="loss", yscale="log")
    tau.set(ylabel="anchor tau")
    walk.set(ylabel="walk tau,\nheld-out samples")
    mix.set(ylabel="mix off quota,\nlast 30 draws", xlabel="million tokens", ylim=(0, None))
    loss.legend(frameon=False)
    save_figure(path, figure)


def _walks(axis: Any, run: Run, tokens: dict[int, float], style: dict[str, Any]) -> None:
    """The walks over held-out samples, a point each."""
    points = [(tokens[line["step"]], line["walk_tau"]) for line in run.evaluations if line["step"] in tokens]
    if points:
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, **style)


def _curve(axis: Any, tokens: FloatArray, values: Sequence[float], style: dict[str, Any]) -> None:
    axis.plot(tokens, values, linewidth=0.6, alpha=0.3, color=style["color"])
    width = min(_SMOOTH, 1 + len(values) // 10)
    means = np.convolve(values, np.full(width, 1 / width), "valid")
    axis.plot(tokens[width - 1 :], means, linewidth=1.6, **style)
