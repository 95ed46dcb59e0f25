"""Short and long-form prompts of the demo, drawn from the templates in `demo_prompts.toml`.

Every slot of a family hands out its words without replacement until it is empty, and then starts again in
another order: a subject comes back as late as it can, in training or held out.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATES = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Family:
    """One kind of request: how many prompts, its phrasings, and the words of its slots."""

    count: int
    phrasings: list[str]
    slots: dict[str, list[str]]


def load_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load_families(kind: str, path: Path = TEMPLATES) -> list[Family]:
    """The families of one kind, `short` or `long-form`, with named word lists filled in."""
    table = load_toml(path)
    return [_family(row, table["words"]) for row in table[kind]]


def _family(row: dict[str, Any], words: dict[str, list[str]]) -> Family:
    slots = {
        name: words[value] if isinstance(value, str) else value
        for name, value in row.get("slots", {}).items()
    }
    return Family(row["count"], row["phrasings"], slots)


def draw_prompts(families: list[Family], seed: int) -> list[str]:
    """Fill the families' templates; the same seed gives the same prompts, none twice."""
    prompts: dict[str, None] = {}
    for number, family in enumerate(families):
        wanted = len(prompts) + family.count
        for prompt in _fill(family, random.Random(f"{seed}/{number}")):
            prompts[prompt] = None
            if len(prompts) == wanted:
                break
    return list(prompts)


def _fill(family: Family, rng: random.Random) -> Iterator[str]:
    decks = {name: deck(words, rng) for name, words in family.slots.items()}
    phrasings = deck(family.phrasings, rng)
    # Twenty rounds find every combination that a family is asked for; a family asked for more ends short.
    for _ in range(20 * family.count):
        words = {name: next(deck) for name, deck in decks.items()}
        numbers = {"small": rng.randint(2, 12), "large": rng.randint(13, 99), "more": rng.randint(100, 900)}
        yield next(phrasings).format(**words, **numbers)


def deck(words: list[str], rng: random.Random) -> Iterator[str]:
    """The words in random order, over and over, each time in another order."""
    while True:
        yield from rng.sample(words, len(words))
