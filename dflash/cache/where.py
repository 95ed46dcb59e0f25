"""The language of `--where`: which samples of a cache, told by what the index knows of each.

    length < 1024 and bucket = 512
    100 <= length < 200 or not (share > 0.5)
    id in (17, 42)

Names: `id`; `length` in tokens; `bucket`, its edge; `supervised`, tokens; `share` of supervised tokens.
Comparisons (`=` or `==`, `!=`, `<`, `<=`, `>`, `>=`, in chains too, and `in`) are joined by `and`, `or`,
`not` and brackets. A parser of its own, so that no text ever runs as code.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dflash.cache.index import CacheIndex

    Mask = NDArray[np.bool_]

NAMES = ("id", "length", "bucket", "supervised", "share")
_TOKEN = re.compile(r"\s*(?:(\d[\d_]*(?:\.\d+)?)|([A-Za-z_]+)|(<=|>=|==|!=|[<>=(),]))")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_MAX_TOKENS = 1000
"""Bounds the depth of brackets."""


def select(index: CacheIndex, edges: tuple[int, ...], where: str | None) -> NDArray[np.int64]:
    """Rows of the index, ascending, for which the condition holds; all without one.

    Raises:
        ConfigError: the text is no condition; says what was expected where.
    """
    if where is None:
        return np.arange(len(index))
    columns: dict[str, NDArray[Any]] = {
        "id": index.ids,
        "length": index.lengths,
        "bucket": np.array(edges, np.int64)[index.buckets],
        "supervised": index.supervised,
        "share": index.supervised / index.lengths,
    }
    return np.flatnonzero(_Parser(where, columns).whole())


class _Parser:
    """Recursive descent over the tokens of one condition, evaluated as it is read."""

    def __init__(self, text: str, columns: dict[str, NDArray[Any]]) -> None:
        self._text, self._columns = text, columns
        self._rows = len(columns["id"])
        self._tokens = self._split()
        self._place = 0

    def whole(self) -> Mask:
        """The condition's value for each row."""
        mask = self._any()
        if self._peek():
            raise self._error("the end, `and` or `or`")
        return mask

    def _split(self) -> list[str]:
        tokens, place, end = [], 0, len(self._text.rstrip())
        while place < end:
            match = _TOKEN.match(self._text, place)
            if match is None:
                raise ConfigError(
                    f"--where {self._text!r}: {self._text[place:].strip()[:1]!r} means nothing here"
                )
            tokens.append(match[match.lastindex or 0].lower())
            place = match.end()
        if len(tokens) > _MAX_TOKENS:
            raise ConfigError(f"--where: {len(tokens)} words, more than {_MAX_TOKENS}")
        return tokens

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._place += 1
        return token

    def _taken(self, token: str) -> bool:
        if self._peek() != token:
            return False
        self._place += 1
        return True

    def _expect(self, token: str) -> None:
        if not self._taken(token):
            raise self._error(f"`{token}`")

    def _error(self, expected: str) -> ConfigError:
        found = f"{self._peek()!r}" if self._peek() else "the end"
        return ConfigError(f"--where {self._text!r}: {expected} expected, not {found}; e.g. length < 1024")

    def _any(self) -> Mask:
        mask = self._all()
        while self._taken("or"):
            mask = mask | self._all()
        return mask

    def _all(self) -> Mask:
        mask = self._one()
        while self._taken("and"):
            mask = mask & self._one()
        return mask

    def _one(self) -> Mask:
        if self._taken("not"):
            return ~self._one()
        if self._taken("("):
            mask = self._any()
            self._expect(")")
            return mask
        return self._comparison()

    def _comparison(self) -> Mask:
        left, mask = self._operand(), np.ones(self._rows, np.bool_)
        if self._taken("in"):
            return self._member(left)
        if self._peek() not in _COMPARE:
            raise self._error("a comparison such as `<`")
        while self._peek() in _COMPARE:
            compare, right = _COMPARE[self._next()], self._operand()
            mask = mask & compare(left, right)
            left = right
        return mask

    def _member(self, left: Any) -> Mask:
        self._expect("(")
        mask = np.asarray(left == self._number())
        while self._taken(","):
            mask = mask | (left == self._number())
        self._expect(")")
        return mask

    def _operand(self) -> Any:
        if self._peek() in self._columns:
            return self._columns[self._next()]
        if self._peek()[:1].isdigit():
            return self._number()
        raise self._error(f"a number or one of {', '.join(NAMES)}")

    def _number(self) -> int | float:
        if not self._peek()[:1].isdigit():
            raise self._error("a number")
        text = self._next().replace("_", "")
        return float(text) if "." in text else int(text)
