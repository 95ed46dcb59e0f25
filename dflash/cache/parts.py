"""The files of a cache besides shards and index: digests of them stand in the manifest.

They are what training and the tools need of the target (head, configuration, tokenizer) and the record of
the run. `speeds.json` and `planned.json` are no parts of the cache, and carry digests of themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dflash.cache.manifest import REPAIR, TARGET_CONFIG_NAME, Manifest, save_manifest
from dflash.errors import CacheCorrupt
from dflash.files import TMP_SUFFIX, size_of_file, xxh3_file
from dflash.head import HEAD_NAME
from dflash.provenance import RECORD_NAME

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FOLDER = "tokenizer"


def part_names(cache: Path) -> list[str]:
    """Paths in the cache of the parts that exist, in order."""
    single = [HEAD_NAME, RECORD_NAME, TARGET_CONFIG_NAME]
    found = (cache / TOKENIZER_FOLDER).rglob("*")
    folder = [path for path in found if not path.is_dir() and path.suffix != TMP_SUFFIX]
    return sorted(
        [name for name in single if (cache / name).exists()]
        + [path.relative_to(cache).as_posix() for path in folder]
    )


def record_parts(cache: Path, manifest: Manifest) -> Manifest:
    """Put the digests of the parts that exist into the manifest, and save it."""
    digests = {name: xxh3_file(cache / name) for name in part_names(cache)}
    manifest = replace(manifest, files=digests)
    save_manifest(cache, manifest)
    return manifest


def part_problem(cache: Path, manifest: Manifest, name: str) -> str | None:
    """What is wrong with a part, in a few words; None where it is whole, or its digest was never recorded."""
    digest = manifest.files.get(name)
    if digest is None:
        return None
    if size_of_file(cache / name) < 0:
        return "missing, or no file"
    try:
        found = xxh3_file(cache / name)
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == digest else "its bytes have changed, they do not fit its digest in the manifest"


def check_part(cache: Path, manifest: Manifest, name: str) -> Path:
    """The path of a part, once its bytes fit the digest in the manifest.

    Raises:
        CacheCorrupt: they do not, or it is missing.
    """
    if problem := part_problem(cache, manifest, name):
        raise CacheCorrupt(f"{cache / name}: {problem}; {REPAIR}")
    return cache / name


def check_tokenizer(cache: Path, manifest: Manifest) -> Path:
    """The tokenizer's folder, once every file in it is the one that was recorded, and no other is there.

    Raises:
        CacheCorrupt: a file is damaged, missing or foreign.
    """
    prefix = f"{TOKENIZER_FOLDER}/"
    for name in sorted({n for n in (*manifest.files, *part_names(cache)) if n.startswith(prefix)}):
        if manifest.files and name not in manifest.files:
            raise CacheCorrupt(f"{cache / name}: not a file of this cache; {REPAIR}")
        check_part(cache, manifest, name)
    return cache / TOKENIZER_FOLDER
