"""Whether a saved position of the sampler can be read, and belongs to the stream that continues from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.errors import CacheMismatch, CheckpointError, ConfigError

STATE_VERSION = 2
_CORPUS_FIELDS = {"corpus", "samples"}
_KEYS = {"version", "fingerprint", "steps", "tokens", "stream"}


def check_position(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Check a saved position against the stream that is to continue from it.

    Args:
        state: The position, as it came back from a file.
        fingerprint: Everything that decides the order now, by name.

    Raises:
        CheckpointError: keys are missing, a number is none, or another format.
        CacheMismatch: the position belongs to another corpus; each field that differs is named.
        ConfigError: the same for settings and seed alone.
    """
    if state.get("version", STATE_VERSION) != STATE_VERSION:
        raise CheckpointError(
            f"the sampler's position was saved in format {state['version']}, but this version reads format "
            f"{STATE_VERSION}; resume with the version that wrote it"
        )
    if missing := sorted(_KEYS - set(state)):
        raise CheckpointError(f"the sampler's saved position lacks {', '.join(missing)}; start afresh")
    for name in ("steps", "tokens", "stream"):
        _check_counts(name, state[name])
    _check_fingerprint(state["fingerprint"], fingerprint)


def _check_counts(name: str, value: object) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_counts(f"{name}.{key}", entry)
    elif isinstance(value, list):
        for entry in value:
            _check_counts(name, entry)
    elif type(value) is not int or value < 0:
        raise CheckpointError(
            f"{name} of the sampler's saved position is {value!r}, not a count; start afresh"
        )


def _check_fingerprint(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    different = [name for name in now if saved.get(name) != now[name]]
    if not different:
        return
    both = "; ".join(f"{name}: was {saved.get(name)!r}, now {now[name]!r}" for name in different)
    kind = CacheMismatch if _CORPUS_FIELDS & set(different) else ConfigError
    raise kind(
        f"cannot resume, this would be another order of samples: {both}; "
        "go back to the first values, or start afresh"
    )
