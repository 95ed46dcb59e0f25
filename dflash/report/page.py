"""The whole page: one file that needs no network and lets none in."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from importlib.resources import files

from dflash import __version__
from dflash.report import curves, settings, tables
from dflash.report.axes import NONE
from dflash.report.colours import stylesheet
from dflash.report.gather import Sources
from dflash.report.markup import Html, tag

_PARTS: tuple[tuple[str, str, Callable[[Sources], Html | None]], ...] = (
    ("summary", "Summary", tables.summary),
    ("loss", "Loss", curves.loss),
    ("mix", "Length mix", curves.mix),
    ("window", "Window and waits", curves.window),
    ("acceptance", "Acceptance", curves.acceptance),
    ("walk", "Held-out walk", curves.walk),
    ("throughput", "Throughput", curves.throughput),
    ("decoding", "Decoding", tables.decoding),
    ("codec", "Codec", tables.codec),
    ("faults", "What went wrong", tables.faults),
    ("samples", "Sample texts", tables.samples),
    ("configuration", "Configuration", settings.configuration),
)


def page(sources: Sources) -> str:
    """The report as an HTML document."""
    made = [(name, title, make(sources)) for name, title, make in _PARTS]
    parts = [(name, title, part) for name, title, part in made if part is not None]
    names = ", ".join(source.label for source in sources.runs)
    links = [tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in parts]
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#summary", class_="skip"),
        tag("header", tag("h1", f"Training report: {names}"), tag("p", _about(sources), class_="note")),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag("main", [part for *_, part in parts]),
        tag("footer", tag("p", f"Made by dflash report, version {__version__}.")),
        _inline("script", "page.js"),
    )
    return f"<!doctype html>\n{tag('html', _head(names), body, lang='en')}\n"


def _about(sources: Sources) -> str:
    config = sources.runs[0].run.config
    drafter = config.get("drafter", {})
    return (
        f"A drafter of {drafter.get('num_hidden_layers', NONE)} layers and blocks of "
        f"{drafter.get('block_size', NONE)}, trained from the cache {config.get('cache', NONE)}."
    )


def _head(names: str) -> Html:
    # Whatever a corpus holds, the browser loads nothing and runs no script but ours.
    policy = f"default-src 'none'; style-src '{_digest(_style())}'; script-src '{_digest(_asset('page.js'))}'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"{policy}; base-uri 'none'; form-action 'none'",
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Training report: {names}"),
        tag("style", Html(_style())),
    )


def _style() -> str:
    return stylesheet() + _asset("page.css")


def _inline(element: str, name: str) -> Html:
    return tag(element, Html(_asset(name)))


def _asset(name: str) -> str:
    return (files("dflash.report") / name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
