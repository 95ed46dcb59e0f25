"""`dflash cache ...`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from dflash.commands.common import CACHE
from dflash.commands.derive import drop_taps, merge, rebucket, subset
from dflash.commands.transcode import transcode

_cache_argument = click.argument("cache_folder", metavar="CACHE", type=CACHE)
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


for _command in (merge, subset, rebucket, drop_taps, transcode):
    cache.add_command(_command)


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
@click.argument("url")
@_json_option
def push(cache_folder: Path, url: str, *, as_json: bool) -> None:
    """Send a cache to an object store; rerunning the command goes on where it stopped.

    \b
    dflash cache push cache s3://bucket/cache
    """
    from dflash.cache.info import format_bytes
    from dflash.cache.push import push_cache

    count = push_cache(cache_folder, url)
    text = f"{url}: {format_bytes(count)} of shards, index and manifest are there"
    click.echo(json.dumps({"url": url, "shard_bytes": count}) if as_json else text)


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


@cache.command("ls")
@_cache_argument
@click.option(
    "--where", help="Which samples, by id, length, bucket, supervised, share (of supervised tokens)."
)
@click.option(
    "--sort",
    type=click.Choice(["bucket", "length", "id", "supervised"]),
    default="bucket",
    show_default=True,
    help="Order; ties by length, then id.",
)
@click.option("--limit", type=click.IntRange(min=0), help="Rows at most.  [default: all]")
@_json_option
def ls_command(cache_folder: Path, where: str | None, sort: str, limit: int | None, *, as_json: bool) -> None:
    """The samples of a cache, one a line; with --json, one JSON object a line.

    \b
    dflash cache ls cache --where "bucket = 512 and share < 0.2" --limit 20
    """
    from dflash.cache.listing import LIST_HEAD, list_line, list_samples

    if not as_json:
        click.echo(LIST_HEAD)
    for sample in list_samples(cache_folder, where=where, sort=sort, limit=limit):
        click.echo(json.dumps(sample) if as_json else list_line(sample))


@cache.command()
@_cache_argument
@click.argument("sample_id", metavar="ID", type=int)
@_json_option
def show(cache_folder: Path, sample_id: int, *, as_json: bool) -> None:
    """Text, loss mask and norms of one sample; supervised text is green, or in [[ ]] without colours.

    \b
    dflash cache show cache 1234567890
    """
    from dflash.cache.listing import show_sample

    shown = show_sample(cache_folder, sample_id)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    click.echo(json.dumps(shown.to_json()) if as_json else shown.text(colour=colour), color=colour or None)


@cache.command()
@click.argument("one", metavar="CACHE", type=CACHE)
@click.argument("other", metavar="OTHER", type=CACHE)
@_json_option
def diff(one: Path, other: Path, *, as_json: bool) -> None:
    """Identity and samples of two caches beside each other; exit code 1 where they differ.

    \b
    dflash cache diff cache-a cache-b
    """
    from dflash.cache.listing import diff as run

    found = run(one, other)
    click.echo(json.dumps(vars(found) | {"same": found.same}, indent=2) if as_json else found.text())
    if not found.same:
        raise SystemExit(1)
