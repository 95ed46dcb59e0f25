"""The commands. Thin: they turn flags into configurations, call one function, and print what it returns.

Heavy imports stand inside the commands, so that `dflash --help` answers at once. Data goes to stdout,
progress and errors to stderr; an error that the user can mend is one line and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash import __version__
from dflash.errors import DflashError

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)


class UserError(click.ClickException):
    """A `DflashError` on its way to the terminal."""

    exit_code = 2


class Group(click.Group):
    """Turns `DflashError` into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DflashError as error:
            raise UserError(str(error)) from error


class IntList(click.ParamType):  # type: ignore[type-arg] # generic since click 8.5 only
    """Comma-separated whole numbers; a list in a configuration file."""

    name = "int,int,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse, or fail naming the value."""
        parts = value.split(",") if isinstance(value, str) else value
        try:
            return tuple(int(part) for part in parts)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a list of whole numbers such as 1,8,14", param, ctx)


def _read_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    """Take defaults from a TOML file; flags win over it. click ignores unknown keys, so they are checked."""
    if value is None:
        return
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        given = tomllib.loads(value.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--config {value}: {error}") from error
    known = {str(param.name) for param in ctx.command.params} - {"config"}
    values = {key.replace("-", "_"): item for key, item in given.items()}
    for key in values.keys() - known:
        raise UserError(
            f"--config {value}: unknown key {key!r}; `dflash {ctx.info_name}` knows "
            f"{', '.join(sorted(known))}"
        )
    ctx.default_map = values


def config_option(command: Command) -> Command:
    """`--config FILE.toml`, read before all other flags."""
    return click.option(
        "--config",
        type=PATH,
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file with values for these flags; flags given here win over it.",
    )(command)


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator, listed in help in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _parallel(nproc: int | None) -> bool:
    """Start one process a GPU (or `nproc`) with this command; False when this process should run it."""
    from dflash.dist import default_nproc, launch
    from dflash.world import launched_by_torchrun

    wanted = default_nproc() if nproc is None else nproc
    if launched_by_torchrun() or wanted == 1:
        return False
    launch(sys.argv[1:], wanted)
    return True


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dflash")
def cli() -> None:
    """Train DFlash drafters for speculative decoding: extract hidden states once, train many times."""


trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Let the target's own Python code run. Off by default."
)
nproc_option = click.option(
    "--nproc", type=click.IntRange(min=1), help="Processes on this machine.  [default: one a GPU]"
)


@cli.command()
@options(
    config_option,
    click.option("--target", required=True, help="Folder or hub name of the target model."),
    click.option(
        "--data", required=True, multiple=True, help="Conversations: file, folder, pattern or data set."
    ),
    click.option("--out", required=True, type=PATH, help="Folder of the cache."),
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
    click.option("--tokens-per-batch", default=8192, show_default=True, help="Tokens of one forward pass."),
    click.option(
        "--dtype", default="bfloat16", show_default=True, help="bfloat16 or float32; compute and storage."
    ),
    click.option(
        "--shard-mb", default=256, show_default=True, help="Size at which a shard is committed, MiB."
    ),
    nproc_option,
    trust_option,
)
def extract(nproc: int | None, **flags: Any) -> None:
    """Run the target once over a corpus and keep its hidden states in a cache.

    Rerunning the same command goes on where it stopped.

    \b
    dflash extract --target Qwen/Qwen3-8B --data chats.jsonl --out cache
    """
    if _parallel(nproc):
        return
    from dflash.extract.pipeline import ExtractConfig
    from dflash.extract.pipeline import extract as run
    from dflash.world import World

    world = World.from_env()
    flags["data"] = tuple(flags["data"])
    report = run(ExtractConfig.from_flags(**flags), world)
    if world.is_main:
        click.echo(report.text())


@cli.command()
@options(
    config_option,
    click.option("--cache", required=True, type=PATH, help="Cache to train from."),
    click.option("--out", required=True, type=PATH, help="Folder of the run."),
    click.option("--block-size", default=16, show_default=True, help="Block size B, the anchor included."),
    click.option("--layers", default=5, show_default=True, help="Draft layers."),
    click.option("--mask-token-id", type=int, help="Unused embedding row.  [default: found at extraction]"),
    click.option("--anchors", default=512, show_default=True, help="Most anchors of a sample in an epoch."),
    click.option("--anchor-density", default=0.25, show_default=True, help="Anchors per supervised token."),
    click.option("--loss", default="ce", show_default=True, help="ce: cross-entropy to the data's tokens."),
    click.option(
        "--gamma", type=float, help="Decay of slot weights.  [default: 7, 5, 4 for blocks of 16, 10, 8]"
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
    click.option(
        "--tokens-per-batch", default=16384, show_default=True, help="Most tokens of a micro-batch."
    ),
    click.option(
        "--batches-per-step", default=8, show_default=True, help="Micro-batches of a step, all ranks."
    ),
    click.option("--epochs", type=int, help="Passes over the cache.  [default: 6, or until --max-steps]"),
    click.option("--max-steps", type=int, help="Optimizer steps; the schedule ends there."),
    click.option("--lr", default=6e-4, show_default=True, help="Peak learning rate."),
    click.option("--warmup", default=0.04, show_default=True, help="Share of the run with a rising rate."),
    click.option("--save-every", default=500, show_default=True, help="Steps between checkpoints."),
    click.option("--keep", default=3, show_default=True, help="Checkpoints kept."),
    click.option("--seed", default=0, show_default=True, help="Of weights, order and anchors."),
    click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out."),
    nproc_option,
)
def train(nproc: int | None, **flags: Any) -> None:
    """Fit a drafter to a cache, without the target, as often as you like.

    \b
    dflash train --cache cache --out runs/a
    dflash train --cache cache --out runs/b --mix sqrt --min-ready 60
    """
    if _parallel(nproc):
        return
    from dflash.train.settings import train_config
    from dflash.train.trainer import train as run
    from dflash.world import World

    world = World.from_env()
    result = run(train_config(**flags), world)
    if world.is_main:
        click.echo(result.text())
    if result.stopped:
        raise SystemExit(130 if result.stopped == "SIGINT" else 143)


pair_options = options(
    click.option("--target", required=True, help="Folder or hub name of the target model."),
    click.option("--drafter", required=True, type=PATH, help="Run, checkpoint, or drafter folder."),
    click.option("--max-new-tokens", default=128, show_default=True, help="Longest answer."),
    click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
    click.option("--dtype", default="float32", show_default=True, help="float32 or bfloat16."),
    click.option("--seed", default=0, show_default=True, help="Of sampling with a temperature."),
    trust_option,
)


@cli.command("eval")
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

    flags["data"] = tuple(flags["data"])
    report = evaluate(EvalConfig(**flags))
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table())


@cli.command()
@pair_options
@click.option("--prompt", required=True, help="What the user says.")
def generate(target: str, drafter: Path, prompt: str, **flags: Any) -> None:
    """Answer one prompt with speculative decoding.

    \b
    dflash generate --target Qwen/Qwen3-8B --drafter runs/a --prompt "Why is the sky blue?"
    """
    import torch

    from dflash.decode import DecodeConfig
    from dflash.decode import generate as decode
    from dflash.evaluate import open_pair

    model, network, tokenizer = open_pair(
        target, drafter, dtype=flags["dtype"], trust_remote_code=flags["trust_remote_code"]
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


@cli.group()
def cache() -> None:
    """Look at and look after a cache."""


@cache.command()
@click.argument("cache_folder", metavar="CACHE", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(cache_folder: Path, *, as_json: bool) -> None:
    """Identity, size, length mix and completeness of a cache.

    \b
    dflash cache info cache
    """
    from dflash.cache.info import cache_info, format_info

    figures = cache_info(cache_folder)
    click.echo(json.dumps(figures, indent=2) if as_json else format_info(figures))


@cli.command()
@click.option("--out", default="demo", show_default=True, type=PATH, help="Folder for target, cache and run.")
def demo(out: Path) -> None:
    """Do the whole job on SmolLM2-135M-Instruct: extract, train, evaluate, and print one table.

    \b
    dflash demo
    """
    from dflash.demo.run import run_demo

    click.echo(run_demo(out))


def command_paths(group: click.Group, prefix: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Every command below a group as its words, in alphabetical order."""
    found: list[tuple[str, ...]] = []
    for name, command in sorted(group.commands.items()):
        words = (*prefix, name)
        found += command_paths(command, words) if isinstance(command, click.Group) else [words]
    return found
