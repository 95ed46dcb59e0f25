"""`dflash cache ...`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from dflash.commands.common import PATH

_cache_argument = click.argument("cache_folder", metavar="CACHE", type=PATH)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: min(os.cpu_count() or 1, 8),
    help="Threads that read shards.  [default: one a core, at most 8]",
)


@click.group()
def cache() -> None:
    """Look at and look after a cache."""


@cache.command()
@_cache_argument
@_json_option
def info(cache_folder: Path, *, as_json: bool) -> None:
    """Identity, size, length mix and completeness of a cache.

    \b
    dflash cache info cache
    """
    from dflash.cache.info import cache_info, format_info

    figures = cache_info(cache_folder)
    click.echo(json.dumps(figures, indent=2) if as_json else format_info(figures))


@cache.command()
@_cache_argument
@click.option("--deep", is_flag=True, help="Read every byte, not only the structure.")
@_jobs_option
@_json_option
def verify(cache_folder: Path, *, deep: bool, jobs: int, as_json: bool) -> None:
    """Check that a cache is whole; exit code 1 and a table of what is bad where it is not.

    \b
    dflash cache verify cache
    dflash cache verify cache --deep --jobs 8
    """
    from dflash.cache.verify import verify as run

    report = run(cache_folder, deep=deep, jobs=jobs)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.text())
    if not report.whole:
        raise SystemExit(1)


@cache.command()
@_cache_argument
@click.option("--quick", is_flag=True, help="Look at the structure alone instead of reading every byte.")
@_jobs_option
@_json_option
def repair(cache_folder: Path, *, quick: bool, jobs: int, as_json: bool) -> None:
    """Set aside what is bad, and list the samples to make again.

    The command that made the cache, run again, then restores just those.

    \b
    dflash cache repair cache
    """
    from dflash.cache.repair import repair as run

    report = run(cache_folder, deep=not quick, jobs=jobs)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.text())
