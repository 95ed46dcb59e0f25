"""`dflash demo`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash.commands.common import PATH


@click.command()
@click.option("--out", default="demo", show_default=True, type=PATH, help="Folder for target, cache and run.")
def demo(out: Path) -> None:
    """Do the whole job on SmolLM2-135M-Instruct: extract, train, evaluate, and print one table.

    \b
    dflash demo
    """
    from dflash.demo.run import run_demo

    click.echo(run_demo(out))
