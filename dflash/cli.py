"""The command line: the group, and the commands in the order in which they are used.

The commands (`dflash.commands`) are thin: they turn flags into configurations, call one function, and print
what it returns. Heavy imports stand inside them, so that `dflash --help` answers at once. Data goes to
stdout, progress and errors to stderr; an error that the user can mend is one line and exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from dflash import __version__
from dflash.commands.cache import cache
from dflash.commands.common import Group
from dflash.commands.compare import compare
from dflash.commands.demo import demo
from dflash.commands.evaluate import evaluate_command, generate
from dflash.commands.export import export, import_command
from dflash.commands.extract import extract
from dflash.commands.regenerate import regenerate
from dflash.commands.report import report
from dflash.commands.run import run_command
from dflash.commands.sample import sample
from dflash.commands.train import train


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dflash")
def cli() -> None:
    """Train DFlash drafters for speculative decoding: extract hidden states once, train many times."""


_COMMANDS = (
    run_command,
    regenerate,
    extract,
    sample,
    train,
    compare,
    report,
    evaluate_command,
    generate,
    export,
    import_command,
    cache,
    demo,
)
for _command in _COMMANDS:
    cli.add_command(_command)


def command_paths(group: click.Group, prefix: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Every command below a group as its words, in alphabetical order."""
    found: list[tuple[str, ...]] = []
    for name, command in sorted(group.commands.items()):
        words = (*prefix, name)
        found += command_paths(command, words) if isinstance(command, click.Group) else [words]
    return found
