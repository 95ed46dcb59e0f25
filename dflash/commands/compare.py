"""`dflash compare`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash.commands.common import PATH


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option("--plot", type=PATH, help="Draw the curves over each other: OUT.png, .svg or .html.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(runs: tuple[Path, ...], plot: Path | None, *, as_json: bool) -> None:
    """Put trainings beside each other: settings that differ, cost, loss, roughness, acceptance.

    Another cache, seed or drafter is shown first. Losses and acceptance are means of the last tenth of the
    steps; roughness is the standard deviation of the loss's change from step to step after warm-up.

    \b
    dflash compare runs/a runs/b --plot curves.png
    """
    from dflash.train.run_comparison import compare_runs

    report = compare_runs(runs, plot)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.text())
