"""What a run survives: steps that are not numbers, samples that are damaged, a disk that is full."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash.errors import CacheCorrupt, TrainingError
from dflash.progress import warn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dflash.cache.reader import CacheReader, Sample

CORRUPT_NAME = "corrupt.jsonl"
_NAMED = 8
"""Samples that an error names; the log names all."""


@dataclass
class BadSteps:
    """Steps in a row whose loss or gradient was not finite."""

    limit: int
    row: int = 0

    def good(self) -> None:
        """A step was as it should be."""
        self.row = 0

    def bad(self, step: int, samples: Sequence[int], checkpoint: Path | None) -> None:
        """A step was skipped.

        Args:
            step: Its number.
            samples: Ids of the samples that it was computed from.
            checkpoint: The newest one.

        Raises:
            TrainingError: it was the last one that is allowed.
        """
        self.row += 1
        if self.row < self.limit:
            return
        named = ", ".join(map(str, samples[:_NAMED])) + (", ..." if len(samples) > _NAMED else "")
        good = f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        raise TrainingError(
            f"step {step}: loss or gradient is not finite, the last of {self.row} such steps in a row "
            f"(--max-bad-steps; samples {named}); {good}: go on from it with --resume, or start anew with a "
            "lower --lr"
        )


class CorruptSample(NamedTuple):
    """A sample that could not be read."""

    id: int
    row: int
    """Of the cache's index."""
    error: str


def read_sound(
    reader: CacheReader, rows: Sequence[int], *, keep_coded: bool = False
) -> tuple[list[Sample], list[CorruptSample]]:
    """Read samples one by one where some are damaged; the damaged ones are left out, and named."""
    try:
        return reader.read(rows, keep_coded=keep_coded), []
    except CacheCorrupt:
        pass
    samples, corrupt = [], []
    for row in rows:
        try:
            samples.extend(reader.read([row], keep_coded=keep_coded))
        except CacheCorrupt as error:  # noqa: PERF203 - reading costs thousands of times as much
            corrupt.append(CorruptSample(int(reader.index.ids[row]), int(row), str(error)))
    return samples, corrupt


def record_corrupt(run: Path, step: int, corrupt: Sequence[CorruptSample]) -> None:
    """Write damaged samples that a step went without to `RUN/corrupt.jsonl`, and say so."""
    for sample in corrupt:
        append_line(run / CORRUPT_NAME, {"step": step, **sample._asdict()})
        warn(f"step {step} goes on without a damaged sample: {sample.error}")


def append_line(path: Path, value: dict[str, Any]) -> bool:
    """Append a JSON line to a file, or nothing at all: a full disk leaves no half line.

    Returns:
        Whether it was written; where it was not, a warning has said why.
    """
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        data = (json.dumps(value) + "\n").encode()
        try:
            written = file.write(data)
            if written == len(data):
                return True
            reason = "the disk is full"
        except OSError as error:
            reason = str(error)
        os.ftruncate(file.fileno(), before)
    warn(f"{path} lacks a line: {reason}; the run goes on")
    return False
