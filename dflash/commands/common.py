"""What the commands share: errors as one line, configuration files, option types, starting ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash.errors import EXIT_RANK_FAILED, DflashError, RankFailed, lacks_memory

Command = TypeVar("Command", bound=Callable[..., Any])


class UserError(click.ClickException):
    """A `DflashError` on its way to the terminal."""

    exit_code = 2


class OtherRankError(UserError):
    """The failure of another process of the run, which has said why."""

    exit_code = EXIT_RANK_FAILED


_LESS_MEMORY = {
    "train": "lower --tokens-per-batch, or give --activation-checkpointing (on several GPUs --parallel fsdp)",
    "extract": "lower --tokens-per-batch or --max-length, or let several GPUs hold the target (--tp)",
    "eval": "try --dtype bfloat16, or a lower --batch-size",
    "generate": "try --dtype bfloat16",
}
"""What a command can do with less of a GPU's memory."""


def out_of_memory(error: RuntimeError, command: str | None) -> str | None:
    """What to say of an error if it is one for want of memory."""
    if not lacks_memory(error):
        return None
    reason = ". ".join(str(error).split(". ")[:3]).removesuffix(".")
    advice = _LESS_MEMORY.get(command or "", "use a GPU with more")
    return f"{reason}; {advice}"


class Group(click.Group):
    """Turns `DflashError`, and torch's own error for want of memory, into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DflashError as error:
            kind = OtherRankError if isinstance(error, RankFailed) else UserError
            raise kind(str(error)) from error
        except RuntimeError as error:
            if (text := out_of_memory(error, ctx.invoked_subcommand)) is None:
                raise
            raise UserError(text) from error
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            raise SystemExit(130) from None


class LocalPath(click.Path):
    """A path; a URL in its place is a mistake."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a URL, which would become a folder of that name."""
        if "://" in str(value):
            self.fail(f"{value} is a URL; here a path is needed", param, ctx)
        return super().convert(value, param, ctx)


class CachePath(click.ParamType):  # type: ignore[type-arg] # generic since click 8.5 only
    """A cache by its path or URL; the value is the folder in which it is worked on.

    Args:
        pull: Whether the cache is there already, and this folder is to be brought up to date.
    """

    name = "path or url"

    def __init__(self, *, pull: bool = True) -> None:
        self._pull = pull

    def convert(self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None) -> Path:
        """Turn a URL into the folder of its mirror."""
        if "://" not in str(value):
            return Path(value)
        from dflash.cache.mirror import local_folder

        return local_folder(str(value), pull=self._pull)


PATH = LocalPath(path_type=Path)
CACHE = CachePath()
NEW_CACHE = CachePath(pull=False)


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


class NameMap(click.ParamType):  # type: ignore[type-arg] # generic since click 8.5 only
    """Comma-separated pairs of names; a table in a configuration file."""

    name = "old=new,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[str, str], ...]:
        """Parse, or fail naming the value."""
        if isinstance(value, dict):
            return tuple((str(old), str(new)) for old, new in value.items())
        if not isinstance(value, str):
            return tuple(value)
        pairs = [part.strip().partition("=") for part in value.split(",")]
        if not all(old and mark and new for old, mark, new in pairs):
            self.fail(f"{value!r} is not a list of names such as question=prompt,answer=response", param, ctx)
        return tuple((old.strip(), new.strip()) for old, _, new in pairs)


def _read_config(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    """Take defaults from a TOML file; flags win over it. click ignores unknown keys, so they are checked."""
    if value is None:
        return
    from dflash.files import parse_toml

    try:
        given = parse_toml(value.read_text())
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


def started_ranks(nproc: int | None) -> bool:
    """Start one process a GPU (or `nproc`) with this command; False when this process should run it."""
    from dflash.dist import default_nproc, launch
    from dflash.progress import warn
    from dflash.world import World, launched_by_torchrun, rejoin_warning

    wanted = default_nproc() if nproc is None else nproc
    if launched_by_torchrun():
        if World.from_env().is_main and (warning := rejoin_warning()) is not None:
            warn(warning)
        return False
    if wanted == 1:
        return False
    launch(sys.argv[1:], wanted)
    return True


trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Let the target's own Python code run. Off by default."
)
nproc_option = click.option(
    "--nproc", type=click.IntRange(min=1), help="Processes on this machine.  [default: one a GPU]"
)
holdout_option = click.option(
    "--holdout", default=0.02, show_default=True, help="Share of the samples never trained on."
)

target_option = click.option(
    "--target", required=True, help="Folder, GGUF file or hub name of the target model."
)
decode_options = options(
    click.option("--max-new-tokens", default=128, show_default=True, help="Longest answer."),
    click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
    click.option("--dtype", default="float32", show_default=True, help="float32 or bfloat16."),
    click.option("--seed", default=0, show_default=True, help="Of sampling with a temperature."),
    click.option("--top-k", type=int, help="Sample from so many of the likeliest tokens.  [default: all]"),
    click.option("--top-p", type=float, help="Sample from the fewest with this share.  [default: all]"),
    click.option("--draft", default="block", show_default=True, help="block, or tree: alternatives too."),
    click.option("--budget", default=64, show_default=True, help="Most nodes of a tree."),
    click.option("--adaptive", is_flag=True, help="Draft as much as pays, by measurement; else pause."),
    trust_option,
)
