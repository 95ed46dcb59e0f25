"""Small JSON files beside the samples that carry a digest of themselves, so that a flipped bit shows.

They are written in one way only, sorted and indented, and checked by writing once more what was read: any
other byte is damage. Files of the time before they had a digest are taken as they are.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from dflash.files import digest_json, json_bytes, publish_bytes, size_of_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAX_BYTES = 1 << 24


def save_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object without a key `digest`, replacing what is there."""
    publish_bytes(path, _sealed(value))


def load_sealed(path: Path) -> dict[str, Any]:
    """The object in a file that `save_sealed` has written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged; says how in a few words.
        OSError: it cannot be read.
    """
    size = size_of_file(path)
    if size < 0 and not os.path.lexists(path):
        raise FileNotFoundError(path)
    if not 0 <= size <= _MAX_BYTES:
        raise ValueError("no file, or too large")
    data = path.read_bytes()
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("no JSON object") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - a damaged file is a bad value to callers
    if value.pop("digest", None) is not None and _sealed(value) != data:
        raise ValueError("its bytes have changed, they do not fit its digest")
    return value


def _sealed(value: Mapping[str, Any]) -> bytes:
    return json_bytes({**value, "digest": digest_json(value)})
