"""`dflash run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dflash.commands.common import PATH, options

_STAGE = "STAGE"


@click.command("run")
@options(
    click.argument("recipe", required=False, type=PATH),
    click.option("--out", type=PATH, help="Folder for everything that is made."),
    click.option("--target", help="Folder, GGUF file or hub name of the target model."),
    click.option("--data", multiple=True, help="Conversations to train on: file, folder, pattern, data set."),
    click.option("--holdout", multiple=True, help="Prompts to evaluate on."),
    click.option(
        "--set",
        "overrides",
        metavar="TABLE.KEY=VALUE",
        multiple=True,
        help="A value of the recipe, e.g. train.lr=1e-3; may be repeated.",
    ),
    click.option(
        "--from",
        "start",
        metavar=_STAGE,
        help="Begin with this stage; the ones before it stay as they are, whatever has changed.",
    ),
    click.option("--only", metavar=_STAGE, help="This stage alone."),
    click.option(
        "--force",
        metavar=_STAGE,
        multiple=True,
        help="Make this stage's output anew; the old one goes aside.",
    ),
    click.option("--plan", is_flag=True, help="Say what would be done, why, and what it takes; and stop."),
    click.option("--probe", is_flag=True, help="Run the target for 30 s too, to tell the hours."),
)
def run_command(recipe: Path | None, overrides: tuple[str, ...], *, plan: bool, **flags: Any) -> None:
    """Do the whole job: regenerate, plan, extract, train, eval, export, report.

    RECIPE is a TOML file with a table for each stage; stages without a table are left out, and without a
    recipe it is extract, train and, with --holdout, eval. What is whole and whose inputs and settings are
    unchanged is skipped. Rerunning the same command goes on where it was stopped or killed.

    \b
    dflash run recipe.toml --out runs/a
    dflash run recipe.toml --out runs/a --set train.lr=1e-3 --plan
    dflash run --target Qwen/Qwen3-8B --data chats.jsonl --holdout heldout.jsonl --out runs/b
    """
    from dflash.errors import ConfigError
    from dflash.recipe.execute import execute
    from dflash.recipe.reading import load_recipe
    from dflash.recipe.run import Options, preview, run_recipe
    from dflash.world import launched_by_torchrun

    if launched_by_torchrun():
        raise ConfigError("`dflash run` starts the ranks of its stages itself; start it without torchrun")
    root = click.get_current_context().find_root().command
    assert isinstance(root, click.Group)
    given = {
        "out": flags["out"] and str(flags["out"]),
        "target": flags["target"],
        "data": list(flags["data"]),
        "holdout": list(flags["holdout"]),
    }
    plans = Options(flags["start"], flags["only"], flags["force"], flags["probe"])
    whole = load_recipe(root.commands, recipe, overrides, given)
    code = (preview if plan else run_recipe)(whole, plans, execute, click.echo)
    if code:
        sys.exit(code)
