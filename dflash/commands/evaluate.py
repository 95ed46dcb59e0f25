"""`dflash eval` and `dflash generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash.commands.common import config_option, options, pair_options


@click.command("eval")
@options(
    config_option,
    pair_options,
    click.option(
        "--data", required=True, multiple=True, help="Prompts: conversations up to the last user turn."
    ),
    click.option("--per-kind", type=int, help="Most prompts of each kind.  [default: all]"),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)
def evaluate_command(*, as_json: bool, **flags: Any) -> None:
    """Measure a drafter: acceptance length, speed-up, and whether every token stays the same.

    \b
    dflash eval --target Qwen/Qwen3-8B --drafter runs/a --data heldout.jsonl
    """
    from dflash.evaluate import EvalConfig, evaluate

    flags["drafter"] = _named(flags["drafter"])
    flags["data"] = tuple(flags["data"])
    report = evaluate(EvalConfig(**flags))
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table())


@click.command()
@pair_options
@click.option("--prompt", required=True, help="What the user says.")
def generate(target: str, drafter: Path, prompt: str, **flags: Any) -> None:
    """Answer one prompt with speculative decoding.

    \b
    dflash generate --target Qwen/Qwen3-8B --drafter runs/a --prompt "Why is the sky blue?"
    """
    import torch

    from dflash.decode.config import DecodeConfig
    from dflash.decode.loop import generate as decode
    from dflash.evaluate import open_pair

    model, network, tokenizer = open_pair(
        target, _named(drafter), dtype=flags["dtype"], trust_remote_code=flags["trust_remote_code"]
    )
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    settings = DecodeConfig(flags["max_new_tokens"], flags["temperature"], flags["seed"])
    result = decode(model, network, torch.tensor(ids), settings)
    click.echo(tokenizer.decode(result.tokens, skip_special_tokens=True))
    rate = len(result.tokens) / max(result.seconds, 1e-9)
    click.echo(
        f"{len(result.tokens)} tokens, {rate:.1f} tokens/s, acceptance length {result.tau:.2f}", err=True
    )


def _named(drafter: Path) -> Path:
    """The folder that will be loaded; said where a run leaves it open which of its checkpoints that is."""
    from dflash.evaluate import resolve_drafter
    from dflash.train.checkpoint import best_checkpoint

    folder = resolve_drafter(drafter)
    if folder != drafter:
        which = "best held-out walk" if folder == best_checkpoint(drafter) else "newest"
        click.echo(f"drafter: {folder} ({which})", err=True)
    return folder
