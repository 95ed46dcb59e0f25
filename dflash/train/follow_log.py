"""`RUN/follow.jsonl`: which part of a growing cache each step could draw from, so that a resume repeats it.

The first line says what was followed; then comes one line a step, written before the step is trained on:

    {"step": 12, "parts": [["rank0-000003", ...], ...], "chunks": [[bucket, first, stop, epoch], ...],
     "aside": [bucket, ...], "digest": "..."}

`parts` are index fragments that became visible, `chunks` what buckets began to draw from, `aside` the buckets
that the step goes without, `digest` that of the content once the cache was complete. What holds nothing is
left out, so most lines name the step alone. Behind the line with a digest there are no more.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dflash.cache.planned import Planned
from dflash.errors import CacheMismatch, CheckpointError
from dflash.files import publish_bytes

if TYPE_CHECKING:
    from pathlib import Path

LOG_NAME = "follow.jsonl"
LOG_FORMAT = 1


@dataclass
class Decision:
    """What one step may draw from, in addition to what earlier steps could."""

    step: int
    parts: list[list[str]] = field(default_factory=list)
    """Index fragments, in the order in which they became visible."""
    aside: list[int] = field(default_factory=list)
    """Buckets that it goes without."""
    digest: str | None = None
    """That of the content, once the cache is complete."""
    chunks: list[list[int]] = field(default_factory=list)
    """Chunks that were begun: bucket, first, stop, epoch. Recorded, not decided."""
    end: str | None = None
    """The signal that ends the stream before this step. Never recorded."""
    error: str | None = None
    """The error that ends it. Never recorded."""

    def plain(self) -> dict[str, Any]:
        """JSON-ready, without what holds nothing."""
        return {key: value for key, value in asdict(self).items() if value or key == "step"}


class FollowLog:
    """The record of a run that follows a cache. Every rank may read it before the first one writes.

    Args:
        run: The run's folder.
        resume: Whether the record that may be there is gone on with; otherwise `begin` replaces it.

    Raises:
        CheckpointError: what is there cannot be read.
    """

    def __init__(self, run: Path, *, resume: bool) -> None:
        self._path = run / LOG_NAME
        self.header: dict[str, Any] | None = None
        self.decisions: list[Decision] = []
        if resume:
            self._read()

    def planned(self, cache: str) -> Planned | None:
        """What was planned when the run began, or None for a run that begins now.

        Args:
            cache: Digest of the identity of the cache that is followed.

        Raises:
            CacheMismatch: the record is of another cache.
        """
        if self.header is None:
            return None
        if self.header.get("cache") != cache:
            raise CacheMismatch(
                f"{self._path} is of another cache ({self.header.get('cache')}, not {cache}); go on with "
                "that one, or start afresh"
            )
        return Planned.from_json(self.header.get("planned"), str(self._path))

    def begin(self, cache: str, planned: Planned) -> None:
        """Start the record, or cut a half-written last line off the one that is there."""
        self.header = self.header or {"format": LOG_FORMAT, "cache": cache, "planned": asdict(planned)}
        lines = [self.header, *(decision.plain() for decision in self.decisions)]
        publish_bytes(self._path, "".join(f"{json.dumps(line)}\n" for line in lines).encode())

    def add(self, decision: Decision) -> None:
        """Record a step's decision."""
        with self._path.open("a") as file:
            file.write(json.dumps(decision.plain()) + "\n")

    def _read(self) -> None:
        try:
            lines = self._path.read_text().split("\n")[:-1]  # behind the last line break: cut off in a crash
        except FileNotFoundError:
            return
        try:
            for number, line in enumerate(lines):
                value = json.loads(line)
                if number:
                    self.decisions.append(Decision(**value))
                else:
                    self.header = value
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} cannot be read ({error!r}); what the run drew is lost, start afresh"
            ) from error
        if self.header is not None and self.header.get("format") != LOG_FORMAT:
            raise CheckpointError(
                f"{self._path} has format {self.header.get('format')}, this version reads {LOG_FORMAT}; "
                "resume with the version that wrote it"
            )
        if [decision.step for decision in self.decisions] != list(range(len(self.decisions))):
            raise CheckpointError(f"{self._path} lacks steps; what the run drew is lost, start afresh")
