"""How to do a run again: its command, its versions, and every setting."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from dflash.report.axes import NONE
from dflash.report.figure import section, table
from dflash.report.gather import RunSource, Sources
from dflash.report.markup import Html, tag
from dflash.train.run_comparison import flat_config


def configuration(sources: Sources) -> Html:
    """Everything that decides the runs."""
    return section(
        "configuration", "Configuration and how to reproduce", [_one(source) for source in sources.runs]
    )


def _one(source: RunSource) -> Html:
    record = source.record
    steps = [
        tag("li", "Install ", tag("code", f"dflash-trainer {_version(record)}"), _commit(record), "."),
        tag(
            "li",
            f"Have the cache {source.run.config.get('cache')} with the identity ",
            tag("code", str(source.run.config.get("cache_digest"))),
            "; ",
            tag("code", "dflash cache info"),
            " tells a cache's identity.",
        ),
        tag("li", "Run this, with another --out:", tag("pre", tag("code", command(record)), tabindex=0)),
    ]
    settings = [[key, _plain(value)] for key, value in sorted(flat_config(source.run.config).items())]
    settings += [
        [f"version of {name}", _plain(version)] for name, version in record.get("versions", {}).items()
    ]
    whole = tag(
        "details",
        tag("summary", f"All settings and versions of {source.label}"),
        table(f"Settings and versions of {source.label}", ["setting", "value"], settings),
    )
    return tag(
        "div",
        tag("h3", source.label),
        tag("p", f"Started {record.get('time', NONE)}."),
        tag("ol", steps),
        whole,
    )


def command(record: dict[str, Any]) -> str:
    """The command line of a run, as it is typed."""
    argv = [str(word) for word in record.get("argv", ())] or ["dflash", str(record.get("command", "train"))]
    first = "dflash" if Path(argv[0]).name in ("dflash", "__main__.py") else argv[0]
    return shlex.join([first, *argv[1:]])


def _version(record: dict[str, Any]) -> str:
    return str(record.get("versions", {}).get("dflash", NONE))


def _commit(record: dict[str, Any]) -> str:
    return f", commit {record['commit']}" if record.get("commit") else ""


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return NONE if value is None else str(value)
