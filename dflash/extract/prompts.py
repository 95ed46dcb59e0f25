"""Prompts for evaluation: conversations up to what the last user says, as a server would be asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.errors import CorpusError
from dflash.extract.benchmarks import benchmark_rows, is_benchmark
from dflash.extract.chat import ChatRenderer, Rendered, tokenise
from dflash.extract.conversation import Conversation, PlainText, Thinking, Unusable, parse_row
from dflash.extract.formats import Row, find_sources


@dataclass(frozen=True)
class Prompt:
    """What the target is asked, and what the data has for an answer."""

    input_ids: np.ndarray
    """int32 [T], generation prompt included."""
    reference_ids: np.ndarray
    """int32 [R], the data's answer with its end-of-turn token; empty where the data has none."""
    kind: str | None
    """The row's `kind` field."""
    name: str
    """The row's `id` field, else where the row stands."""


def load_prompts(
    data: Sequence[str],
    tokenizer: Any,
    thinking: Thinking = "keep",
    *,
    template_thinking: bool | None = None,
) -> list[Prompt]:
    """Prompts of these files, folders, patterns, data sets or benchmarks, in their order.

    Args:
        data: What `--data` takes, or names of `BENCHMARKS`.
        tokenizer: The target's.
        thinking: Whether the reasoning of earlier turns is kept.
        template_thinking: What the template's variable `enable_thinking` is; left alone when None.

    Rows without a user turn, and those the template refuses, are left out.

    Raises:
        CorpusError: data is missing or malformed, a row is plain text, or no prompt is left.
    """
    variables = {} if template_thinking is None else {"enable_thinking": template_thinking}
    renderer = ChatRenderer(tokenizer, variables)
    prompts = []
    for name in data:
        for row in benchmark_rows(name) if is_benchmark(name) else _rows([name]):
            try:
                prompts.append(_prompt(row, tokenizer, renderer, thinking))
            except Unusable:  # noqa: PERF203 - a verdict on one row must not end the others
                continue
    if not prompts:
        raise CorpusError(f"{', '.join(data)}: no row has a user turn that the chat template can render")
    return prompts


def selected(prompts: list[Prompt], per_kind: int | None) -> list[Prompt]:
    """At most so many prompts of each kind, in their order."""
    seen: Counter[str | None] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.kind] += 1
        if per_kind is None or seen[prompt.kind] <= per_kind:
            chosen.append(prompt)
    return chosen


def _rows(data: Sequence[str]) -> Iterator[Row]:
    for source in find_sources(data):
        yield from source.rows()


def _prompt(row: Row, tokenizer: Any, renderer: ChatRenderer, thinking: Thinking) -> Prompt:
    sample = parse_row(row, thinking)
    if isinstance(sample, PlainText):
        raise CorpusError(f"{row.where}: plain text has no prompt; evaluation needs conversations or prompts")
    if isinstance(sample, Conversation):
        asked, answer = _asked_and_answer(sample, row, tokenizer, renderer)
    else:
        start = int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else len(sample.loss_mask)
        asked, answer = sample.input_ids[:start], sample.input_ids[start:][sample.loss_mask[start:] == 1]
    if not len(asked):
        raise Unusable("no_prompt")
    kind = row.fields.get("kind")
    return Prompt(asked, answer, None if kind is None else str(kind), str(row.fields.get("id") or row.where))


def _asked_and_answer(
    conversation: Conversation, row: Row, tokenizer: Any, renderer: ChatRenderer
) -> tuple[np.ndarray, np.ndarray]:
    messages, tools = conversation.messages, conversation.tools
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise Unusable("no_user_turn")
    text = renderer.render(messages[: last + 1], tools, generation_prompt=True)
    asked = tokenise(tokenizer, [Rendered(text, ())])[0][0]
    answered = messages[last + 1 : last + 2]
    if not answered or answered[0]["role"] != "assistant":
        return asked, np.empty(0, dtype=np.int32)
    whole = renderer.render_marked(Conversation(messages[: last + 2], tools), row.where)
    ids, mask = tokenise(tokenizer, [Rendered(whole.text, whole.spans[-1:])])[0]
    return asked, ids[mask == 1]
