"""What comes back for one turn, and what is counted of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dflash.extract.conversation import Message

_REFUSAL = re.compile(
    r"\A\W*(i'?m (very |really |so )?sorry|sorry|i apologi[sz]e|i'?m unable|as an ai|"
    r"i (can'?t|cannot|can not|won'?t|am unable|am not able))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    """An assistant turn as the target wrote it."""

    text: str
    tokens: int
    """Tokens it took, as far as known."""
    truncated: bool = False
    """Cut at the length limit."""
    reasoning: str | None = None
    """Thinking that the server has taken out of the text."""
    filtered: bool = False
    """Withheld by the server."""

    def message(self) -> Message:
        """The turn for the next prompt and for the output."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        return turn | ({"reasoning_content": self.reasoning} if self.reasoning else {})

    def reason_to_drop(self, *, keep_truncated: bool) -> str | None:
        """Why a conversation with this answer is of no use."""
        if self.filtered:
            return "filtered"
        if not self.text.strip():
            return "empty"
        return "truncated" if self.truncated and not keep_truncated else None


def looks_like_refusal(text: str) -> bool:
    """Whether an answer begins as refusals do. Counted only: such answers are the target's own too."""
    return _REFUSAL.match(text.partition("</think>")[2] or text) is not None
