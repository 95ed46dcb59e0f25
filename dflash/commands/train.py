"""`dflash train`."""

from __future__ import annotations

from typing import Any

import click

from dflash.commands.common import (
    CACHE,
    PATH,
    config_option,
    holdout_option,
    nproc_option,
    options,
    started_ranks,
)


@click.command()
@options(
    config_option,
    click.option("--cache", required=True, type=CACHE, help="Cache to train from: a folder or URL."),
    click.option("--out", required=True, type=PATH, help="Folder of the run."),
    click.option("--init-from", type=PATH, help="Run or drafter folder to train further."),
    click.option("--block-size", default=16, show_default=True, help="Block size B, the anchor included."),
    click.option("--layers", default=5, show_default=True, help="Draft layers."),
    click.option("--mask-token-id", type=int, help="Unused embedding row.  [default: found at extraction]"),
    click.option("--anchors", default=512, show_default=True, help="Most anchors of a sample in an epoch."),
    click.option("--anchor-density", default=0.25, show_default=True, help="Anchors per supervised token."),
    click.option(
        "--anchor-sampling", default="uniform", show_default=True, help="uniform, or stratified (spread)."
    ),
    click.option("--loss", default="ce", show_default=True, help="ce, dpace, or kd (see docs/training.md)."),
    click.option("--dpace-alpha", default=0.5, show_default=True, help="Smoothing of dpace's weights."),
    click.option(
        "--gamma", type=float, help="Decay of slot weights.  [default: 7, 5, 4 for blocks of 16, 10, 8]"
    ),
    click.option(
        "--sampled-softmax",
        type=int,
        help="Tokens drawn to compete with a micro-batch's labels.  [default: the whole vocabulary]",
    ),
    click.option("--sampler", default="stratified", show_default=True, help="stratified, shuffle or fifo."),
    click.option("--compose", default="mixed", show_default=True, help="mixed or bucketed micro-batches."),
    click.option(
        "--min-ready", default=30, show_default=True, help="Micro-batches ready before one is drawn."
    ),
    click.option("--max-ready", default=90, show_default=True, help="Micro-batches ready at most."),
    click.option(
        "--mix", default="natural", show_default=True, help="natural, uniform, sqrt, or 256:0.2,512:0.8."
    ),
    click.option("--epoch-size", type=int, help="Tokens of an epoch of another mix.  [default: all held]"),
    click.option(
        "--window-bytes",
        type=int,
        help="Most bytes of a rank's samples ready ahead.  [default: 1 GiB, or two steps if that is more]",
    ),
    click.option(
        "--tokens-per-batch", default=16384, show_default=True, help="Most tokens of a micro-batch."
    ),
    click.option(
        "--batches-per-step", default=8, show_default=True, help="Micro-batches of a step, all ranks."
    ),
    click.option("--epochs", type=int, help="Passes over the cache.  [default: 6, or until --max-steps]"),
    click.option("--max-steps", type=int, help="Optimizer steps; the schedule ends there."),
    click.option("--optimizer", default="adamw", show_default=True, help="adamw, or muon for the matrices."),
    click.option("--lr", default=6e-4, show_default=True, help="Peak learning rate."),
    click.option("--warmup", default=0.04, show_default=True, help="Share of the run with a rising rate."),
    click.option("--schedule", default="cosine", show_default=True, help="cosine, wsd or constant."),
    click.option("--decay", default=0.2, show_default=True, help="Share of the run that wsd decays over."),
    click.option("--precision", default="bfloat16", show_default=True, help="bfloat16 or float32 compute."),
    click.option("--save-every", default=500, show_default=True, help="Steps between checkpoints."),
    click.option("--keep", default=3, show_default=True, help="Checkpoints kept."),
    holdout_option,
    click.option("--eval-every", type=int, help="Steps between held-out walks.  [default: --save-every]"),
    click.option("--eval-samples", default=512, show_default=True, help="Most samples of a held-out walk."),
    click.option("--keep-best", is_flag=True, help="Keep the checkpoint with the best held-out walk too."),
    click.option("--log", multiple=True, help="Also log to tensorboard, wandb or trackio; may be repeated."),
    click.option("--seed", default=0, show_default=True, help="Of weights, order and anchors."),
    click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out, if it has one."),
    click.option("--max-minutes", type=float, help="Stop with a checkpoint when so many are over."),
    click.option(
        "--max-bad-steps", default=10, show_default=True, help="Steps in a row that are not finite, to end."
    ),
    click.option("--skip-corrupt", is_flag=True, help="Go on without damaged samples, and record them."),
    click.option(
        "--parallel", default="ddp", show_default=True, help="ddp, or fsdp: the drafter split over the ranks."
    ),
    click.option(
        "--activation-checkpointing",
        is_flag=True,
        help="Compute layers again in the backward pass: less memory, a third more work.",
    ),
    click.option("--compile", is_flag=True, help="Norms, projections and MLPs through torch.compile."),
    click.option("--follow", is_flag=True, help="Begin while the cache is still being extracted."),
    click.option(
        "--max-wait",
        type=float,
        help="With --follow: seconds a bucket that is due may be empty.  [default: any]",
    ),
    click.option(
        "--on-starved",
        default="error",
        show_default=True,
        help="Behind --max-wait: error, or reweight to go on without the bucket while it is empty.",
    ),
    nproc_option,
)
def train(nproc: int | None, **flags: Any) -> None:
    """Fit a drafter to a cache, without the target, as often as you like.

    \b
    dflash train --cache cache --out runs/a
    dflash train --cache cache --out runs/b --mix sqrt --min-ready 60
    dflash train --cache cache --out runs/c --follow --max-wait 3600
    """
    if started_ranks(nproc):
        return
    from dflash.stopping import exit_code
    from dflash.train.settings import train_config
    from dflash.train.trainer import train as run
    from dflash.world import World

    world = World.from_env()
    result = run(train_config(**flags), world)
    if world.is_main:
        click.echo(result.text())
    if result.stopped and result.stopped.startswith("SIG"):
        raise SystemExit(exit_code(result.stopped))
