"""`dflash export` and `dflash import`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash.commands.common import PATH


@click.command()
@click.argument("source", type=PATH)
@click.option("--to", required=True, help="Layout: zlab, transformers or speculators.")
@click.option("--out", required=True, type=PATH, help="Folder to write; it must not exist.")
@click.option("--dtype", help="bfloat16 or float32.  [default: as stored]")
@click.option("--target", help="Folder or hub name of the target.  [default: that of the run's cache]")
def export(source: Path, *, to: str, out: Path, dtype: str | None, target: str | None) -> None:
    """Write a run's drafter for another client, with a model card.

    SOURCE is a run (its best checkpoint, else its newest), a checkpoint, or a drafter folder of any layout.
    zlab is read by vLLM, SGLang and z-lab's package, transformers by Transformers without remote code,
    speculators by vLLM's speculators package and by `vllm serve OUT` alone.

    \b
    dflash export runs/a --to zlab --out drafter
    dflash export runs/a --to speculators --target Qwen/Qwen3-8B --out drafter-speculators
    """
    from dflash.export.give import ExportConfig, export_drafter

    exported = export_drafter(ExportConfig(source, out, to, dtype, target))
    click.echo(f"{to} layout, {len(exported.tensors)} tensors: {out}")


@click.command("import")
@click.argument("source", type=PATH)
@click.option("--out", required=True, type=PATH, help="Folder to write; it must not exist.")
@click.option(
    "--target", help="Folder or hub name of the target, where the checkpoint does not give its shape."
)
def import_command(source: Path, *, out: Path, target: str | None) -> None:
    """Make a drafter of z-lab, speculators or Transformers one of ours, to evaluate or to train further.

    The layout is told by content. Tensors must be exactly those of the network; their values do not change.

    \b
    dflash import Qwen3-8B-DFlash-b16 --out drafter
    dflash import their-speculator --target Qwen/Qwen3-8B --out drafter
    """
    from dflash.export.take import import_drafter

    taken = import_drafter(source, out, target)
    click.echo(f"{taken.layout} layout, {len(taken.tensors)} tensors: {out}")
