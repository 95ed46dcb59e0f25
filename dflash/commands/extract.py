"""`dflash extract`."""

from __future__ import annotations

from typing import Any

import click

from dflash.cache.codec_error import CODECS
from dflash.commands.common import (
    NEW_CACHE,
    IntList,
    NameMap,
    config_option,
    nproc_option,
    options,
    started_ranks,
    trust_option,
)


@click.command()
@options(
    config_option,
    click.option("--target", required=True, help="Folder, GGUF file or hub name of the target model."),
    click.option(
        "--data", required=True, multiple=True, help="Conversations: file, folder, pattern or data set."
    ),
    click.option("--out", required=True, type=NEW_CACHE, help="Folder or URL of the cache."),
    click.option("--taps", type=IntList(), help="0-based target layers to tap.  [default: 5, evenly spread]"),
    click.option("--max-length", default=3072, show_default=True, help="Tokens at which a sample is cut."),
    click.option(
        "--bucket-edges",
        type=IntList(),
        help="Upper ends of the length buckets.  [default: 256,512,1024,2048,3072 up to --max-length]",
    ),
    click.option(
        "--min-supervised", default=2, show_default=True, help="Samples with fewer supervised tokens go."
    ),
    click.option(
        "--thinking",
        type=click.Choice(["keep", "strip"]),
        default="keep",
        show_default=True,
        help="The assistant's reasoning: train on it, or remove it first.",
    ),
    click.option("--last-turn-only", is_flag=True, help="Supervise the last assistant turn alone."),
    click.option(
        "--column-map", type=NameMap(), default=(), help="Take columns under the names that rows have."
    ),
    click.option("--tokens-per-batch", default=8192, show_default=True, help="Tokens of one forward pass."),
    click.option(
        "--dtype", default="bfloat16", show_default=True, help="bfloat16 or float32; compute and storage."
    ),
    click.option(
        "--codec",
        type=click.Choice(CODECS),
        default="raw",
        show_default=True,
        help="How states are stored; lossless takes about 0.69 of raw, int8 and fp8 half of it.",
    ),
    click.option(
        "--max-divergence",
        default=0.02,
        show_default=True,
        help="KL in nats a token by which int8 or fp8 may change the target's output.",
    ),
    click.option(
        "--shard-mb", default=256, show_default=True, help="Size at which a shard is committed, MiB."
    ),
    click.option(
        "--plan", is_flag=True, help="Say what a run would do and take, and stop; loads no weights."
    ),
    click.option("--probe", is_flag=True, help="With --plan: run the target for 30 s to tell the hours."),
    click.option("--append", is_flag=True, help="Add the data to a finished cache of other data."),
    click.option(
        "--max-bad",
        default=0.001,
        show_default=True,
        help="Share of samples that may be left out for NaN or Inf.",
    ),
    click.option(
        "--tp",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="GPUs that hold one replica of the target.",
    ),
    click.option(
        "--order",
        default="longest-first",
        show_default=True,
        help="longest-first, or mixed: for a `dflash train --follow` beside it.",
    ),
    click.option("--force", is_flag=True, help="Start even where the disk cannot hold the result."),
    nproc_option,
    trust_option,
)
def extract(nproc: int | None, plan: bool, probe: bool, **flags: Any) -> None:
    """Run the target once over a corpus and keep its hidden states in a cache.

    Rerunning the same command goes on where it stopped.

    \b
    dflash extract --target Qwen/Qwen3-8B --data chats.jsonl --out cache
    dflash extract --target Qwen/Qwen3-8B --data chats.jsonl --out cache --plan --probe
    """
    flags["data"] = tuple(flags["data"])
    if plan or probe:
        _show_plan(flags, probe=probe)
        return
    if started_ranks(nproc):
        return
    from dflash.extract.pipeline import ExtractConfig
    from dflash.extract.pipeline import extract as run
    from dflash.stopping import exit_code
    from dflash.world import World

    world = World.from_env()
    report = run(ExtractConfig.from_flags(**flags), world)
    if world.is_main:
        click.echo(report.text())
    if report.stopped:
        raise SystemExit(exit_code(report.stopped))


def _show_plan(flags: dict[str, Any], *, probe: bool) -> None:
    from dflash.extract.preview import PROBE_SECONDS, preview
    from dflash.extract.settings import ExtractConfig

    click.echo(
        preview(ExtractConfig.from_flags(**flags), probe_seconds=PROBE_SECONDS if probe else 0.0).text()
    )
