"""A page taken apart strictly: every element closed where it must be, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "hr", "meta"}


@dataclass
class Element:
    """An element of the page."""

    name: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str = "") -> Iterator[Element]:
        """Elements of that name below this one, in document order; every element without a name."""
        for child in self.children:
            if isinstance(child, Element):
                if child.name == name or not name:
                    yield child
                yield from child.all(name)

    def text(self) -> str:
        """All text below."""
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)

    def classed(self, name: str) -> list[Element]:
        """Elements of that class below this one."""
        return [e for e in self.all() if name in (e.attributes.get("class") or "").split()]


@dataclass
class Page:
    """A page and its source."""

    source: str
    root: Element

    def by_id(self, name: str) -> Element:
        """The element of that id."""
        (found,) = [element for element in self.root.all() if element.attributes.get("id") == name]
        return found

    def table(self, caption: str) -> list[list[str]]:
        """Texts of the cells of the table with that caption, its head first."""
        (found,) = [t for t in self.root.all("table") if next(t.all("caption")).text() == caption]
        return [
            [cell.text() for cell in row.children if isinstance(cell, Element)] for row in found.all("tr")
        ]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        element = Element(tag, dict(attrs))
        self.stack[-1].children.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1].name == tag, f"</{tag}> closes <{self.stack[-1].name}>"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.stack[-1].children.append(data)


def parse(source: str) -> Page:
    """Take a page apart; a tag that is not closed in its order is an error."""
    parser = _Parser()
    parser.feed(source)
    parser.close()
    assert len(parser.stack) == 1, f"<{parser.stack[-1].name}> is not closed"
    return Page(source, parser.stack[0])
