"""Samples whose accepted runs are shown, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text of neighbouring tokens of a response."""

    text: str
    drafts: int
    """Accepted drafts that it is made of; 0 for a token that the target itself puts out."""


@dataclass(frozen=True)
class SampleText:
    """One response and the serving walk over it."""

    id: int
    prompt: str
    """What stands before the response, its end where it is long."""
    pieces: Sequence[Piece]
    cycles: int
    """Verification passes of the walk."""
    tokens: int
    """Tokens that they added."""


@dataclass(frozen=True)
class RunTexts:
    """Samples of one run, or why there are none."""

    samples: Sequence[SampleText] = ()
    note: str = ""
    """Where they come from, or why there are none."""


def pieces_of(token_texts: Sequence[str], strides: Sequence[int], drafts: Sequence[int]) -> list[Piece]:
    """Put the tokens of a response together to what the walk accepted at once.

    Args:
        token_texts: Text of each token; the first is where the walk starts.
        strides: Tokens that each cycle of the walk adds; together all but the first.
        drafts: Right drafts of each cycle, of which no more than its stride lie in the response.
    """
    pieces, place = [Piece(token_texts[0], 0)], 1
    for stride, right in zip(strides, drafts, strict=True):
        accepted = min(right, stride)
        ends = [place + accepted, place + stride]
        for start, end, count in ((place, ends[0], accepted), (ends[0], ends[1], 0)):
            if end > start:
                pieces.append(Piece("".join(token_texts[start:end]), count))
        place = ends[1]
    return pieces
