"""What runs have left behind, read from their folders, for one page about all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.cache.manifest import load_manifest
from dflash.errors import CacheError, ConfigError
from dflash.provenance import RECORD_NAME
from dflash.report.colours import RUNS
from dflash.report.texts import RunTexts
from dflash.train.runs import Run, load_run

CORRUPT_NAME = "corrupt.jsonl"
EVAL_NAME = "eval.json"


@dataclass(frozen=True)
class Codec:
    """How the cache of a run stores its states."""

    name: str
    taps: tuple[int, ...]
    error: dict[str, Any] | None
    """What a lossy codec costs, as the manifest says it; by tap."""


@dataclass(frozen=True)
class RunSource:
    """One run, as the page sees it."""

    label: str
    """Short, and no other run's."""
    run: Run
    record: dict[str, Any]
    """`run.json`."""
    corrupt: Sequence[dict[str, Any]] = ()
    """Damaged samples that the run went without."""
    codec: Codec | None = None
    """None where the run's cache is not at hand."""
    texts: RunTexts = field(default_factory=RunTexts)


@dataclass(frozen=True)
class Sources:
    """Everything that a page is made from."""

    runs: Sequence[RunSource]
    evaluations: Sequence[tuple[str, dict[str, Any]]] = ()
    """Label and figures of each `dflash eval --json`."""


def gather(paths: Sequence[Path], evals: Sequence[Path] = ()) -> Sources:
    """Read the folders of runs, and results of `dflash eval --json`.

    Args:
        paths: Of runs, 1 to 8.
        evals: Files; `eval.json` in a run's folder is read anyway.

    Raises:
        ConfigError: a path is no run, a file is no such result, or there are too many runs.
    """
    if not 1 <= len(set(paths)) == len(paths) <= RUNS:
        raise ConfigError(f"{len(paths)} runs given; a report takes 1 to {RUNS}, each once")
    labels = _labels(paths)
    runs = [_source(path, label) for path, label in zip(paths, labels, strict=True)]
    found = [(path / EVAL_NAME, label) for path, label in zip(paths, labels, strict=True)]
    found = [(path, label) for path, label in found if path.exists()] + [(path, str(path)) for path in evals]
    return Sources(runs, [each for path, label in found for each in _evaluations(path, label)])


def _labels(paths: Sequence[Path]) -> list[str]:
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _source(path: Path, label: str) -> RunSource:
    run = load_run(path)
    record = json.loads((path / RECORD_NAME).read_bytes())  # `load_run` has read it
    return RunSource(label, run, record, _corrupt(path / CORRUPT_NAME), _codec(run.config))


def _corrupt(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [{key: line[key] for key in ("step", "id", "error")} for line in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a list of damaged samples ({error!r})") from error


def _codec(config: dict[str, Any]) -> Codec | None:
    try:
        manifest = load_manifest(Path(config["cache"]))
    except (CacheError, KeyError):
        return None
    if manifest.digest() != config.get("cache_digest"):
        return None
    return Codec(manifest.identity.codec, manifest.identity.taps, manifest.to_json().get("codec_error"))


def _evaluations(path: Path, label: str) -> list[tuple[str, dict[str, Any]]]:
    """One result, or one for each drafter that was measured."""
    try:
        value = json.loads(path.read_bytes())
        several = {} if "walk_tau" in value else value
        results = [(f"{label}: {name}", each) for name, each in several.items()] or [(label, value)]
        for _, each in results:
            _check_evaluation(each)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not the output of `dflash eval --json` ({error!r})") from error
    return results


def _check_evaluation(found: dict[str, Any]) -> None:
    """Touch all that the page shows; whatever that raises says what is wrong."""
    for group in (found, *found["kinds"].values()):
        for name in ("walk_tau", "speedup", "prompts", "equal"):
            float(group[name])
    for share in found["accepted_by_position"]:
        float(share)
