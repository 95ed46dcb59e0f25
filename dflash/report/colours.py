"""The page's colours, light and dark; a test holds what is drawn on each other to WCAG's contrast."""

from __future__ import annotations

from dataclasses import dataclass

RUNS = 8
"""Runs or buckets that have a colour of their own."""


@dataclass(frozen=True)
class Scheme:
    """Colours as `#rrggbb`."""

    page: str
    panel: str
    """Behind figures and tables."""
    ink: str
    quiet: str
    """Axes, captions, notes."""
    rule: str
    """Grid and borders, which carry no meaning."""
    link: str
    marks: tuple[str, str]
    """Behind accepted runs of a text, neighbours in turn."""
    series: tuple[str, ...]
    """Runs or buckets, `RUNS` of them."""

    def pairs(self) -> list[tuple[str, str]]:
        """What is drawn, and on what."""
        words = [self.ink, self.quiet, self.link, *self.series]
        plain = [(word, ground) for word in words for ground in (self.page, self.panel)]
        return plain + [(self.ink, mark) for mark in self.marks]

    def css(self) -> str:
        """As custom properties."""
        values = {name: getattr(self, name) for name in ("page", "panel", "ink", "quiet", "rule", "link")}
        values |= {f"mark{n}": colour for n, colour in enumerate(self.marks)}
        values |= {f"series{n}": colour for n, colour in enumerate(self.series)}
        return "".join(f"--{name}:{value};" for name, value in values.items())


LIGHT = Scheme(
    page="#ffffff",
    panel="#f6f7f9",
    ink="#1a1d21",
    quiet="#4b5563",
    rule="#d3d8df",
    link="#0b57b0",
    marks=("#bfe6c8", "#c5dcfa"),
    series=("#0b5fb3", "#a84a00", "#1b7334", "#7a3db8", "#b3263a", "#0b6e75", "#a62a84", "#6b6100"),
)
DARK = Scheme(
    page="#14171b",
    panel="#1c2026",
    ink="#e8eaed",
    quiet="#aab2bd",
    rule="#3a414b",
    link="#8ab8ff",
    marks=("#1f5a35", "#24487d"),
    series=("#6db3ff", "#ffa657", "#6fd08c", "#c59bff", "#ff8f8f", "#5fd3d9", "#f59bd6", "#d3c84f"),
)


def stylesheet() -> str:
    """The properties of both schemes, the dark one where the reader's system is dark, and series classes."""
    series = "".join(f".c{n}{{--own:var(--series{n})}}" for n in range(RUNS))
    dark = f"@media (prefers-color-scheme:dark){{:root{{{DARK.css()}}}}}"
    return f":root{{{LIGHT.css()}}}{dark}{series}"


def contrast(one: str, other: str) -> float:
    """Contrast of two colours by WCAG 2, 1 to 21."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
