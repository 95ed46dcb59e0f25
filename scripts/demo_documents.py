"""The demo's document prompts: Python's own source and manual, and papers made up from templates.

The functions and the manual's pages (`pydoc_data.topics`) are read from the standard library of the Python
that runs the script; they are copyright Python Software Foundation, under the PSF licence version 2. What is
made up and what is asked is in `demo_documents.toml`.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path
from pydoc_data.topics import topics
from sysconfig import get_path
from typing import TYPE_CHECKING, Any

from demo_prompts import deck, load_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TEMPLATES = Path(__file__).with_suffix(".toml")


def draw_documents(seed: int, path: Path = TEMPLATES) -> list[str]:
    """Prompts around documents, each document in one prompt only; the same for the same seed and Python."""
    plan, rng = load_toml(path), random.Random(seed)
    least, most = plan["characters"]["least"], plan["characters"]["most"]
    code = _pick(function_sources(plan["code"]["modules"]), least, most)
    pages = _pick(manual_pages(rng, least, most), least, most)
    papers = [(made_up(paper, plan["words"], rng) for _ in range(paper["count"])) for paper in plan["paper"]]
    lengths = deck(plan["lengths"], rng)
    groups = [
        (plan["code"], [f"```python\n{text}\n```" for text in _sample(code, plan["code"]["count"], rng)]),
        (plan["manual"], _sample(pages, plan["manual"]["count"], rng)),
        *zip(plan["paper"], papers, strict=True),
    ]
    prompts = []
    for group, texts in groups:
        tasks = deck(group["tasks"], rng)
        for text in texts:
            task = next(tasks).format(b=next(lengths))
            prompts.append(rng.choice((f"{task}\n\n{text}", f"{text}\n\n{task}")))
    return prompts


def function_sources(modules: Iterable[str]) -> Iterator[str]:
    """Source of every function of these modules, in file order; those this Python lacks are left out."""
    for module in modules:
        path = Path(get_path("stdlib"), f"{module}.py")
        if path.is_file():
            source = path.read_text(encoding="utf-8")
            lines = source.split("\n")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef):
                    yield _cut_out(lines, node)


def _cut_out(lines: list[str], node: ast.FunctionDef) -> str:
    # Not `ast.get_source_segment`, which splits the whole source again for every function.
    first, indent, last = node.lineno - 1, node.col_offset, node.end_lineno or node.lineno
    text = [line[indent:] if line[:indent].isspace() or not indent else line for line in lines[first:last]]
    end = (
        lines[last - 1].encode()[: node.end_col_offset].decode()
    )  # without a comment that follows the last word
    text[-1] = end[indent:] if end[:indent].isspace() else end
    return "\n".join(text)


def manual_pages(rng: random.Random, least: int, most: int) -> Iterator[str]:
    """Beginnings of the manual's pages, each cut after a paragraph, between `least` and `most` characters."""
    for name in sorted(topics):
        text, limit = "", rng.randint(least, most)
        for paragraph in topics[name].strip().split("\n\n"):
            if len(text) >= least and len(text) + len(paragraph) > limit:
                break
            text += paragraph + "\n\n"
        yield text.strip()


def made_up(paper: dict[str, Any], words: dict[str, list[str]], rng: random.Random) -> str:
    """A paper of as many lines as its template allows."""
    slots = {
        name: words[value] if isinstance(value, str) else value for name, value in paper["slots"].items()
    }
    decks = {name: deck(values, rng) for name, values in slots.items()}
    lines = [paper["head"].format(**{name: next(values) for name, values in decks.items()})]
    for n in range(1, rng.randint(*paper["lines"]) + 1):
        numbers = {"n": n, "small": rng.randint(2, 12), "large": rng.randint(13, 99)}
        clock = f"{8 + n // 6:02d}:{n % 6 * 10 + rng.randint(0, 9):02d}"
        lines.append(paper["line"].format(clock=clock, **numbers, **{k: next(v) for k, v in decks.items()}))
    return "\n".join(lines)


def _pick(texts: Iterable[str], least: int, most: int) -> list[str]:
    return [text for text in dict.fromkeys(texts) if least <= len(text) <= most]


def _sample(texts: list[str], count: int, rng: random.Random) -> list[str]:
    return rng.sample(texts, min(count, len(texts)))
