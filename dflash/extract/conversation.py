"""The shapes a row of training data may have, brought to three: a conversation, plain text, or tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash.errors import CorpusError
from dflash.extract.formats import Row

Message = dict[str, Any]
Thinking = Literal["keep", "strip"]

_SHAPES = (
    "messages (a list of {role, content}), conversations (a list of {from, value}), prompt + completion, "
    "prompt + response, instruction [+ input] + output, text, input_ids + loss_mask"
)
_ROLES = {
    "user": ("user", "human", "prompter", "usr"),
    "assistant": (
        "assistant",
        "gpt",
        "chatgpt",
        "model",
        "bot",
        "bing",
        "bard",
        "function_call",
        "tool_call",
    ),
    "system": ("system",),
    "developer": ("developer",),
    "tool": ("tool", "function", "observation", "tool_response", "function_response", "ipython"),
}
_ROLE_OF = {spelling: role for role, spellings in _ROLES.items() for spelling in spellings}
_THINKING = re.compile(r"\A\s*(?:<think>)?.*?</think>\s*", re.DOTALL)
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class Unusable(Exception):  # noqa: N818 - a verdict on one row, counted, not an error
    """A row that is well formed but cannot be trained on; its text is the reason it is counted under."""


@dataclass(frozen=True)
class Conversation:
    """Turns for a chat template."""

    messages: tuple[Message, ...]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class PlainText:
    """Text without turns: every token is supervised."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A row that is already tokenised."""

    input_ids: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """uint8 [T]"""


Sample = Conversation | PlainText | Tokens


def parse_row(row: Row, thinking: Thinking = "keep") -> Sample:
    """Bring a row to one of the three forms.

    Args:
        row: As it was read.
        thinking: `"strip"` removes the reasoning of assistant turns before the template sees it.

    Raises:
        CorpusError: the row has none of the shapes, or a field has the wrong type; names what was found and
            what fits.
        Unusable: the row holds something other than text.
    """
    fields = {name: value for name, value in row.fields.items() if value is not None}
    if "input_ids" in fields:
        return _tokens(fields, row.where)
    messages = _turns(fields, row.where)
    if messages is None:
        if "text" not in fields:
            found = ", ".join(sorted(row.fields)) or "no fields"
            raise CorpusError(f"{row.where}: found {found}; a row needs one of: {_SHAPES}")
        return PlainText(_text(fields["text"], f"{row.where}: text"))
    if thinking == "strip":
        messages = [_without_thinking(message) for message in messages]
    return Conversation(tuple(messages), _tools(fields.get("tools"), row.where))


def _turns(fields: Mapping[str, Any], where: str) -> list[Message] | None:
    for name in ("messages", "conversations", "conversation"):
        if name in fields:
            return _messages(fields[name], f"{where}: {name}")
    for asked, answered in (("prompt", "completion"), ("prompt", "response"), ("instruction", "output")):
        if asked in fields and answered in fields:
            return [
                *_side(
                    _alpaca_prompt(fields) if asked == "instruction" else fields[asked],
                    "user",
                    f"{where}: {asked}",
                ),
                *_side(fields[answered], "assistant", f"{where}: {answered}"),
            ]
    return _side(fields["prompt"], "user", f"{where}: prompt") if "prompt" in fields else None


def _alpaca_prompt(fields: Mapping[str, Any]) -> Any:
    given = fields.get("input")
    return (
        f"{fields['instruction']}\n\n{given}"
        if isinstance(given, str) and given.strip()
        else fields["instruction"]
    )


def _side(value: Any, role: str, where: str) -> list[Message]:
    """One side of a prompt/answer pair: a string, or turns of its own."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, where)


def _messages(value: Any, where: str) -> list[Message]:
    turns = _parsed(value, where)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise CorpusError(
            f"{where}: found {type(value).__name__}; it must be a list of turns, each an object"
        )
    return [_message(turn, f"{where}, turn {number}") for number, turn in enumerate(turns)]


def _message(turn: Mapping[str, Any], where: str) -> Message:
    # A column of structs holds every key of every turn, most of them null.
    given = {name: value for name, value in turn.items() if value is not None}
    spelling = given.pop("role", given.pop("from", None))
    role = _ROLE_OF.get(str(spelling).strip().lower())
    if role is None:
        known = ", ".join(sorted(_ROLE_OF))
        raise CorpusError(
            f"{where}: role {spelling!r} is unknown; a turn has a role (or from) out of: {known}"
        )
    content = given.pop("content", given.pop("value", None))
    if content is None and role != "assistant" and "tool_calls" not in given:
        raise CorpusError(f"{where}: found {', '.join(sorted(turn))}; a {role} turn needs content (or value)")
    message = {"role": role, "content": "" if content is None else _text(content, where), **given}
    if "tool_calls" in given:
        message["tool_calls"] = [_tool_call(call) for call in _parsed(given["tool_calls"], where)]
    return message


def _text(content: Any, where: str) -> str:
    """Content as one string; text parts are joined by a newline, as servers do."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CorpusError(
            f"{where}: found {type(content).__name__}; content must be text, a list of text parts, or null"
        )
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise Unusable("not_text")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any) -> Any:
    """Arguments as an object: clients send JSON text, which servers decode before the template runs."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        decoded = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": decoded}} if isinstance(decoded, dict) else call


def _tools(value: Any, where: str) -> list[Any] | None:
    tools = _parsed(value, f"{where}: tools")
    if tools is None or isinstance(tools, list):
        return tools or None
    raise CorpusError(f"{where}: tools is {type(tools).__name__}; it must be a list of tool descriptions")


def _parsed(value: Any, where: str) -> Any:
    """Nested values that a column of strings holds as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise CorpusError(f"{where}: found text that is not JSON ({error})") from error


def _without_thinking(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {name: value for name, value in message.items() if name not in _REASONING_FIELDS}
    return {**kept, "content": _THINKING.sub("", message["content"])}


def thinking_of(message: Message) -> str:
    """The reasoning an assistant turn carries, in a field of its own or before `</think>`; may be empty."""
    for name in _REASONING_FIELDS:
        if isinstance(message.get(name), str):
            return str(message[name]).strip()
    before, mark, _ = message["content"].partition("</think>")
    return before.strip().removeprefix("<think>").strip() if mark else ""


def _tokens(fields: Mapping[str, Any], where: str) -> Tokens:
    if "loss_mask" not in fields:
        raise CorpusError(f"{where}: found input_ids without loss_mask; give one 0 or 1 for every token")
    ids, mask = (np.asarray(fields[name]) for name in ("input_ids", "loss_mask"))
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise CorpusError(
            f"{where}: input_ids has shape {ids.shape}, loss_mask {mask.shape}; both must be [tokens]"
        )
    if ids.size and (
        ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub" or not np.isin(mask, (0, 1)).all()
    ):
        raise CorpusError(f"{where}: input_ids must be integers, and loss_mask 0 or 1")
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise CorpusError(
            f"{where}: input_ids lie between {ids.min()} and {ids.max()}; token ids are not negative"
        )
    return Tokens(ids.astype(np.int32), mask.astype(np.uint8))
