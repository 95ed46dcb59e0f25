"""`dflash cache ...`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash.commands.common import PATH


@click.group()
def cache() -> None:
    """Look at and look after a cache."""


@cache.command()
@click.argument("cache_folder", metavar="CACHE", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(cache_folder: Path, *, as_json: bool) -> None:
    """Identity, size, length mix and completeness of a cache.

    \b
    dflash cache info cache
    """
    from dflash.cache.info import cache_info, format_info

    figures = cache_info(cache_folder)
    click.echo(json.dumps(figures, indent=2) if as_json else format_info(figures))
