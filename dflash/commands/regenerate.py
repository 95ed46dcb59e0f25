"""`dflash regenerate`."""

from __future__ import annotations

from typing import Any

import click

from dflash.commands.common import PATH, config_option, options, trust_option


@click.command()
@options(
    config_option,
    click.option(
        "--data", required=True, multiple=True, help="Prompts or conversations; what `dflash extract` takes."
    ),
    click.option("--out", required=True, type=PATH, help="JSONL file to write."),
    click.option("--server", help="OpenAI-compatible server, e.g. http://localhost:8000."),
    click.option("--target", help="Target, to answer here; or for the tokenizer of --api completions."),
    click.option("--model", help="Model's name at the server.  [default: the first it serves]"),
    click.option("--api", default="chat", show_default=True, help="chat or completions."),
    click.option("--concurrency", default=64, show_default=True, help="Requests under way at once."),
    click.option("--max-new-tokens", default=2048, show_default=True, help="Longest answer."),
    click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, help="Sample from the fewest tokens with this share."),
    click.option("--top-k", type=int, help="Sample from so many of the likeliest tokens."),
    click.option("--seed", default=0, show_default=True, help="Of sampling with a temperature."),
    click.option(
        "--thinking", default="template", show_default=True, help="on, off, or as the chat template does."
    ),
    click.option("--retries", default=6, show_default=True, help="Further attempts for a failed request."),
    click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for an answer."),
    click.option("--rate-limit", type=float, help="Most requests a second.  [default: none]"),
    click.option("--batch-size", default=16, show_default=True, help="Prompts decoded here at once."),
    click.option("--dtype", default="bfloat16", show_default=True, help="Of the target here."),
    click.option("--keep-truncated", is_flag=True, help="Keep answers cut at --max-new-tokens."),
    trust_option,
)
def regenerate(data: tuple[str, ...], **flags: Any) -> None:
    """Let the target answer every prompt itself: drafters learn best from its own words.

    \b
    dflash regenerate --data prompts.jsonl --out answers.jsonl --server http://localhost:8000
    dflash regenerate --data prompts.jsonl --out answers.jsonl --target Qwen/Qwen3-8B
    """
    from dflash.regenerate.config import RegenerateConfig
    from dflash.regenerate.run import regenerate as run
    from dflash.stopping import exit_code

    report = run(RegenerateConfig(data=data, **flags))
    click.echo(report.text())
    if report.stopped:
        raise SystemExit(exit_code(report.stopped))
