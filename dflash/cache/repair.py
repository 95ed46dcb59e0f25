"""`dflash cache repair`: what is bad goes aside, and the cache owes it again.

1. A deep check lists the faults. Without any, nothing is changed.
2. The ids of the samples that are lost are written to `CACHE/repaired/<n>/samples.txt`, one a line.
3. Bad parts move to `CACHE/repaired/<n>/`, under the names that they had; then the manifest is replaced by
   one that is incomplete and no longer knows them.
4. Bad shards and their index fragments follow. A fragment that commits good shards too is replaced by one
   that commits those alone.

The command that made the cache, run again, then makes just what is missing. A crash in between leaves an
incomplete cache and some files aside; repairing again goes on. Where only files beside the cache are bad
(`planned.json`, `speeds.json`) they go aside and the manifest stays.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dflash.cache.fragment import INDEX_FOLDER, SCHEMA, encode_fragment
from dflash.cache.index import CacheIndex, fragment_paths, load_index
from dflash.cache.manifest import (
    MANIFEST_NAME,
    REPAIRED_FOLDER,
    Manifest,
    load_manifest,
    save_manifest,
)
from dflash.cache.mirror import writing
from dflash.cache.parts import TOKENIZER_FOLDER
from dflash.cache.scan import BESIDE, Fault, short
from dflash.cache.shard import SHARDS_FOLDER
from dflash.cache.verify import fault_table, verify_loaded
from dflash.errors import CacheCorrupt, CacheError
from dflash.files import fsync_path, publish_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

LIST_NAME = "samples.txt"


@dataclass(frozen=True)
class RepairReport:
    """What `repair` did."""

    cache: Path
    faults: tuple[Fault, ...]
    aside: Path | None
    """The folder with the bad files; None where nothing was bad."""
    lost: tuple[int, ...]
    """Ids of the samples to make again, ascending."""
    unlisted: int
    """Samples to make again whose ids stood in unreadable index fragments alone."""
    made_by: str | None
    """The command to run again, in words; None where nothing has to be made again."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready value."""
        return {
            "cache": str(self.cache),
            "faults": [fault._asdict() for fault in self.faults],
            "aside": None if self.aside is None else str(self.aside),
            "samples": list(self.lost),
            "unlisted_samples": self.unlisted,
            "made_by": self.made_by,
        }

    def text(self) -> str:
        """What a terminal shows."""
        if self.aside is None:
            return f"{self.cache}: nothing is bad, nothing was changed"
        if self.made_by is None:
            return "\n".join(
                [*fault_table(self.faults), f"moved to {self.aside}; the cache is whole without"]
            )
        more = f", and {self.unlisted:,} whose ids only a damaged commit record knew" if self.unlisted else ""
        return "\n".join(
            [
                *fault_table(self.faults),
                f"moved to {self.aside}",
                f"{len(self.lost):,} samples to make again{more}; their ids: {self.aside / LIST_NAME}",
                f"run {self.made_by} again to restore them",
            ]
        )


def repair(cache: Path, *, deep: bool = True, jobs: int = 1, show: bool = True) -> RepairReport:
    """Set aside what is bad in a cache.

    Args:
        cache: The cache's folder; nothing else may be writing it.
        deep: Read every byte of every shard; else only what the structure shows is found.
        jobs: Threads that read shards.
        show: Whether to show progress.

    Raises:
        CacheError: `cache` is not a cache, cannot be written, or another run is writing to its store.
    """
    try:
        with writing(cache) as mirror:
            manifest = _manifest_of(cache)
            if isinstance(manifest, Fault):
                return _without_manifest(cache, manifest)
            index, faults, _ = verify_loaded(cache, manifest, deep=deep, jobs=jobs, show=show)
            made_by = (
                f"`dflash cache {manifest.derived}`" if manifest.derived else "the same `dflash extract`"
            )
            if not faults:
                return RepairReport(cache, (), None, (), 0, made_by)
            if all(fault.file in BESIDE for fault in faults):
                report = _without_beside(cache, faults)
            else:
                report = _repaired(cache, manifest, index, faults, made_by)
            if mirror is not None:
                committed = load_index(cache, load_manifest(cache)).layouts
                mirror.push_repaired(layout.name for layout in committed)
            return report
    except OSError as error:
        raise CacheError(f"cannot repair {cache}: {error}; nothing is lost, run the command again") from error


def _manifest_of(cache: Path) -> Manifest | Fault:
    try:
        return load_manifest(cache)
    except CacheCorrupt as error:
        return Fault(MANIFEST_NAME, short(error, cache / MANIFEST_NAME))
    except CacheError:
        if (cache / MANIFEST_NAME).exists() or not (cache / INDEX_FOLDER).is_dir():
            raise
        return Fault(MANIFEST_NAME, "missing")


def _without_manifest(cache: Path, fault: Fault) -> RepairReport:
    """Extraction makes the same manifest again; all else stays, since each fragment names its identity."""
    aside = _new_folder(cache)
    _move(cache, aside, [MANIFEST_NAME])
    publish_bytes(aside / LIST_NAME, b"")
    return RepairReport(cache, (fault,), aside, (), 0, "the same `dflash extract`")


def _without_beside(cache: Path, faults: Sequence[Fault]) -> RepairReport:
    """Nothing has to be made again."""
    aside = _new_folder(cache)
    _move(cache, aside, {fault.file for fault in faults})
    publish_bytes(aside / LIST_NAME, b"")
    return RepairReport(cache, tuple(faults), aside, (), 0, None)


def _repaired(
    cache: Path, manifest: Manifest, index: CacheIndex, faults: Sequence[Fault], made_by: str
) -> RepairReport:
    bad = {fault.file for fault in faults}
    bad_shards = {name for name in bad if name.startswith(f"{SHARDS_FOLDER}/")}
    lost = _ids_in(index, bad_shards)
    aside = _new_folder(cache)
    text = "".join(f"{sample}\n" for sample in lost.tolist())
    publish_bytes(aside / LIST_NAME, text.encode())
    publish_bytes(aside / "faults.json", json.dumps([fault._asdict() for fault in faults], indent=2).encode())
    # Parts first: extraction would take a bad one that is still there, but unknown to the manifest, for good.
    moved = {name for name in bad if name != INDEX_FOLDER}
    parts = {name for name in moved if not name.startswith((f"{SHARDS_FOLDER}/", f"{INDEX_FOLDER}/"))}
    _move(cache, aside, parts)
    files = {name: digest for name, digest in manifest.files.items() if not _is_bad_part(name, parts)}
    save_manifest(cache, replace(manifest, complete=False, content_digest=None, files=files))
    if any(name.startswith(f"{INDEX_FOLDER}/") for name in bad):
        # What bad fragments commit is lost with them: the next start would remove those shards.
        committed = {layout.name for layout in index.layouts}
        moved |= {name for name in _shard_files(cache) if name not in committed}
    for path in fragment_paths(cache):
        name = f"{INDEX_FOLDER}/{path.name}"
        if name not in bad and _without_shards(cache, manifest, aside, path, bad_shards):
            moved.add(name)
    _move(cache, aside, moved - parts)
    gone = manifest.expected_samples - (len(index) - len(lost)) if manifest.complete else len(lost)
    return RepairReport(cache, tuple(faults), aside, tuple(lost.tolist()), max(gone - len(lost), 0), made_by)


def _is_bad_part(name: str, bad: Collection[str]) -> bool:
    """Whether a part is written anew; the tokenizer's files are, all together."""
    tokenizer = any(other.startswith(f"{TOKENIZER_FOLDER}/") for other in bad)
    return name in bad or (tokenizer and name.startswith(f"{TOKENIZER_FOLDER}/"))


def _ids_in(index: CacheIndex, shards: Collection[str]) -> NDArray[np.uint64]:
    """Ids of the samples in these shards, ascending."""
    numbers = [number for number, layout in enumerate(index.layouts) if layout.name in shards]
    rows = np.arange(len(index))
    return index.ids[np.isin(index.locate(rows).shards, numbers)]


def _shard_files(cache: Path) -> list[str]:
    found = (cache / SHARDS_FOLDER).rglob("*")
    return [path.relative_to(cache).as_posix() for path in found if not path.is_dir()]


def _without_shards(cache: Path, manifest: Manifest, aside: Path, path: Path, bad: Collection[str]) -> bool:
    """Take bad shards out of a good fragment; true where none is left, so that it is to be moved."""
    index = load_index(cache, manifest, [path])
    names = [layout.name for layout in index.layouts]
    keep = [number for number, name in enumerate(names) if name not in bad]
    if len(keep) == len(names) or not keep:
        return not keep
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all().combine_chunks()
    shard = table["shard"].chunk(0).indices.to_numpy()
    chosen = np.isin(shard, keep)
    columns: dict[str, Any] = {
        name: table[name].to_numpy()[chosen] for name in SCHEMA.names if name != "shard"
    }
    columns["shard"] = np.searchsorted(keep, shard[chosen]).astype(np.int32)
    digests = [index.digests[number] for number in keep]
    data = encode_fragment(
        [names[number] for number in keep],
        columns,
        path.stem,
        manifest.digest(),
        digests if all(digests) else (),
    )
    publish_bytes(aside / path.name, path.read_bytes())
    publish_bytes(path, data)
    return False


def _new_folder(cache: Path) -> Path:
    """`CACHE/repaired/<n>`, new."""
    parent = cache / REPAIRED_FOLDER
    parent.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    folder = parent / f"{number:03d}"
    folder.mkdir()
    fsync_path(parent)
    fsync_path(cache)
    return folder


def _move(cache: Path, aside: Path, names: Collection[str]) -> None:
    """Move files of the cache, where they exist; of the tokenizer all."""
    whole = {TOKENIZER_FOLDER if name.startswith(f"{TOKENIZER_FOLDER}/") else name for name in names}
    for name in sorted(whole):
        path, place = cache / name, aside / name
        if path.exists() or path.is_symlink():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
            fsync_path(path.parent)
            fsync_path(place.parent)
