"""Commands as users give them, in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from dflash.cli import cli


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    """A command that fails as users' mistakes do: exit code 2 and one line, which is returned."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    return line
