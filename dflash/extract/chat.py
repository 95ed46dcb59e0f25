"""Conversations through the target's chat template, with exact marks on what the target would have written.

The whole conversation is rendered and tokenised once, so that the token ids are what a server sees. The marks
are character spans of that text:

- A template with `{% generation %}` says itself what the assistant writes.
- Otherwise each assistant turn begins where the rendering of everything before it ends, generation prompt
  included, and ends where the rendering up to and with it ends. Both must be true prefixes of the whole. Some
  templates render the last turn unlike earlier ones (thinking dropped, another end-of-turn token); there
  the end is found by rendering the same place with another answer and taking what follows both. If nothing
  fits, the conversation is refused rather than guessed at.

The token that ends a turn is marked, white space after it and the generation prompt are not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.errors import CorpusError
from dflash.extract.conversation import Conversation, Message, Unusable, thinking_of
from dflash.files import digest_json

TEMPLATE_DATE = (2026, 1, 1)
"""The day that templates are told it is. With the real one the same corpus had other tokens tomorrow."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[Span, ...]
    """Half-open character ranges that the assistant wrote, ascending, without overlap."""


class ChatRenderer:
    """The chat template of one tokenizer.

    Args:
        tokenizer: A fast tokenizer (it must report character offsets).
        variables: What the template gets beside the turns, e.g. `enable_thinking`.

    Raises:
        CorpusError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise CorpusError(
                f"the tokenizer {type(tokenizer).__name__} reports no character offsets, "
                "which the loss mask needs; use the fast tokenizer (tokenizer.json) of the target"
            )
        self._tokenizer, self._variables = tokenizer, dict(variables or {})
        self._templates: dict[bool, str] = {}
        names = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
            tokenizer.all_special_tokens
        )
        names = {name for name in names if name.strip()}  # some vocabularies add runs of spaces
        # Longest first: one special token may begin with another.
        self._special = re.compile(
            "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) or r"(?!)"
        )
        self._end_tokens = {str(tokenizer.eos_token)} | _end_of_turn_names(names)

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False
    ) -> str:
        """Text of these turns.

        Raises:
            CorpusError: the tokenizer has no chat template.
            Unusable: the template refuses these turns.
        """
        template = self._template(tools)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self._variables,
                )
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise Unusable("template_refused") from error

    def render_marked(self, conversation: Conversation, where: str, *, last_only: bool = False) -> Rendered:
        """Text of a conversation and the spans that its assistant wrote.

        A first turn by the assistant answers nothing that a template could render, and is left unmarked.

        Args:
            conversation: The turns.
            where: What errors call it.
            last_only: Mark the last assistant turn alone.

        Raises:
            CorpusError: the spans cannot be told exactly; names the turn.
            Unusable: the template refuses the conversation, or it has no assistant turn.
        """
        messages, tools = conversation.messages, conversation.tools
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n > 0]
        if not turns:
            raise Unusable("no_assistant_turn")
        if _GENERATION.search(self._template(tools)):
            rendered = self._generation_spans(messages, tools, where)
        else:
            whole = self.render(messages, tools)
            finder = _TurnFinder(self, conversation, whole, where)
            marked = turns[-1:] if last_only else turns
            spans = tuple(self._trim(whole, finder.span(turn)) for turn in marked)
            rendered = self._with_thinking(conversation, Rendered(whole, spans))
        self._check_content(messages[turns[-1]], turns[-1], rendered, where)
        return Rendered(rendered.text, rendered.spans[-1:]) if last_only else rendered

    def last_special_end(self, text: str) -> int:
        """Where the last special token of a text ends; 0 without one."""
        return max((match.end() for match in self._special.finditer(text)), default=0)

    def special_at(self, text: str, start: int) -> int:
        """Where the special token that begins at `start` ends; `start` if there is none."""
        match = self._special.match(text, start)
        return match.end() if match else start

    def _template(self, tools: list[Any] | None) -> str:
        if bool(tools) not in self._templates:
            self._templates[bool(tools)] = self._dated_template(tools)
        return self._templates[bool(tools)]

    def _dated_template(self, tools: list[Any] | None) -> str:
        try:
            template = str(self._tokenizer.get_chat_template(None, tools))
        except ValueError as error:
            raise CorpusError(
                "the target's tokenizer has no chat template, so turns cannot be rendered; "
                "give rows with text, or with input_ids + loss_mask"
            ) from error
        return _NOW.sub(lambda match: json.dumps(_on_template_date(match[2])), template)

    def _generation_spans(self, messages: Sequence[Message], tools: list[Any] | None, where: str) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        present = [
            {name: value for name, value in message.items() if value is not None} for message in messages
        ]
        try:
            texts, spans = render_jinja_template(
                [present],
                tools=tools,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise Unusable("template_refused") from error
        text = texts[0]
        if not spans[0]:
            raise CorpusError(
                f"{where}: the template's generation block marked none of the assistant's turns"
            )
        return Rendered(text, tuple(self._trim(text, self._with_end_token(text, span)) for span in spans[0]))

    def _with_end_token(self, text: str, span: Span) -> Span:
        """Some templates close the generation block before the token that ends the turn."""
        end = self.special_at(text, span[1])
        return (span[0], end) if text[span[1] : end] in self._end_tokens else span

    def _trim(self, text: str, span: Span) -> Span:
        """Leave out the white space that the template writes after the end of a turn."""
        return span[0], span[0] + len(text[span[0] : span[1]].rstrip())

    def _with_thinking(self, conversation: Conversation, rendered: Rendered) -> Rendered:
        """Put back the thinking of the last turn where the template drops it from every finished turn.

        DeepSeek-R1's does, though its generation prompt opens the thinking itself. What a server sees is that
        prompt and behind it what the target wrote, so that is the text.
        """
        messages = conversation.messages
        start, end = rendered.spans[-1]
        answer, thinking = rendered.text[start:end], thinking_of(messages[-1])
        if messages[-1]["role"] != "assistant" or not thinking or thinking in answer:
            return rendered
        prompt = self.render(messages[:-1], conversation.tools, generation_prompt=True)
        opening = "<think>\n"
        if not prompt.endswith(opening) or prompt[: -len(opening)] != rendered.text[:start]:
            return rendered
        text = f"{prompt}{thinking}\n</think>\n\n{answer.lstrip()}"
        return Rendered(text, (*rendered.spans[:-1], (len(prompt), len(text))))

    def _check_content(self, message: Message, turn: int, rendered: Rendered, where: str) -> None:
        """Refuse a template that swallows what the last turn says: its thinking, or the tools it calls."""
        start, end = rendered.spans[-1]
        written = rendered.text[start:end]
        thinking = thinking_of(message)
        if thinking and thinking not in written:
            raise CorpusError(
                f"{where}, turn {turn}: the chat template leaves out the thinking of the last turn, "
                "so the drafter would learn answers without it; use thinking = strip if that is meant"
            )
        for call in message.get("tool_calls") or ():
            name = call.get("function", call).get("name") if isinstance(call, dict) else None
            if name and str(name) not in written:
                raise Unusable("tool_calls_not_rendered")


def _end_of_turn_names(names: set[str]) -> set[str]:
    known = re.compile(
        r"<\|?(im_end|eot_id|eom_id|end_of_turn|end_of_text|end|return|call|endoftext|turn)\|?>|</s>"
    )
    return {name for name in names if known.fullmatch(name)}


def _on_template_date(pattern: str) -> str:
    from datetime import datetime, timezone

    return datetime(*TEMPLATE_DATE, tzinfo=timezone.utc).strftime(pattern)


@dataclass(frozen=True)
class _TurnFinder:
    """Finds where an assistant turn begins and ends in the rendering of its conversation."""

    renderer: ChatRenderer
    conversation: Conversation
    whole: str
    where: str

    def span(self, turn: int) -> Span:
        """Characters of a turn, up to where the next turn's begin."""
        start = self._start(turn)
        end = self._end(turn, start)
        if end <= start:
            raise self._refusal(turn, "its rendering is empty")
        return start, end

    def _render(self, messages: Sequence[Message], turn: int, *, generation_prompt: bool = False) -> str:
        try:
            return self.renderer.render(
                messages, self.conversation.tools, generation_prompt=generation_prompt
            )
        except Unusable as error:
            cause = " ".join(str(error.__cause__).split())
            raise self._refusal(turn, f"the turns before it cannot be rendered alone ({cause})") from error

    def _start(self, turn: int) -> int:
        before = self.conversation.messages[:turn]
        prompt = self._render(before, turn, generation_prompt=True)
        if self.whole.startswith(prompt):
            return len(prompt)
        # The generation prompt may already begin the answer (`<think>`), which a finished turn does not show.
        # What both share up to a special token is the turn's header.
        plain = self._render(before, turn)
        shared = _common_prefix(prompt, self.whole)
        header = self.renderer.last_special_end(shared[len(plain) :]) if self.whole.startswith(plain) else 0
        if not header:
            raise self._refusal(turn, "what comes before it is rendered differently without it")
        return len(plain) + header

    def _end(self, turn: int, start: int) -> int:
        messages = self.conversation.messages
        if turn == len(messages) - 1:
            return len(self.whole)
        upto = self._render(messages[: turn + 1], turn)
        if self.whole.startswith(upto):
            return len(upto)
        with_next = self._render(messages[: turn + 2], turn)
        if not self.whole.startswith(with_next):
            raise self._refusal(turn, "it is rendered differently without the turns after it")
        return self._end_by_probe(turn, start, with_next)

    def _end_by_probe(self, turn: int, start: int, with_next: str) -> int:
        """The end of a turn as the place from which the text no longer depends on what the turn says."""
        messages = self.conversation.messages
        probe = "no" if messages[turn]["content"].rstrip().endswith("a") else "na"
        answers = [*messages[:turn], {"role": "assistant", "content": probe}, messages[turn + 1]]
        other = self._render(answers, turn)
        same = _common_prefix(with_next[start:][::-1], other[::-1])
        content_end = len(with_next) - len(same)
        end = self.renderer.special_at(with_next, content_end)
        if end == content_end:
            raise self._refusal(turn, "no end-of-turn token follows it")
        return end

    def _refusal(self, turn: int, problem: str) -> CorpusError:
        return CorpusError(
            f"{self.where}, turn {turn}: the chat template gives no exact mask for this assistant turn: "
            f"{problem}; mark the turns with {{% generation %}} in the template, or give one answer a row"
        )


def _common_prefix(one: str, other: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    return one[:length]


def tokenise(tokenizer: Any, rendered: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids (int32 [T]) and loss mask (uint8 [T]) of each text; special tokens stand in the text already.

    A token is supervised when all of its characters are the assistant's.
    """
    if not rendered:
        return []
    encoded = tokenizer(
        [item.text for item in rendered],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
    return [(np.asarray(ids, dtype=np.int32), span_mask(offsets, item.spans)) for ids, offsets, item in pairs]


def span_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """uint8 [T]: 1 where a token's characters lie inside one of the spans."""
    bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(bounds), dtype=np.uint8)
    for start, end in spans:
        mask |= ((bounds[:, 0] >= start) & (bounds[:, 1] <= end) & (bounds[:, 1] > bounds[:, 0])).astype(
            np.uint8
        )
    return mask


def tokenizer_digest(tokenizer: Any) -> str:
    """Sha256 of all that decides token ids; without truncation and padding, which calls change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = {
            name: part
            for name, part in json.loads(backend.to_str()).items()
            if name not in ("truncation", "padding")
        }
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return digest_json({"state": state, "special": special})


def template_digest(tokenizer: Any) -> str:
    """Sha256 of the chat template (or of the set of named ones); that of nothing where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return digest_json(template)
    return hashlib.sha256((template or "").encode()).hexdigest()
