"""Answers on disk, one line each in order of arrival, flushed before they count; at the end put in order.

Beside `OUT.jsonl` stands `OUT.jsonl.partial` until all is done. Its first line says under which settings the
answers were got. A line that a kill has cut off is taken away at the next start.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import Self

from dflash.errors import ConfigError
from dflash.files import publish

PARTIAL_SUFFIX = ".partial"
_HEADER = "dflash-regenerate"


class Journal:
    """Append-only; a context manager, because it owns a file.

    Args:
        out: The file that is to be made.
        identity: Settings that decide the answers, JSON-ready.

    Raises:
        ConfigError: `out` is finished already, or its partial file belongs to other settings or is none.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}{PARTIAL_SUFFIX}")
        if out.exists():
            raise ConfigError(f"--out {out} is there already; give another name, or remove it")
        self.settled: dict[int, str] = {}
        """Ids by the number of every task that has an outcome."""
        self.dropped: Counter[str] = Counter()
        self.tokens = 0
        out.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._recover(identity)
        self._file = self.path.open("ab")
        if not self._file.tell():
            self._write({_HEADER: 1, "identity": identity})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def keep(self, number: int, row: dict[str, Any], tokens: int) -> None:
        """Record a finished conversation."""
        self._write({"number": number, "tokens": tokens, "row": row})
        self.settled[number] = row["id"]
        self.tokens += tokens

    def drop(self, number: int, name: str, reason: str) -> None:
        """Record that a conversation is left out, and why."""
        self._write({"number": number, "id": name, "dropped": reason})
        self.settled[number] = name
        self.dropped[reason] += 1

    def finish(self) -> int:
        """Write the rows in the order of the data and remove the partial file; how many rows there are."""
        self._file.close()
        places = sorted((entry["number"], place) for place, entry in _entries(self.path) if "row" in entry)

        def write(tmp: Path) -> None:
            with self.path.open("rb") as source, tmp.open("wb") as sink:
                for _, place in places:
                    source.seek(place)
                    row = json.loads(source.readline())["row"]
                    sink.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

        publish(self.out, write, replace=False)
        self.path.unlink()
        return len(places)

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _recover(self, identity: dict[str, Any]) -> None:
        end = 0
        for place, entry in _entries(self.path):
            if place == 0:
                self._check(entry, identity)
            elif "row" in entry:
                self.settled[entry["number"]] = entry["row"]["id"]
                self.tokens += entry["tokens"]
            else:
                self.settled[entry["number"]] = entry["id"]
                self.dropped[entry["dropped"]] += 1
            end = entry["end"]
        with self.path.open("r+b") as file:
            file.truncate(end)

    def _check(self, header: dict[str, Any], identity: dict[str, Any]) -> None:
        before = header.get("identity")
        if _HEADER not in header or not isinstance(before, dict):
            raise ConfigError(f"{self.path} is not of `dflash regenerate`; give another --out")
        changed = [key for key in sorted(before.keys() | identity) if before.get(key) != identity.get(key)]
        if changed:
            both = "; ".join(f"{key}: was {before.get(key)!r}, now {identity.get(key)!r}" for key in changed)
            raise ConfigError(
                f"{self.path} was begun with other settings: {both}; use the first values, or another --out"
            )


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Byte position and content of each whole line, with the position of its `end` in it."""
    place = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError:
                return  # a torn write: what follows cannot be whole either
            yield place, entry | {"end": place + len(line)}
            place += len(line)
