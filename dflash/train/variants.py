"""Sampler settings as one word of a command line: `sampler=fifo,min-ready=10,max-ready=60`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash.errors import ConfigError
from dflash.train.sampler import SamplerConfig

_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "sampler": ("policy", str),
    "compose": ("compose", str),
    "mix": ("mix", str),
    "epoch-size": ("epoch_size", int),
    "tokens-per-batch": ("tokens_per_batch", int),
    "batches-per-step": ("batches_per_step", int),
    "min-ready": ("min_ready", int),
    "max-ready": ("max_ready", int),
    "supply": ("supply", float),
    "seed": ("seed", int),
}
DEFAULT_TEXTS = (
    "sampler=stratified,compose=mixed",
    "sampler=stratified,compose=bucketed",
    "sampler=shuffle,compose=bucketed,min-ready=30,max-ready=90",
    "sampler=fifo,compose=bucketed,min-ready=10,max-ready=60",
)
"""What is compared unless told otherwise: both compositions by quota, and the live queue of two depths."""


@dataclass(frozen=True)
class Variant:
    """Settings that are to be compared with others."""

    label: str
    """As they were given."""
    config: SamplerConfig


def parse_variant(text: str) -> Variant:
    """Settings `KEY=VALUE,KEY=VALUE`; keys are flags of `dflash train`, what is left out has its default.

    A part without `=` belongs to the value before it, as in `mix=256:0.2,512:0.8`.

    Raises:
        ConfigError: a key is unknown, given twice or has no such value, or the settings do not go together.
    """
    values: dict[str, Any] = {}
    for key, value in _pairs(text):
        if key not in _FIELDS:
            raise ConfigError(f"--settings {text}: unknown key {key!r}; it knows {', '.join(_FIELDS)}")
        name, kind = _FIELDS[key]
        if name in values:
            raise ConfigError(f"--settings {text}: {key} is given twice")
        try:
            values[name] = kind(value)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"--settings {text}: {key} is {value!r}, not {what}") from error
    try:
        return Variant(text, SamplerConfig(**values))
    except ConfigError as error:
        raise ConfigError(f"--settings {text}: {error}") from error


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if equals and key and value:
            pairs.append((key, value))
        elif part.strip() and not equals and pairs and pairs[-1][0] == "mix":
            pairs[-1] = ("mix", f"{pairs[-1][1]},{part.strip()}")
        else:
            wrong = part.strip() or "an empty entry"
            raise ConfigError(f"--settings {text}: {wrong} is not KEY=VALUE, such as min-ready=10")
    return pairs
