"""Everything that can be found wrong with a cache, where reading stops at the first fault.

The index is taken fragment by fragment, so that one bad fragment does not hide what the others commit; of
two fragments that commit the same shard or sample, the later one in the order of names is the bad one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dflash.cache.fragment import INDEX_FOLDER
from dflash.cache.index import CacheIndex, check_complete, fragment_paths, load_index, shards_on_disk
from dflash.cache.manifest import REPAIR, Manifest
from dflash.cache.parts import TOKENIZER_FOLDER, part_names, part_problem
from dflash.cache.planned import PLANNED_NAME, check_planned
from dflash.cache.shard import SHARDS_FOLDER
from dflash.cache.speeds import SPEEDS_NAME, check_speeds
from dflash.errors import CacheCorrupt, CacheIncomplete
from dflash.files import TMP_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


BESIDE = (PLANNED_NAME, SPEEDS_NAME)
"""Files beside the cache: nothing has to be made again for a damaged one."""


class Fault(NamedTuple):
    """One thing that is wrong."""

    file: str
    """Path in the cache."""
    problem: str
    """What is wrong with it, in a few words."""
    samples: int = 0
    """Committed samples that are lost with it."""


def scan_index(cache: Path, manifest: Manifest) -> tuple[CacheIndex, list[Fault]]:
    """The index of the good fragments, and a fault for each bad one."""
    with suppress(CacheCorrupt):
        return load_index(cache, manifest), []
    faults: list[Fault] = []
    parts: list[tuple[Path, CacheIndex]] = []
    for path in fragment_paths(cache):
        try:
            parts.append((path, load_index(cache, manifest, [path])))
        except CacheCorrupt as error:  # noqa: PERF203 - each file on its own is the point
            faults.append(Fault(f"{INDEX_FOLDER}/{path.name}", short(error, path)))
    repeated = _repeated(parts)
    faults += [
        Fault(f"{INDEX_FOLDER}/{parts[number][0].name}", problem) for number, problem in repeated.items()
    ]
    good = [path for number, (path, _) in enumerate(parts) if number not in repeated]
    return load_index(cache, manifest, good), sorted(faults)


def completeness_fault(cache: Path, manifest: Manifest, index: CacheIndex) -> Fault | None:
    """What keeps a cache that calls itself complete from being so, its fragments being good."""
    try:
        check_complete(cache, manifest, index)
    except CacheIncomplete:
        return None
    except CacheCorrupt as error:
        return Fault(INDEX_FOLDER, short(error, cache / INDEX_FOLDER))
    return None


def part_faults(cache: Path, manifest: Manifest) -> list[Fault]:
    """Damaged and lost parts, and files that are in the tokenizer's folder or under shards by mistake."""
    faults = [
        Fault(name, problem) for name in manifest.files if (problem := part_problem(cache, manifest, name))
    ]
    foreign = [name for name in part_names(cache) if name not in manifest.files]
    if manifest.files:  # caches of the time before digests have none
        faults += [
            Fault(name, "not a file of this cache")
            for name in foreign
            if name.startswith(f"{TOKENIZER_FOLDER}/")
        ]
    return faults


def beside_faults(cache: Path, manifest: Manifest) -> list[Fault]:
    """Damaged files that stand beside the cache and that reading it does not need."""
    faults = []
    try:
        check_planned(cache, manifest.identity.bucket_edges)
    except CacheCorrupt as error:
        faults.append(Fault(PLANNED_NAME, short(error, cache / PLANNED_NAME)))
    try:
        check_speeds(cache)
    except (OSError, ValueError) as error:
        faults.append(Fault(SPEEDS_NAME, str(error)))
    return faults


def stray_faults(cache: Path, index: CacheIndex) -> list[Fault]:
    """Shards that no fragment commits, and files that are neither shard nor fragment in their folders."""
    committed = {layout.name for layout in index.layouts}
    shards = set(shards_on_disk(cache))
    known = shards | {f"{INDEX_FOLDER}/{path.name}" for path in fragment_paths(cache)}
    found = [*(cache / SHARDS_FOLDER).rglob("*"), *(cache / INDEX_FOLDER).rglob("*")]
    names = [path.relative_to(cache).as_posix() for path in found if not path.is_dir()]
    return [Fault(name, "no index fragment commits it") for name in sorted(shards - committed)] + [
        Fault(name, "neither a shard nor an index fragment")
        for name in sorted(names)
        if name not in known and not name.endswith(TMP_SUFFIX)
    ]


def short(error: Exception, path: Path | str) -> str:
    """An error's text without the path in front and the advice behind."""
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ").removesuffix(f"; {REPAIR}")


def _repeated(parts: Sequence[tuple[Path, CacheIndex]]) -> dict[int, str]:
    """Positions of the fragments that commit a shard or a sample of an earlier one, and what to say."""
    repeated: dict[int, str] = {}
    owner: dict[str, int] = {}
    for number, (_, index) in enumerate(parts):
        for layout in index.layouts:
            first = owner.setdefault(layout.name, number)
            if first != number:
                repeated[number] = f"commits {layout.name}, as {parts[first][0].name} does"
    kept = [number for number in range(len(parts)) if number not in repeated]
    ids = np.concatenate([parts[number][1].ids for number in kept] or [np.empty(0, np.uint64)])
    owners = np.repeat(kept, [len(parts[number][1]) for number in kept]).astype(np.int64)
    order = np.lexsort((owners, ids))
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1]) + 1
    for place in again.tolist():
        number, first = int(owners[order[place]]), int(owners[order[place - 1]])
        repeated[number] = f"commits sample {int(ids[order[place]])}, as {parts[first][0].name} does"
    return repeated
