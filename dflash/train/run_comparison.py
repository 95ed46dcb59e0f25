"""Trainings beside each other: what differs, and what came of it. The work of `dflash compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from dflash.errors import ConfigError
from dflash.progress import format_seconds
from dflash.train.compare import roughness
from dflash.train.mixplot import check_plot
from dflash.train.runplot import plot_runs
from dflash.train.runs import Run, load_run

_NOT_THE_SAME = ("cache_digest", "seed", "network.", "drafter.")
"""Runs that differ in these measure more than their settings."""
_NAMES_ONLY = ("cache", "bucket_edges", "epoch.tokens", "epoch.passes_by_bucket", "window_bytes")
_SECONDARY = ("anchors.seed", "sampler.seed")  # follow --seed


@dataclass(frozen=True)
class Difference:
    """A part of the configuration that is not the same in all runs."""

    key: str
    values: tuple[Any, ...]
    """One a run; None where it has no such key."""

    @property
    def decides(self) -> bool:
        """Whether it makes the runs incomparable as trials of settings: another cache, seed or drafter."""
        return self.key.startswith(_NOT_THE_SAME)


@dataclass(frozen=True)
class RunComparison:
    """Runs and their figures; every list has one entry a run, None where the run has no such figure."""

    runs: tuple[str, ...]
    differences: tuple[Difference, ...]
    figures: dict[str, list[float | None]]
    """By name; losses, acceptance and accuracy are means over the last tenth of the steps, the walk over
    held-out samples is the last one."""
    by_bucket: dict[str, dict[int, list[float | None]]]
    """`loss`, `anchor tau` and `walk tau` by bucket edge."""
    by_position: dict[int, list[float | None]]
    """Share of right tokens by place in the block, from 1."""

    def text(self) -> str:
        """For a terminal: first what keeps the runs apart, then settings, then figures."""
        legend = [f"{letter}  {run}" for letter, run in zip(ascii_uppercase, self.runs, strict=False)]
        deciding = [d for d in self.differences if d.decides]
        settings = [d for d in self.differences if not d.decides]
        parts = ["\n".join(legend)]
        if deciding:
            parts.append(
                "NOT THE SAME cache, seed or drafter:\n" + _rows([(d.key, d.values) for d in deciding])
            )
        parts.append(
            "settings that differ:\n" + _rows([(d.key, d.values) for d in settings])
            if settings
            else "no settings differ"
        )
        parts.append(self._tables())
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON-ready value."""
        differences = [
            {"key": d.key, "values": list(d.values), "decides": d.decides} for d in self.differences
        ]
        return {**vars(self), "runs": list(self.runs), "differences": differences}

    def _tables(self) -> str:
        letters = list(ascii_uppercase[: len(self.runs)])
        rows: list[tuple[str, Sequence[Any]]] = [("", letters)]
        rows += [
            (name, [_show(value, FORMATS[name]) for value in values]) for name, values in self.figures.items()
        ]
        for name, buckets in self.by_bucket.items():
            rows += [
                (f"{name}, to {edge:,} tokens", [_show(value, "{:.3f}".format) for value in values])
                for edge, values in buckets.items()
            ]
        rows += [
            (f"right at place {place}", [_show(value, "{:.1%}".format) for value in values])
            for place, values in self.by_position.items()
        ]
        return _rows(rows)


def compare_runs(paths: Sequence[Path], plot: Path | None = None) -> RunComparison:
    """Read the runs, and draw their curves if a picture is asked for.

    Raises:
        ConfigError: fewer than two runs, or more than letters; a folder is no run; or the picture cannot be
            written.
    """
    if not 2 <= len(paths) <= len(ascii_uppercase):
        raise ConfigError(f"{len(paths)} runs given; 2 to {len(ascii_uppercase)} can be compared")
    if plot is not None:
        check_plot(plot)
    runs = [load_run(path) for path in paths]
    if plot is not None:
        plot_runs(plot, runs)
    each = [run_figures(run) for run in runs]
    buckets = [_by_bucket(run) for run in runs]
    return RunComparison(
        runs=tuple(map(str, paths)),
        differences=tuple(differing(runs)),
        figures={name: [found[name] for found in each] for name in each[0]},
        by_bucket={name: _align([found.get(name, {}) for found in buckets]) for name in _names(buckets)},
        by_position=_align([dict(enumerate(run.mean_by("accuracy"), start=1)) for run in runs]),
    )


def run_figures(run: Run) -> dict[str, float | None]:
    """The figures of `RunComparison.figures` for one run."""
    seconds = sum(step["seconds"] + step.get("waited", 0.0) for step in run.steps)
    tokens = sum(step["tokens"] for step in run.steps)
    calm = run.after_warmup
    return {
        "steps": len(run.steps),
        "tokens": tokens,
        "seconds": seconds,
        "tokens/s": tokens / seconds if seconds else None,
        "loss": run.mean("loss"),
        "roughness": roughness([step["loss"] for step in calm]),
        "gradient norm change": roughness([step["grad_norm"] for step in calm]),
        "anchor tau": run.mean("anchor_tau"),
        "walk tau": run.walk.get("walk_tau"),
        "mix off over 30 draws": run.steps[-1]["mix"]["variation"][0]["mean"],
    }


FORMATS: dict[str, Callable[[float], str]] = {
    "steps": "{:,}".format,
    "tokens": "{:,}".format,
    "seconds": format_seconds,
    "tokens/s": "{:,.0f}".format,
    "loss": "{:.4f}".format,
    "roughness": "{:.4f}".format,
    "gradient norm change": "{:.4f}".format,
    "anchor tau": "{:.3f}".format,
    "walk tau": "{:.3f}".format,
    "mix off over 30 draws": "{:.4f}".format,
}
"""How each of `RunComparison.figures` is written."""


def _by_bucket(run: Run) -> dict[str, dict[int, float | None]]:
    found = {name: run.mean_by(f"{name}_by_bucket") for name in ("loss", "anchor_tau")}
    found["walk_tau"] = run.walk.get("walk_tau_by_bucket", [None] * len(run.bucket_edges))
    return {
        name.replace("_", " "): dict(zip(run.bucket_edges, values, strict=True))
        for name, values in found.items()
        if name != "walk_tau" or run.walk
    }


def _names(tables: Sequence[dict[str, Any]]) -> list[str]:
    """Keys of any of the tables, in order of their appearance."""
    return list(dict.fromkeys(name for table in tables for name in table))


def differing(runs: Sequence[Run]) -> list[Difference]:
    """Settings that are not the same in all runs."""
    flat = [flat_config(run.config) for run in runs]
    keys = sorted(set().union(*flat) - {*_NAMES_ONLY, *_SECONDARY})
    found = [Difference(key, tuple(config.get(key) for config in flat)) for key in keys]
    # What the network's settings decide is said by them already.
    different = [d for d in found if any(value != d.values[0] for value in d.values)]
    if any(d.key.startswith("network.") for d in different):
        different = [d for d in different if not d.key.startswith("drafter.")]
    return different


def flat_config(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration with names such as `sampler.seed` in the place of nested ones."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flat_config(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        )
    return flat


def _align(tables: Sequence[dict[int, float | None]]) -> dict[int, list[float | None]]:
    return {key: [table.get(key) for table in tables] for key in sorted(set().union(*tables))}


def _show(value: float | None, how: Callable[[float], str]) -> str:
    return "-" if value is None else how(value)


def _rows(rows: Sequence[tuple[str, Sequence[Any]]]) -> str:
    cells = [(name, *(_short(value) for value in values)) for name, values in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."
