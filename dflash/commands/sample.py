"""`dflash sample`."""

from __future__ import annotations

import json
from typing import Any

import click

from dflash.commands.common import CACHE, PATH, config_option, holdout_option, options


@click.command()
@click.argument("cache", type=CACHE)
@options(
    config_option,
    click.option(
        "--settings",
        multiple=True,
        metavar="KEY=VALUE,...",
        help="A row of the table: flags of `dflash train` about the order, and supply.  "
        "[default: stratified mixed and bucketed, shuffle 30/90, fifo 10/60]",
    ),
    holdout_option,
    click.option("--ranks", default=8, show_default=True, help="Ranks that share a step."),
    click.option("--draws", default=2000, show_default=True, help="Micro-batches to simulate."),
    click.option(
        "--producer",
        default="corpus",
        show_default=True,
        help="Order of arrival at a live queue: corpus, longest-first, shortest-first or mixed.",
    ),
    click.option("--losses", type=PATH, help="A run whose loss by bucket predicts the roughness."),
    click.option("--plot", type=PATH, help="Draw each bucket's share over time: OUT.png, .svg or .html."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)
def sample(*, settings: tuple[str, ...], holdout: float, as_json: bool, **flags: Any) -> None:
    """Show what settings of the sampler would do with a cache, from its index alone.

    What is held out from training is left out here too, by the same rule.

    \b
    dflash sample cache
    dflash sample cache --producer longest-first --plot mix.png \\
      --settings sampler=fifo,compose=bucketed,min-ready=10,max-ready=60 --settings compose=mixed
    """
    from dflash.train.holdout import HoldoutConfig
    from dflash.train.preview import PreviewConfig, preview
    from dflash.train.variants import DEFAULT_TEXTS

    texts = tuple(settings) or DEFAULT_TEXTS
    report = preview(PreviewConfig(settings=texts, holdout=HoldoutConfig(holdout), **flags))
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table())
