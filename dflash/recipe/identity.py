"""What things are, by content: a moved folder is the same one, a changed file is another."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.errors import CacheError, ConfigError, CorpusError, TargetError
from dflash.files import digest_file, digest_json, xxh3_file

_ALGORITHMS: dict[str, Callable[[Path], str]] = {"xxh3": xxh3_file, "sha256": digest_file}
_BLOB = re.compile(r"[0-9a-f]{64}")
_STATE = Path("trainer") / "state.json"
_STEP = re.compile(r"step-(\d{6,})")
# What decides neither a target's weights nor its words.
_PROSE = {".md", ".png", ".jpg", ".pdf"}


class FileDigests:
    """Digests of files, computed once as long as size and time of change stay the same.

    Args:
        known: What an earlier start has computed, as `known` returns it.
    """

    def __init__(self, known: dict[str, Any] | None = None) -> None:
        self._known: dict[str, list[Any]] = dict(known or {})

    def of(self, path: Path, algorithm: str = "xxh3") -> str:
        """Digest of a file as hex digits.

        Raises:
            OSError: it cannot be read.
        """
        there = path.resolve()
        if algorithm == "xxh3" and _BLOB.fullmatch(there.name):
            return there.name  # the hub's cache names its files by their sha256
        status = there.stat()
        key, stamp = f"{algorithm}:{there}", [status.st_size, status.st_mtime_ns]
        before = self._known.get(key)
        if before is None or before[:2] != stamp:
            before = self._known[key] = [*stamp, _ALGORITHMS[algorithm](there)]
        return str(before[2])

    def known(self) -> dict[str, Any]:
        """Everything known of files that are still there, JSON-ready."""
        return {key: entry for key, entry in self._known.items() if Path(key.partition(":")[2]).exists()}


def identity(kind: str, value: Any, digests: FileDigests) -> Any:
    """What an input is; JSON-ready, None where it is not there or not whole.

    Args:
        kind: As in `Stage.inputs`.
        value: The path or name, or a list of them.
        digests: Of files.

    Raises:
        CorpusError: data is not there.
        TargetError: a target's folder holds no files.
        ConfigError: something cannot be read.
    """
    many = isinstance(value, list)
    try:
        found = [_KINDS[kind](text, digests) for text in (value if many else [value])]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    if any(one is None for one in found):
        return None
    return found if many else found[0]


def _data(text: str, digests: FileDigests) -> Any:
    """Files by content, in their order; a data set or benchmark by its name."""
    path = Path(text).expanduser()
    if not (path.is_absolute() or path.exists() or glob.has_magic(text)):
        return {"name": text}
    from dflash.extract.formats import FileSource, find_sources

    sources = find_sources([text])
    return [digests.of(source.path) for source in sources if isinstance(source, FileSource)]


def _target(text: str, digests: FileDigests) -> Any:
    """A folder or file by content; a model on the hub by its name."""
    path = Path(text).expanduser()
    if path.is_file():
        return {"file": digests.of(path)}
    if not path.is_dir():
        if path.is_absolute():
            raise TargetError(f"{text}: no such target; give a model folder, a GGUF file or a hub name")
        return {"name": text}
    files = [
        file
        for file in sorted(path.iterdir())
        if file.is_file() and not file.name.startswith(".") and file.suffix not in _PROSE
    ]
    if not files:
        raise TargetError(f"{text}: an empty folder is no target")
    return {"folder": digest_json({file.name: digests.of(file) for file in files})}


def _cache(text: str, _digests: FileDigests) -> Any:
    """A finished cache by its settings and samples."""
    from dflash.cache.manifest import load_manifest

    try:
        manifest = load_manifest(cache_folder(text))
    except CacheError:
        return None
    return [manifest.digest(), manifest.content_digest] if manifest.complete else None


def cache_folder(text: str) -> Path:
    """The folder of a cache; that of its mirror for a URL."""
    if "://" not in text:
        return Path(text)
    from dflash.cache.mirror import local_folder

    return local_folder(text, pull=True)


def _drafter(text: str, digests: FileDigests) -> Any:
    """A drafter folder by its files; a run by the checkpoint that is taken of it."""
    folder = Path(text)
    if (folder / "config.json").is_file():
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        return digest_json({file.name: digests.of(file) for file in files})
    return best_checkpoint(folder, digests) or newest_checkpoint(folder, digests)


def newest_checkpoint(run: Path, digests: FileDigests) -> str | None:
    """Digest of a run's newest whole checkpoint."""
    found = [path for path in (run / "checkpoints").glob("step-*") if _STEP.fullmatch(path.name)]
    found.sort(key=lambda path: int(path.name[5:]), reverse=True)
    return next(filter(None, (_checkpoint(path, digests) for path in found)), None)


def best_checkpoint(run: Path, digests: FileDigests) -> str | None:
    """Digest of the checkpoint that a run marks as its best, if there is one and it is whole."""
    link = run / "checkpoints" / "best"
    return _checkpoint(link.parent / link.readlink().name, digests) if link.is_symlink() else None


def _checkpoint(folder: Path, digests: FileDigests) -> str | None:
    """A checkpoint's own digest where all its files have the bytes that were written."""
    try:
        state = json.loads((folder / _STATE).read_bytes())
        digest = state.pop("digest")
        whole = digest == digest_json(state) and all(
            digests.of(folder / name, "sha256") == written for name, written in state["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return str(digest) if whole else None


def _run(text: str, digests: FileDigests) -> Any:
    """A run by its checkpoint and by all that it recorded."""
    record = Path(text) / "metrics.jsonl"
    newest = newest_checkpoint(Path(text), digests)
    return [newest, digests.of(record)] if newest and record.is_file() else None


def _file(text: str, digests: FileDigests) -> Any:
    path = Path(text)
    return digests.of(path) if path.is_file() else None


_KINDS: dict[str, Callable[[str, FileDigests], Any]] = {
    "data": _data,
    "target": _target,
    "cache": _cache,
    "drafter": _drafter,
    "run": _run,
    "file": _file,
}


def output(kind: str, place: str, digests: FileDigests) -> tuple[Any, str | None]:
    """What a stage has left.

    Args:
        kind: As in `Stage.kind`.
        place: Its path, or a cache's URL.
        digests: Of files.

    Returns:
        Its identity, JSON-ready, and what is wrong with it, if anything.
    """
    if kind == "cache":
        return _cache_output(place)
    path = Path(place)
    if not path.exists():
        return None, f"{path} is not there"
    try:
        if kind == "run":
            newest = newest_checkpoint(path, digests)
            return [newest, best_checkpoint(path, digests)], (
                None if newest else f"{path} has no whole checkpoint"
            )
        if kind == "folder":
            return _folder(path, digests), None
        return digests.of(path), None
    except OSError as error:
        return None, f"{error.filename} cannot be read ({error.strerror})"


def _folder(folder: Path, digests: FileDigests) -> str:
    files: Sequence[Path] = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_json({path.relative_to(folder).as_posix(): digests.of(path) for path in files})


def _cache_output(place: str) -> tuple[Any, str | None]:
    if "://" not in place and not Path(place).exists():
        return None, f"{place} is not there"
    from dflash.cache.verify import verify  # loads torch

    try:
        report = verify(cache_folder(place), show=False)
    except (CacheError, CorpusError) as error:
        return None, str(error)
    if report.faults:
        fault = report.faults[0]
        return None, f"{len(report.faults):,} faults in {place}, e.g. {fault.file}: {fault.problem}"
    found = _cache(place, FileDigests())
    return found, None if found else f"{place} is not finished"
