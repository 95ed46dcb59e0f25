"""`dflash cache transcode`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash.cache.codec_error import CODECS
from dflash.commands.common import CACHE, NEW_CACHE


@click.command()
@click.argument("cache_folder", metavar="CACHE", type=CACHE)
@click.option("--codec", required=True, type=click.Choice(CODECS), help="Codec of the new cache.")
@click.option("--out", required=True, type=NEW_CACHE, help="Folder or URL of the new cache.")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def transcode(cache_folder: Path, codec: str, out: Path, jobs: int | None, *, as_json: bool) -> None:
    """Write the samples of a cache into another one, in another codec, without the target.

    raw and lossless become any codec; what int8 and fp8 have lost does not come back. Rerunning the same
    command goes on where it stopped. The source is only read.

    \b
    dflash cache transcode cache --codec int8 --out cache-int8
    """
    from dflash.cache.push import push_made
    from dflash.cache.transcode import transcode as run

    done = run(cache_folder, out, codec, jobs)
    push_made(out)
    click.echo(json.dumps(done.plain(), indent=2) if as_json else done.text())
