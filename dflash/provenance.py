"""The run record: what was run, with which settings, by which versions, beside every output."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import __version__
from dflash.files import publish_json

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORD_NAME = "run.json"
_RECORDED_PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "datasets", "numpy")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Commit of the checkout that this package runs from, or None when it is installed without one.

    An environment inside another project's checkout is no reason to name that project's commit.
    """
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = found.stdout.splitlines()
    ours = found.returncode == 0 and len(lines) == 2 and Path(lines[0]).resolve() == here.parent
    return lines[1] if ours else None


def run_record(command: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is needed to repeat a run, as a JSON-ready value."""
    return {
        "command": command,
        "argv": sys.argv,
        "config": dict(config),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "versions": {"dflash": __version__, "python": platform.python_version()}
        | {name: _installed(name) for name in _RECORDED_PACKAGES},
    }


def write_run_record(folder: Path, command: str, config: Mapping[str, Any]) -> None:
    """Write `run.json` into `folder` (which exists), replacing the record of an earlier start."""
    publish_json(folder / RECORD_NAME, run_record(command, config))
