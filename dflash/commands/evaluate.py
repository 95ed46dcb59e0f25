"""`dflash eval` and `dflash generate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash.commands.common import PATH, UserError, config_option, decode_options, options, target_option

if TYPE_CHECKING:
    from dflash.evaluate.figures import EvalReport


@click.command("eval")
@options(
    config_option,
    click.option(
        "--target",
        help="Folder, GGUF file or hub name of the target model; with --server, for its tokenizer alone.",
    ),
    click.option(
        "--drafter",
        "drafters",
        multiple=True,
        type=PATH,
        help="Run, checkpoint, or drafter folder; several are measured one after another.",
    ),
    click.option(
        "--data",
        required=True,
        multiple=True,
        help="Prompts: conversations up to the last user turn; or gsm8k, math500, humaneval, mbpp, mt-bench.",
    ),
    decode_options,
    click.option("--per-kind", type=int, help="Most prompts of each kind.  [default: all]"),
    click.option("--batch-size", default=1, show_default=True, help="Prompts decoded together."),
    click.option(
        "--thinking", default="template", show_default=True, help="on, off, or as the chat template does."
    ),
    click.option(
        "--server",
        help="URL of a running vLLM or SGLang server with a drafter: measure that one, by its own counters.",
    ),
    click.option(
        "--plain-server", help="With --server: URL of the same target without a drafter, to compare with."
    ),
    click.option(
        "--concurrency", default=4, show_default=True, help="With --server: requests under way at once."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--markdown", is_flag=True, help="Print a Markdown table."),
    click.option("--plot", type=PATH, help="Draw acceptance by position: .png, .svg or .pdf."),
)
@click.pass_context
def evaluate_command(
    ctx: click.Context,
    /,
    drafters: tuple[Path, ...],
    *,
    as_json: bool,
    markdown: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Measure drafters: acceptance length, speed-up, and whether every token stays the same.

    \b
    dflash eval --target Qwen/Qwen3-8B --drafter runs/a --data heldout.jsonl
    dflash eval --target Qwen/Qwen3-8B --drafter runs/a --drafter runs/b --data gsm8k --per-kind 50
    dflash eval --server http://localhost:8000 --data heldout.jsonl --concurrency 16
    """
    flags["data"] = tuple(flags["data"])
    _refuse_mixtures(ctx, drafters, flags)
    server = {name: flags.pop(name) for name in ("server", "plain_server", "concurrency")}
    if server["server"]:
        reports = _server_report(server | {name: flags[name] for name in _BOTH})
    else:
        reports = _reports(drafters, flags)
    if plot is not None:
        from dflash.evaluate.plot import plot_positions

        plot_positions(plot, reports)
    if as_json:
        values = {name: report.to_json() for name, report in reports.items()}
        click.echo(json.dumps(values if len(values) > 1 else next(iter(values.values())), indent=2))
        return
    for name, report in reports.items():
        title = f"{name}\n" if len(reports) > 1 else ""
        click.echo(title + (report.markdown() if markdown else report.table()))


_BOTH = (
    "target",
    "data",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "per_kind",
    "thinking",
    "trust_remote_code",
)
"""Flags that mean something for a server too."""
_SERVER_ONLY = ("plain_server", "concurrency")
_HERE_ONLY = ("drafters", "dtype", "draft", "budget", "adaptive", "batch_size")


def _refuse_mixtures(ctx: click.Context, drafters: tuple[Path, ...], flags: dict[str, Any]) -> None:
    """Flags that would do nothing are errors, as are those that are missing."""
    if flags["server"] is None and not (flags["target"] and drafters):
        raise UserError("give --target and --drafter, or --server with the URL of a running server")
    default = click.core.ParameterSource.DEFAULT
    for name in _HERE_ONLY if flags["server"] else _SERVER_ONLY:
        if ctx.get_parameter_source(name) is not default:
            flag = "--" + name.removesuffix("s").replace("_", "-")
            raise UserError(f"{flag} {'does nothing with' if flags['server'] else 'needs'} --server")


def _reports(drafters: tuple[Path, ...], flags: dict[str, Any]) -> dict[str, EvalReport]:
    from dflash.evaluate.config import EvalConfig
    from dflash.evaluate.run import evaluate

    config = EvalConfig(drafter=drafters[0], **flags)
    return {str(path): evaluate(replace(config, drafter=_named(path))) for path in drafters}


def _server_report(flags: dict[str, Any]) -> dict[str, EvalReport]:
    from dflash.evaluate.server import ServerConfig, evaluate_server

    return {flags["server"]: evaluate_server(ServerConfig(**flags))}


@click.command()
@options(
    target_option,
    click.option("--drafter", required=True, type=PATH, help="Run, checkpoint, or drafter folder."),
    decode_options,
    click.option("--prompt", required=True, help="What the user says."),
)
def generate(
    target: str, drafter: Path, prompt: str, *, dtype: str, trust_remote_code: bool, **flags: Any
) -> None:
    """Answer one prompt with speculative decoding.

    \b
    dflash generate --target Qwen/Qwen3-8B --drafter runs/a --prompt "Why is the sky blue?"
    """
    import torch

    from dflash.decode.config import DecodeConfig
    from dflash.decode.loop import generate as decode
    from dflash.evaluate.pair import open_pair

    settings = DecodeConfig(**flags)
    model, network, tokenizer = open_pair(
        target, _named(drafter), dtype=dtype, trust_remote_code=trust_remote_code
    )
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    result = decode(model, network, torch.tensor(ids), settings)
    click.echo(tokenizer.decode(result.tokens, skip_special_tokens=True))
    rate = len(result.tokens) / max(result.seconds, 1e-9)
    click.echo(
        f"{len(result.tokens)} tokens, {rate:.1f} tokens/s, acceptance length {result.tau:.2f}", err=True
    )


def _named(drafter: Path) -> Path:
    """The folder that will be loaded; said where a run leaves it open which of its checkpoints that is."""
    from dflash.train.checkpoint import best_checkpoint, resolve_drafter

    folder = resolve_drafter(drafter)
    if folder != drafter:
        which = "best held-out walk" if folder == best_checkpoint(drafter) else "newest"
        click.echo(f"drafter: {folder} ({which})", err=True)
    return folder
