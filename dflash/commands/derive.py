"""`dflash cache merge`, `subset`, `rebucket`, `drop-taps`: caches made from others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash.commands.common import CACHE, NEW_CACHE, IntList, options

if TYPE_CHECKING:
    from dflash.cache.derive import Derived

_cache_argument = click.argument("cache_folder", metavar="CACHE", type=CACHE)
_made_options = options(
    click.option("--out", required=True, type=NEW_CACHE, help="Folder or URL of the new cache."),
    click.option(
        "--shard-mb",
        type=click.IntRange(min=1),
        default=256,
        show_default=True,
        help="Size at which a shard that is written anew is committed, MiB.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


@click.command()
@click.argument("caches", metavar="CACHE...", type=CACHE, nargs=-1, required=True)
@_made_options
def merge(caches: tuple[Path, ...], out: Path, shard_mb: int, *, as_json: bool) -> None:
    """One cache with the samples of several of the same identity; duplicates come once.

    Their corpora may differ. Rerunning the same command goes on where it stopped.

    \b
    dflash cache merge cache-a cache-b --out cache
    """
    from dflash.cache.recipes import merge as run

    _finish(out, run(caches, out, shard_mb << 20), as_json=as_json)


@click.command()
@_cache_argument
@click.option(
    "--where", help="Which samples, by id, length, bucket, supervised, share (of supervised tokens)."
)
@click.option("--sample", "share", default=1.0, show_default=True, help="Share of those to take.")
@click.option("--seed", default=0, show_default=True, help="Decides which ones --sample takes.")
@_made_options
def subset(cache_folder: Path, out: Path, shard_mb: int, *, as_json: bool, **choice: Any) -> None:
    """A cache with some of the samples; shards that are kept whole become hard links.

    Rerunning the same command goes on where it stopped.

    \b
    dflash cache subset cache --where "length < 1024 and bucket = 512" --sample 0.1 --out small
    """
    from dflash.cache.recipes import Choice
    from dflash.cache.recipes import subset as run

    _finish(out, run(cache_folder, out, Choice(**choice), shard_mb << 20), as_json=as_json)


@click.command()
@_cache_argument
@click.option("--edges", required=True, type=IntList(), help="Upper ends of the new length buckets.")
@_made_options
def rebucket(cache_folder: Path, edges: tuple[int, ...], out: Path, shard_mb: int, *, as_json: bool) -> None:
    """The same samples in other length buckets.

    Rerunning the same command goes on where it stopped.

    \b
    dflash cache rebucket cache --edges 512,1024,2048,3072 --out rebucketed
    """
    from dflash.cache.recipes import rebucket as run

    _finish(out, run(cache_folder, out, edges, shard_mb << 20), as_json=as_json)


@click.command("drop-taps")
@_cache_argument
@click.option(
    "--keep", required=True, type=IntList(), help="0-based target layers to keep, in their new order."
)
@_made_options
def drop_taps(cache_folder: Path, keep: tuple[int, ...], out: Path, shard_mb: int, *, as_json: bool) -> None:
    """The same samples with fewer tapped layers.

    Rerunning the same command goes on where it stopped.

    \b
    dflash cache drop-taps cache --keep 1,17,27 --out three-taps
    """
    from dflash.cache.recipes import drop_taps as run

    _finish(out, run(cache_folder, out, keep, shard_mb << 20), as_json=as_json)


def _finish(out: Path, made: Derived, *, as_json: bool) -> None:
    """Send what was made for a URL there, and say what was made."""
    from dflash.cache.push import push_made

    push_made(out)
    click.echo(json.dumps(made.to_json(), indent=2) if as_json else made.text())
