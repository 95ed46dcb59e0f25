"""`planned.json`: what the finished cache will hold of each length bucket, written before extraction begins.

Training that follows a cache while it is being written takes its quotas from here. It stands beside the
cache, as no part of it: a finished cache does not need it. A digest of itself is in it.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.cache.sealed import load_sealed, save_sealed
from dflash.errors import CacheCorrupt, CacheError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

PLANNED_NAME = "planned.json"


@dataclass(frozen=True)
class Planned:
    """What the finished cache will hold, unless samples turn out to be bad."""

    edges: tuple[int, ...]
    """Bucket edges, ascending."""
    samples: tuple[int, ...]
    """Samples of each bucket."""
    tokens: tuple[int, ...]
    """Tokens of each bucket."""
    longest: int
    """Tokens of the longest sample."""

    @classmethod
    def of(cls, lengths: NDArray[np.integer[Any]], edges: Sequence[int]) -> Planned:
        """What samples of these lengths `[N]` come to."""
        buckets = np.searchsorted(np.asarray(edges), lengths)
        samples = np.bincount(buckets, minlength=len(edges))
        tokens = [int(lengths[buckets == bucket].sum(dtype=np.int64)) for bucket in range(len(edges))]
        return cls(tuple(edges), tuple(samples.tolist()), tuple(tokens), int(lengths.max(initial=0)))

    @classmethod
    def from_json(cls, value: Any, where: str) -> Planned:
        """What `asdict` gave, back from JSON; `where` names its place in errors.

        Raises:
            CacheCorrupt: the figures are not there or cannot be.
        """
        try:
            edges, samples, tokens = (tuple(map(int, value[key])) for key in ("edges", "samples", "tokens"))
            planned = cls(edges, samples, tokens, int(value["longest"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CacheCorrupt(f"{where}: not the plan of an extraction ({error!r})") from error
        if not len(edges) == len(samples) == len(tokens) or min((*samples, *tokens), default=-1) < 0:
            raise CacheCorrupt(f"{where}: its figures are not one of each for {len(edges)} buckets")
        return planned


def save_planned(cache: Path, planned: Planned) -> None:
    """Write the plan, replacing that of an earlier start."""
    save_sealed(cache / PLANNED_NAME, asdict(planned))


def check_planned(cache: Path, edges: Sequence[int]) -> None:
    """Refuse a damaged plan, or that of another cache; none at all is fine.

    Raises:
        CacheCorrupt: names it.
    """
    if os.path.lexists(cache / PLANNED_NAME):
        load_planned(cache, edges)


def load_planned(cache: Path, edges: Sequence[int]) -> Planned:
    """Read the plan of a cache with these bucket edges.

    Raises:
        CacheError: there is none.
        CacheCorrupt: it is damaged, or that of another cache.
    """
    path = cache / PLANNED_NAME
    try:
        value = load_sealed(path)
    except FileNotFoundError as error:
        raise CacheError(
            f"{cache} has no {PLANNED_NAME}, which says how much of each length will come; "
            "`dflash extract` writes it when it starts or resumes"
        ) from error
    except (OSError, ValueError) as error:
        raise CacheCorrupt(f"{path} cannot be read ({error}); run the same `dflash extract` again") from error
    if set(value) != {field.name for field in fields(Planned)}:
        raise CacheCorrupt(f"{path}: not the plan of an extraction (keys {', '.join(value)})")
    planned = Planned.from_json(value, str(path))
    if planned.edges != tuple(edges):
        raise CacheCorrupt(f"{path} is for buckets {list(planned.edges)}, the cache has {list(edges)}")
    return planned
