"""What is known of how a drafter came about: its run's record and metrics, and its cache's manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.cache.manifest import Manifest, load_manifest
from dflash.errors import DflashError
from dflash.provenance import RECORD_NAME
from dflash.train.runs import Run, load_run

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class History:
    """What was found; anything may be absent."""

    step: int | None = None
    """Optimizer steps behind which the checkpoint was written."""
    record: dict[str, Any] = field(default_factory=dict)
    """The run's `run.json`."""
    run: Run | None = None
    """Its figures."""
    manifest: Manifest | None = None
    """Of its cache."""
    data: tuple[str, ...] = ()
    """What the cache was extracted from."""

    @property
    def target(self) -> str | None:
        """Folder or hub name of the target."""
        return self.manifest.identity.target if self.manifest else None

    @property
    def walk(self) -> dict[str, Any]:
        """The newest walk over held-out samples that is not behind the checkpoint; empty without one."""
        return self._newest(self.run.evaluations if self.run else [])

    @property
    def last_step(self) -> dict[str, Any]:
        """Figures of the checkpoint's step; empty without any."""
        return self._newest(self.run.steps if self.run else [])

    def _newest(self, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
        done = [line for line in lines if self.step is None or line["step"] <= self.step]
        return done[-1] if done else {}


def history_of(checkpoint: Path) -> History:
    """Read what lies around a checkpoint; a folder that stands alone has no history."""
    found = _STEP.fullmatch(checkpoint.resolve().name)
    folder = checkpoint.resolve().parents[1] if found else checkpoint
    record = _json(folder / RECORD_NAME)
    if record.get("command") != "train":
        return History()
    settings = record.get("config")
    cache = Path(str(settings.get("cache"))) if isinstance(settings, dict) else Path()
    data = (_json(cache / RECORD_NAME).get("config") or {}).get("data") or ()
    return History(
        int(found[1]) if found else None, record, _run(folder), _manifest(cache), tuple(map(str, data))
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _run(folder: Path) -> Run | None:
    try:
        return load_run(folder)
    except DflashError:
        return None


def _manifest(cache: Path) -> Manifest | None:
    try:
        return load_manifest(cache)
    except (DflashError, OSError):
        return None
