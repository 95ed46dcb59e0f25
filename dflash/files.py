"""Writing files so that a crash at any moment leaves either the old state or the new one, never a mixture."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import xxhash

from dflash.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TMP_SUFFIX = ".tmp"
_CHUNK = 8 << 20


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path, write: Callable[[Path], object], *, replace: bool = True) -> None:
    """Let `write` fill a temporary neighbour of `path`, flush it, and move it into place in one step.

    Args:
        path: The final name.
        write: Called with the temporary name; whatever it raises leaves `path` untouched.
        replace: Whether an existing file may be replaced; if not, its presence is an error.

    Raises:
        FileExistsError: `path` exists and `replace` is false. Nothing was changed.
    """
    tmp = path.with_name(f"{path.name}.{os.getpid()}{TMP_SUFFIX}")
    try:
        write(tmp)
        fsync_path(tmp)
        if replace:
            tmp.replace(path)
        else:
            os.link(tmp, path)  # unlike rename, link refuses to replace
            tmp.unlink()
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def publish_bytes(path: Path, data: bytes, *, replace: bool = True) -> None:
    """`publish` of these bytes."""
    publish(path, lambda tmp: tmp.write_bytes(data), replace=replace)


def publish_json(path: Path, value: Any, *, replace: bool = True) -> None:
    """`publish` of a value as indented JSON with sorted keys."""
    publish_bytes(path, json_bytes(value), replace=replace)


def json_bytes(value: Any) -> bytes:
    """Indented JSON with sorted keys and a final newline: the same bytes for the same value."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def digest_json(value: Any) -> str:
    """Sha256 of a value's compact sorted JSON, as 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path, algorithm: str = "sha256") -> str:
    """Digest of a file's bytes, as hex digits, read in bounded memory."""
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, algorithm).hexdigest()
            if hasattr(hashlib, "file_digest")
            else _digest(file, algorithm)
        )


def size_of_file(path: Path) -> int:
    """Bytes of a regular file; -1 for anything else, which opening might wait for, and for nothing at all."""
    try:
        found = path.stat()
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def xxh3_file(path: Path) -> str:
    """xxh3-128 of a file's bytes, as 32 hex digits, read in bounded memory."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _digest(file: Any, algorithm: str) -> str:
    # Python 3.10 has no hashlib.file_digest.
    state = hashlib.new(algorithm)
    while chunk := file.read(1 << 20):
        state.update(chunk)
    return state.hexdigest()


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: it is none.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    tables: dict[str, Any] = tomllib.loads(text)
    return tables


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return parse_toml(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
