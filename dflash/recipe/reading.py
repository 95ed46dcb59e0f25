"""Reading a recipe: TOML and overrides to checked settings, with every path made absolute."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dflash.errors import ConfigError
from dflash.files import parse_toml, read_toml
from dflash.recipe.stages import RUN_KEYS, STAGES, TABLES, Stage, stages_of

Commands = Mapping[str, click.Command]
_DATA_SUFFIXES = {".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".gz", ".zst", ".zstd"}
_ALONE = ("extract", "train")
"""Tables of a run that is described by flags alone."""


@dataclass(frozen=True)
class Recipe:
    """What is to be done."""

    out: Path
    """Folder for everything that is made."""
    run: dict[str, Any]
    """Values of `[run]`: `target`, and `data` and `holdout` as lists."""
    tables: dict[str, dict[str, Any]]
    """Values by parameter of each command, as they were written, paths made absolute."""
    commands: Commands

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is done, in order."""
        return stages_of(self.tables)


def load_recipe(
    commands: Commands,
    path: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe.

    Args:
        commands: The commands below `dflash`, by name.
        path: The TOML file; relative paths in it start at its folder. None where flags say everything.
        overrides: `TABLE.KEY=VALUE` each; they win over the file. Relative paths start here.
        flags: Values of `[run]` that win over all.

    Raises:
        ConfigError: the file cannot be read, a table or key is unknown, or a value is refused.
    """
    tables = {} if path is None else _tables_of(path, commands)
    here = Path.cwd()
    if path is None:
        tables = {name: {} for name in _ALONE}
    for text in overrides:
        name, key, value = _override(text)
        table = _checked(name, {key: value}, f"--set {text}", commands)
        tables.setdefault(name, {}).update(_absolute_table(name, table, here, commands))
    given = {key: value for key, value in (flags or {}).items() if value}
    run = tables.pop("run", {}) | _absolute_table("run", given, here, commands)
    if path is None and run.get("holdout"):
        tables.setdefault("eval", {})
    if "out" not in run:
        raise ConfigError("a run needs a folder: give --out, or `out` in [run]")
    recipe = Recipe(Path(run.pop("out")), run, tables, commands)
    for stage in recipe.stages:
        _check_stage(recipe, stage)
    if not recipe.stages:
        raise ConfigError(f"{path} asks for nothing: it has none of the tables {_brackets(TABLES[1:])}")
    return recipe


def _tables_of(path: Path, commands: Commands) -> dict[str, dict[str, Any]]:
    base = path.resolve().parent
    found = {}
    for name, table in read_toml(path).items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name!r} stands outside of a table; tables are {_brackets(TABLES)}")
        found[name] = _absolute_table(name, _checked(name, table, str(path), commands), base, commands)
    return found


def _checked(name: str, table: Mapping[str, Any], where: str, commands: Commands) -> dict[str, Any]:
    """A table's values by parameter; every key must be a flag of its command."""
    known = _keys(name, commands, where)
    fixed = {key for stage in STAGES if stage.table == name for key in stage.fixed} | {"config"}
    values = {}
    for key, value in table.items():
        parameter = known.get(key.replace("-", "_"))
        if parameter is None:
            flags = sorted({flag.replace("_", "-") for flag, to in known.items() if to not in fixed})
            raise ConfigError(f"{where}: [{name}] has no key {key!r}; it knows {', '.join(flags)}")
        if parameter in fixed:
            raise ConfigError(f"{where}: [{name}] {key} is decided by `dflash run` itself; leave it out")
        values[parameter] = value
    return values


def _keys(name: str, commands: Commands, where: str) -> dict[str, str]:
    """What a table's keys may be called, and which parameter each one is."""
    if name == "run":
        return {key: key for key in RUN_KEYS}
    command = next((stage.command for stage in STAGES if stage.table == name), "")
    if command not in commands:
        raise ConfigError(f"{where}: unknown table [{name}]; a recipe has {_brackets(TABLES)}")
    return {
        spelling.lstrip("-").replace("-", "_"): str(param.name)
        for param in commands[command].params
        for spelling in (str(param.name), *(opt for opt in param.opts if opt.startswith("--")))
    }


def _override(text: str) -> tuple[str, str, Any]:
    """Table, key and value of `TABLE.KEY=VALUE`; what is no TOML is text."""
    name, mark, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (mark and dot and table and key):
        raise ConfigError(f"--set {text}: write it as TABLE.KEY=VALUE, e.g. train.lr=1e-3")
    try:
        return table, key, parse_toml(f"value = {value}")["value"]
    except ValueError:
        return table, key, value.strip()


def _absolute_table(name: str, table: Mapping[str, Any], base: Path, commands: Commands) -> dict[str, Any]:
    """The same values with paths that start at `base` made absolute."""
    if name == "run":
        kinds = {"out": "path", "target": "target", "data": "data", "holdout": "data"}
    else:
        stage = next(stage for stage in STAGES if stage.table == name)
        kinds = {
            str(param.name): stage.inputs.get(str(param.name), "path")
            for param in commands[stage.command].params
            if param.name in stage.inputs or isinstance(param.type, click.Path) or param.name == "out"
        }
    found = {}
    for key, value in table.items():
        many = kinds.get(key) == "data" or isinstance(value, list)
        values = value if isinstance(value, list) else [value]
        if key in kinds:
            if not all(isinstance(text, str) and text for text in values):
                raise ConfigError(f"[{name}] {key} is {value!r}; it must be a path or a name, in quotes")
            values = [absolute(text, base, kinds[key]) for text in values]
        found[key] = values if many else values[0]
    return found


def absolute(text: str, base: Path, kind: str) -> str:
    """A path that starts at `base`, as an absolute one; names on the hub and URLs stay as they are."""
    if "://" in text:
        return text
    path = base / Path(text).expanduser()
    named = text.startswith((".", "~", "/")) or text.count("/") > 1
    if kind == "data":
        named = named or glob.has_magic(text) or Path(text).suffix in _DATA_SUFFIXES
    elif kind == "target":
        named = named or text.endswith(".gguf")
    else:
        named = True
    return str(path) if named or path.exists() else text


def _check_stage(recipe: Recipe, stage: Stage) -> None:
    """Let the command itself judge the values, with placeholders for what is made on the way."""
    required = {param.name for param in recipe.commands[stage.command].params if param.required}
    for key, sources in _wires(recipe, stage).items():
        needed = key in required | stage.needs
        if needed and key not in recipe.tables[stage.table] and not _wired(recipe, sources):
            keys = [f"`{name}` in [run]" for name in sources if not name.startswith("@")]
            tables = [f"a table [{name[1:]}]" for name in sources if name.startswith("@")]
            flag = _spelled(recipe.commands[stage.command], key)
            ways = " or ".join([f"`{flag}` in [{stage.table}]", *keys, *tables])
            raise ConfigError(f"[{stage.table}] has no {flag}: give {ways}")
    resolved(recipe, stage)


def _spelled(command: click.Command, key: str) -> str:
    param = next(param for param in command.params if param.name == key)
    return next((opt[2:] for opt in param.opts if opt.startswith("--")), key)


def _wires(recipe: Recipe, stage: Stage) -> dict[str, tuple[str, ...]]:
    """The wires of a stage as its table leaves them."""
    table = recipe.tables[stage.table]
    cut = {key for given, keys in stage.without.items() if table.get(given) for key in keys}
    return {key: sources for key, sources in stage.wires.items() if key not in cut}


def _wired(recipe: Recipe, sources: Sequence[str]) -> str | None:
    """The first source that this recipe has."""
    names = {f"@{stage.name}" for stage in recipe.stages} | recipe.run.keys()
    return next((source for source in sources if source in names), None)


def values_of(recipe: Recipe, stage: Stage, places: Mapping[str, str | None]) -> dict[str, Any]:
    """All values of a stage by parameter, but for its output.

    Args:
        recipe: The recipe.
        stage: One of its stages.
        places: Where the outputs of earlier stages are; None where that is not known yet.
    """
    known = {param.name for param in recipe.commands[stage.command].params}
    values = dict(recipe.tables[stage.table])
    for key, sources in _wires(recipe, stage).items():
        if key in known and key not in values and (source := _wired(recipe, sources)):
            values[key] = places.get(source[1:]) if source.startswith("@") else recipe.run[source]
    return values | {key: value for key, value in stage.fixed.items() if key in known}


def producer(recipe: Recipe, stage: Stage, key: str) -> str | None:
    """Name of the stage whose output a parameter is, if it is one."""
    wires = _wires(recipe, stage)
    if key in recipe.tables[stage.table] or key not in wires:
        return None
    source = _wired(recipe, wires[key])
    return source[1:] if source and source.startswith("@") else None


def resolved(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """Every parameter of the stage's command as the command sees it; inputs and output are placeholders.

    Raises:
        ConfigError: the command refuses a value.
    """
    command = recipe.commands[stage.command]
    values = values_of(recipe, stage, {})
    standing_in = {key: "placeholder" for key in {*stage.inputs, "out"} if key in values}
    if any(param.name == "out" for param in command.params):
        standing_in["out"] = "placeholder"
    return _params(command, stage, values | standing_in)


def at_default(recipe: Recipe, stage: Stage, params: Mapping[str, Any]) -> frozenset[str]:
    """Those of a stage's resolved parameters that have the value that the command gives them by itself."""
    command = recipe.commands[stage.command]
    needed = {str(param.name): params[str(param.name)] for param in command.params if param.required}
    plain = _params(
        command, stage, {key: list(v) if isinstance(v, tuple) else v for key, v in needed.items()}
    )
    return frozenset(key for key, value in params.items() if key not in needed and plain[key] == value)


def _params(command: click.Command, stage: Stage, values: Mapping[str, Any]) -> dict[str, Any]:
    line = command_line(command, values, stage.table)
    try:
        # Without help: click would keep an option of that name in the command, not the one that `dflash` has.
        with command.make_context(stage.command, line, help_option_names=[]) as context:
            return dict(context.params)
    except click.UsageError as error:
        raise ConfigError(f"[{stage.table}] {error.format_message()}") from error


def command_line(command: click.Command, values: Mapping[str, Any], table: str) -> list[str]:
    """Flags and arguments that give a command these values.

    Raises:
        ConfigError: a value has a type that no flag takes.
    """
    flags: list[str] = []
    arguments: list[str] = []
    for param in command.params:
        value = values.get(str(param.name))
        if value is None:
            continue
        if isinstance(param, click.Option) and param.is_flag:
            if not isinstance(value, bool):
                raise ConfigError(f"[{table}] {param.name} is {value!r}; it must be true or false")
            flags += [param.opts[0]] if value else []
            continue
        several = isinstance(value, list) and (param.multiple or param.nargs != 1)
        for one in value if several else [value]:
            text = _text(one, param, table)
            if isinstance(param, click.Option):
                flags.append(f"{param.opts[0]}={text}")
            else:
                arguments.append(text)
    return [*flags, *(["--", *arguments] if arguments else [])]


def _text(value: Any, param: click.Parameter, table: str) -> str:
    plain = isinstance(param.type, (click.Path, click.types.StringParamType, click.Choice))
    if isinstance(value, bool) or (isinstance(value, (list, dict)) and plain):
        raise ConfigError(f"[{table}] {param.name} is {value!r}, which this key does not take")
    if isinstance(value, dict):
        return ",".join(f"{old}={new}" for old, new in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _brackets(names: Sequence[str]) -> str:
    return ", ".join(f"[{name}]" for name in names)
