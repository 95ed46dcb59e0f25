"""HTML in which text cannot become markup: only `tag` makes markup, and it escapes whatever is not."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable

_VOID = frozenset({"br", "hr", "meta"})
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Html(str):
    """Markup that is ready for a page."""

    __slots__ = ()


def text(value: object) -> Html:
    """Text of anything: escaped, and without characters that are no text or turn the reading direction."""
    return Html(html.escape("".join(map(_visible, str(value))), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element.

    Args:
        name: Of the element.
        children: `Html` as it is, iterables one after another, anything else as text; None is left out.
        attributes: `class_` is `class`, other underscores are hyphens; None and False are left out, True is
            the name alone.
    """
    opened = f"<{name}{''.join(_attribute(*item) for item in attributes.items())}>"
    return Html(opened if name in _VOID else f"{opened}{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Children of an element, one after another."""
    return Html("".join(map(_child, children)))


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, Iterable) and not isinstance(child, str):
        return join(child)
    return text(child)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{text(value)}"'


def _visible(character: str) -> str:
    if character in "\n\t":
        return character
    if character in _BIDI or unicodedata.category(character) in ("Cc", "Cs"):
        return f"\\u{ord(character):04x}"
    return character
