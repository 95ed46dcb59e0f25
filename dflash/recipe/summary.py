"""The one report at the end: what each stage did, what it left, and what the drafter is worth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.progress import format_seconds
from dflash.recipe.state import Record

SUMMARY_NAME = "summary.md"


@dataclass(frozen=True)
class Line:
    """What happened to a stage."""

    name: str
    ran: bool
    why: str
    out: str
    record: Record | None


def summary(lines: Sequence[Line]) -> str:
    """The report, as text that is Markdown too."""
    rows = [["stage", "", "time", "output"], *(_row(line) for line in lines)]
    parts = [table(rows)]
    for line in lines:
        said = evaluation(Path(line.out)) if line.name == "eval" else _said(line)
        if said:
            parts += [f"{line.name}:", "```", said, "```"]
    return "\n".join(parts)


def _row(line: Line) -> list[str]:
    seconds = format_seconds(line.record.seconds) if line.record and line.record.seconds else ""
    return [line.name, "ran" if line.ran else "as it was", seconds, line.out]


def _said(line: Line) -> str:
    skipped = line.name == "plan" or line.record is None
    return "" if skipped or line.record is None else "\n".join(line.record.said)


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of one width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def evaluation(path: Path) -> str:
    """Tables of `dflash eval --json` output; empty where the file holds none."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        value = json.loads(path.read_bytes())
        reports = {"": value} if "walk_tau" in value else value
        return "\n\n".join(
            f"{name}\n{_kinds(report)}" if name else _kinds(report) for name, report in reports.items()
        )
    return ""


def _kinds(report: Mapping[str, Any]) -> str:
    rows = [["prompts", "n", "tokens", "walk tau", "speed-up", "equal"]]
    kinds = report["kinds"] if len(report["kinds"]) > 1 else {}
    for name, figures in [*sorted(kinds.items()), ("all", report)]:
        equal = f"{figures['equal']}/{figures['prompts']}" if report["greedy"] else "-"
        numbers = [f"{figures['prompts']:,}", f"{figures['tokens']:,}", f"{figures['walk_tau']:.2f}"]
        rows.append([name, *numbers, f"{figures['speedup']:.2f}x", equal])
    return table(rows)
