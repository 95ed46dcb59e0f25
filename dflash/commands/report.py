"""`dflash report`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash.commands.common import PATH


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, default=Path("report.html"), show_default=True, help="The page.")
@click.option(
    "--eval",
    "evals",
    type=PATH,
    multiple=True,
    help="Output of `dflash eval --json`; eval.json in a run's folder is read by itself.",
)
@click.option(
    "--samples",
    default=3,
    show_default=True,
    help="Texts a run that are shown with accepted runs in colour; 0 for none.",
)
def report(runs: tuple[Path, ...], out: Path, evals: tuple[Path, ...], samples: int) -> None:
    """Write one page about trainings: curves, length mix, acceptance, sample texts, settings.

    The page is one file that loads nothing from anywhere. Several runs are drawn over each other.

    \b
    dflash report runs/a
    dflash report runs/a runs/b --eval eval.json --out report.html
    """
    from dflash.report.run import write_report

    write_report(runs, out, evals=evals, samples=samples)
    click.echo(out)
