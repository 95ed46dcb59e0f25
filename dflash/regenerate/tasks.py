"""Conversations whose answers are to be written anew."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.errors import CorpusError
from dflash.extract.conversation import Conversation, Message, Unusable, parse_row
from dflash.extract.formats import Row, find_sources


@dataclass(frozen=True)
class Task:
    """One conversation."""

    number: int
    """Place in the data, which is its place in the output."""
    id: str
    """The row's `id`, else a digest of what is asked; different from that of every other task."""
    asked: tuple[tuple[Message, ...], ...]
    """For each answer, the turns between the answer before it and itself."""
    kind: str | None
    """The row's `kind` field."""

    def prompt(self, answers: Sequence[Message]) -> list[Message]:
        """All turns before the next answer, given those there are."""
        messages: list[Message] = []
        for turns, answer in zip(self.asked, [*answers, None], strict=False):
            messages += turns
            if answer is not None:
                messages.append(answer)
        return messages


def load_tasks(data: Sequence[str]) -> tuple[list[Task], Counter[str]]:
    """Tasks of this data in its order, and counts of rows that are left out, by reason.

    Raises:
        CorpusError: data is missing or malformed, or no row asks anything.
    """
    tasks: list[Task] = []
    dropped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for source in find_sources(data):
        for row in source.rows():
            try:
                asked = _asked(row)
            except Unusable as reason:
                dropped[str(reason)] += 1
                continue
            name = str(row.fields.get("id") or _digest(asked))
            seen[name] += 1
            unique = name if seen[name] == 1 else f"{name}#{seen[name]}"
            kind = row.fields.get("kind")
            tasks.append(Task(len(tasks), unique, asked, None if kind is None else str(kind)))
    if not tasks:
        raise CorpusError(f"{', '.join(data)}: no row asks anything ({dict(dropped)}); give prompts or chats")
    return tasks, dropped


def _asked(row: Row) -> tuple[tuple[Message, ...], ...]:
    sample = parse_row(row, "strip")
    if not isinstance(sample, Conversation):
        raise Unusable("no_turns")
    if sample.tools or any(message["role"] == "tool" for message in sample.messages):
        # Results in the data answer the calls of the data, not those that the target would make.
        raise Unusable("tools")
    asked: list[tuple[Message, ...]] = []
    waiting: list[Message] = []
    for message in sample.messages:
        if message["role"] == "assistant":
            if waiting and waiting[-1]["role"] == "user":
                asked.append(tuple(waiting))
                waiting = []
        else:
            waiting.append({"role": message["role"], "content": message["content"]})
    if waiting and waiting[-1]["role"] == "user":
        asked.append(tuple(waiting))
    if not asked:
        raise Unusable("no_user_turn")
    return tuple(asked)


def _digest(asked: Any) -> str:
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
