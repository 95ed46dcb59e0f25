"""`manifest.json`: what a cache was made from, how many samples it owes, and whether all are there.

Standard library only, so that planning tools can read it without torch. The layout on disk is specified in
docs/cache-format.md.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from dflash.cache.codec_error import CodecError, codec_problems
from dflash.errors import CacheCorrupt, CacheError, CacheMismatch
from dflash.files import TMP_SUFFIX, digest_json, fsync_path, publish_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TARGET_CONFIG_NAME = "target_config.json"
MAX_MANIFEST_BYTES = 1 << 24
"""A larger manifest is refused unread: a cache from strangers must not fill the memory."""
BYTES_PER_VALUE = {"bfloat16": 2, "float32": 4}
REPAIRED_FOLDER = "repaired"
"""Where `dflash cache repair` puts what was bad."""
REPAIR = "`dflash cache verify` lists what is bad, `dflash cache repair` sets it aside to be made again"
"""How every report of damage ends."""
HIDDEN_SIZE_MULTIPLE = 4
"""Keeps every tensor of a shard aligned to 8 bytes with the hidden states first."""
_PLAIN_PART = re.compile(r"[\w.+ -]{1,200}")
_LIMITS = {"num_target_layers": 1 << 14, "hidden_size": 1 << 20, "vocab_size": 1 << 30, "max_length": 1 << 24}
"""Far above any model; they keep sizes computed from a stranger's manifest within 64 bits."""
_NAMES_ONLY = ("target", "revision")
"""Where the target was found. Moving its folder changes nothing; the digests decide."""
_OPTIONAL = ("appended", "bad", "channel_scales", "codec_digest", "codec_error", "files", "derived")
"""Keys that are left out where they hold nothing."""


@dataclass(frozen=True)
class Identity:
    """Everything that decides the bytes of a cache: samples of two identities never share a cache.

    Raises:
        CacheError: a value makes no sense; the text names the field.
    """

    target: str
    """Name or folder of the target model, for people."""
    revision: str | None
    """Hub commit of the target, or None for a local folder."""
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    template_digest: str
    taps: tuple[int, ...]
    """0-based decoder layers whose output is stored, in the order of axis K."""
    num_target_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the target's embedding."""
    dtype: str
    """`bfloat16` or `float32`."""
    codec: str
    """One of `CODECS`."""
    bucket_edges: tuple[int, ...]
    """Longest length of each bucket in tokens, ascending; the last is `max_length`."""
    max_length: int
    """Longest sample in tokens."""
    corpus_digest: str
    codec_digest: str | None = None
    """Sha256 of the codec `int8`'s channel scales, which the manifest holds; None for other codecs."""

    def __post_init__(self) -> None:
        """Refuse values that no cache can have."""
        for problem in _identity_problems(self):
            raise CacheError(f"cache identity: {problem}")

    def differences(self, other: Identity) -> list[str]:
        """One line `field: this X, other Y` for each field that keeps two caches apart."""
        return [
            f"{name}: this {_show(mine)}, other {_show(getattr(other, name))}"
            for name, mine in vars(self).items()
            if name not in _NAMES_ONLY and mine != getattr(other, name)
        ]

    def plain(self) -> dict[str, Any]:
        """Its fields as the manifest has them, those that hold nothing left out."""
        return {name: v for name, v in vars(self).items() if v is not None or name not in _OPTIONAL}

    @property
    def bytes_per_token(self) -> int:
        """Size of one token's decoded hidden states [K, H] in bytes."""
        return len(self.taps) * self.hidden_size * BYTES_PER_VALUE[self.dtype]


@dataclass(frozen=True)
class BadSample:
    """A sample that is left out because the target puts out NaN or infinity for it."""

    id: int
    name: str | None
    """The row's `id` field."""
    layer: int
    """0-based layer behind which the first such value stands."""
    position: int
    """Token of the sample, from 0, at which it stands."""
    token: int
    """Id of that token."""

    def text(self) -> str:
        """What an error or a report says of it."""
        name = f" ({self.name})" if self.name else ""
        return (
            f"sample {self.id}{name}: the output of layer {self.layer} at position {self.position}, "
            f"token {self.token}, holds NaN or Inf"
        )


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    identity: Identity
    expected_samples: int
    """Samples the finished cache holds, bad ones left out."""
    complete: bool = False
    """Set by `finalize` alone, when every expected sample is committed."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Conversations that were left out, counted by reason."""
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    format_version: int = FORMAT_VERSION
    content_digest: str | None = None
    """Digest of the finished cache's samples (`CacheIndex.digest`); None while it is incomplete."""
    appended: tuple[str, ...] = ()
    """Digests of the corpora that were added later, in their order."""
    bad: tuple[BadSample, ...] = ()
    """Samples left out because of NaN or infinity."""
    files: dict[str, str] = field(default_factory=dict)
    """Path in the cache to xxh3-128 (32 hex digits) of the files besides shards and index."""
    derived: str | None = None
    """The tool and settings that made this cache from others; None for one that extraction made."""
    channel_scales: str | None = None
    """Of the codec `int8`: bfloat16 [K, H], little-endian, as base64; frozen when the cache is begun."""
    codec_error: CodecError | None = None
    """What a lossy codec costs."""

    @property
    def corpora(self) -> tuple[str, ...]:
        """Digests of all corpora, the first one first."""
        return (self.identity.corpus_digest, *self.appended)

    def digest(self) -> str:
        """Sha256 (64 hex digits) of format version and identity, without the target's name and revision."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        identity = {name: value for name, value in self.identity.plain().items() if name not in _NAMES_ONLY}
        return digest_json({"format_version": self.format_version, "identity": identity})

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `manifest.json`, with a digest of everything else in it."""
        value = {name: v for name, v in asdict(self).items() if v or name not in _OPTIONAL}
        value["identity"] = self.identity.plain()
        return {**value, "digest": digest_json(value)}

    @classmethod
    def from_json(cls, value: Any, where: str = MANIFEST_NAME) -> Manifest:
        """The manifest in a parsed JSON value; `where` names it in errors.

        Raises:
            CacheCorrupt: a key is unknown, missing or mistyped, or the digest does not fit.
            CacheError: the format is newer than this program, or a value makes no sense.
        """
        if not isinstance(value, dict):
            raise CacheCorrupt(f"{where}: not a JSON object")
        version = value.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise CacheError(
                f"{where}: cache format {version} is newer than {FORMAT_VERSION}; install a newer dflash"
            )
        content = dict(value)
        digest = content.pop("digest", None)
        _check_keys(content, cls, where)
        _check_keys(content["identity"], Identity, where)
        for sample in content.get("bad", ()):
            _check_keys(sample, BadSample, where)
        if (error := content.get("codec_error")) is not None:
            _check_keys(error, CodecError, where)
        if digest != digest_json(content):
            raise CacheCorrupt(f"{where}: its content does not fit its digest; {REPAIR}")
        for name in content.get("files", ()):
            if not is_inside(name):
                raise CacheCorrupt(f"{where}: {name!r:.80} is no path inside a cache")
        identity: dict[str, Any] = {name: _tupled(v) for name, v in content["identity"].items()}
        later = {
            "appended": tuple(content.get("appended", ())),
            "bad": tuple(BadSample(**sample) for sample in content.get("bad", ())),
            "codec_error": error and CodecError(**{k: _tupled(v) for k, v in error.items()}),
        }
        return cls(**{**content, **later, "identity": Identity(**identity)})


def is_inside(name: str) -> bool:
    """Whether a relative path from a file stays inside the folder that it is taken from."""
    parts = name.split("/")
    return all(_PLAIN_PART.fullmatch(part) and part.strip(".") for part in parts) and len(name) < 500


def load_manifest(cache: Path) -> Manifest:
    """Read a cache's manifest.

    Raises:
        CacheCorrupt: it is damaged.
        CacheError: `cache` is not a cache, or one of a newer format.
    """
    path = cache / MANIFEST_NAME
    if path.exists() and not path.is_file():
        raise CacheCorrupt(f"{path}: not a file; {REPAIR}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CacheError(
            f"{cache} is not a cache: it has no {MANIFEST_NAME}; make one with `dflash extract`"
        ) from error
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise CacheCorrupt(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes, which no manifest is")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CacheCorrupt(f"{path}: not JSON ({error}); {REPAIR}") from error
    if not data.endswith(b"}\n"):
        raise CacheCorrupt(f"{path}: its last byte is missing, or others follow; {REPAIR}")
    return Manifest.from_json(value, str(path))


def save_manifest(cache: Path, manifest: Manifest) -> None:
    """Write the manifest of an existing cache folder atomically, replacing the old one."""
    publish_json(cache / MANIFEST_NAME, manifest.to_json())


def create_cache(cache: Path, manifest: Manifest) -> Manifest:
    """Create the cache folder, or open the cache of the same identity that is there, to resume it.

    Returns:
        The manifest that holds from now on: the one on disk when there was one (its counts and its complete
        flag included), otherwise `manifest` with `complete` false.

    Raises:
        CacheMismatch: a cache of another identity is there; the text names each field with both values.
        CacheError: `cache` is a file or a folder of something else, or cannot be written.
    """
    if not _holds_manifest(cache):
        fresh = replace(manifest, complete=False)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            fsync_path(cache.parent)
            publish_json(cache / MANIFEST_NAME, fresh.to_json(), replace=False)
        except FileExistsError:
            pass  # another rank was faster: compare with what it wrote
        except OSError as error:
            raise CacheError(f"cannot create the cache {cache}: {error}") from error
        else:
            return fresh
    there = load_manifest(cache)
    if differences := manifest.identity.differences(there.identity):
        raise mismatch(cache, differences)
    return there


def mismatch(cache: Path, differences: Sequence[str]) -> CacheMismatch:
    """The error for a cache of another identity; `differences` as `Identity.differences` gives them."""
    only_corpus = all(line.startswith("corpus_digest:") for line in differences)
    advice = ", or --append to add this data" if only_corpus else ""
    return CacheMismatch(
        f"{cache} holds another cache: {'; '.join(differences)}; "
        f"use another folder or the same settings{advice}"
    )


def _holds_manifest(cache: Path) -> bool:
    """Whether a manifest is there; anything else than an empty folder without one is refused."""
    try:
        names = [entry.name for entry in cache.iterdir()]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CacheError(f"cannot use {cache} as a cache: {error}") from error
    # A crash while the manifest was written leaves its temporary file: still an empty folder. What repair
    # leaves where the manifest was lost is a cache as well: every index fragment names its identity.
    foreign = sorted(
        name for name in names if not (name.startswith(f"{MANIFEST_NAME}.") and name.endswith(TMP_SUFFIX))
    )
    if MANIFEST_NAME not in foreign and REPAIRED_FOLDER in foreign:
        return False
    if foreign and MANIFEST_NAME not in foreign:
        raise CacheError(
            f"{cache} is not empty and not a cache (it holds {foreign[0]!r}); choose another folder"
        )
    return bool(foreign)


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """0-based bucket of a sample: the first whose edge is at least `length` tokens.

    Raises:
        CacheError: the sample is empty or longer than the last edge.
    """
    if not 1 <= length <= edges[-1]:
        raise CacheError(f"a sample of {length} tokens fits no bucket of the edges {list(edges)}")
    return bisect_left(edges, length)


def bucket_name(edge: int) -> str:
    """Folder of the bucket with this edge: `256` gives `len-00256`."""
    return f"len-{edge:05d}"


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _identity_problems(identity: Identity) -> list[str]:
    taps, edges, layers = identity.taps, identity.bucket_edges, identity.num_target_layers
    problems = []
    if identity.dtype == "float16":
        problems.append("dtype float16 cannot hold hidden states (they exceed its range); use bfloat16")
    elif identity.dtype not in BYTES_PER_VALUE:
        problems.append(f"dtype {identity.dtype!r} is not one of {', '.join(BYTES_PER_VALUE)}")
    problems += codec_problems(identity.codec, identity.dtype, identity.codec_digest)
    if not taps or len(set(taps)) < len(taps) or not all(0 <= tap < layers for tap in taps):
        problems.append(f"taps {list(taps)} must be different layers from 0 to {layers - 1}")
    if identity.hidden_size % HIDDEN_SIZE_MULTIPLE:
        problems.append(f"hidden size {identity.hidden_size} is not a multiple of {HIDDEN_SIZE_MULTIPLE}")
    for name, limit in _LIMITS.items():
        if not 1 <= getattr(identity, name) <= limit:
            problems.append(f"{name} {getattr(identity, name)} is not 1 to {limit}")
    if not edges or edges[0] < 1 or list(edges) != sorted(set(edges)):
        problems.append(f"bucket edges {list(edges)} must be positive and ascending")
    elif edges[-1] != identity.max_length:
        problems.append(f"the last bucket edge {edges[-1]} must be the maximum length {identity.max_length}")
    return problems


def _tupled(value: Any) -> Any:
    """JSON's lists as the records have them."""
    return tuple(value) if isinstance(value, list) else value


def _check_keys(value: Any, record: type, where: str) -> None:
    """Refuse an object whose keys or types are not exactly those of the record."""
    if not isinstance(value, dict):
        raise CacheCorrupt(f"{where}: {record.__name__.lower()} is not a JSON object")
    names = {entry.name: cast("str", entry.type) for entry in fields(record)}
    for key in sorted(value.keys() ^ names.keys()):
        if key in names and key in _OPTIONAL:
            names.pop(key)
            continue
        raise CacheCorrupt(f"{where}: {'unknown' if key in value else 'missing'} key {key!r}")
    for key, kind in names.items():
        if not _has_type(value[key], kind):
            raise CacheCorrupt(f"{where}: {key} must be {kind}, not {value[key]!r:.80}")


def _has_type(value: Any, kind: str) -> bool:
    """Whether a JSON value fits a field's annotation; booleans are no integers here."""
    if kind.startswith("tuple["):
        item_type = {"int": int, "str": str, "float": float, "BadSample": dict}[
            kind[len("tuple[") : kind.index(",")]
        ]
        return isinstance(value, list) and all(type(item) is item_type for item in value)
    if kind == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    if kind == "dict[str, int]":
        return isinstance(value, dict) and all(type(item) is int and item >= 0 for item in value.values())
    if kind == "int":
        return type(value) is int and value >= 0
    if kind in {"Identity", "CodecError | None"}:
        return isinstance(value, dict)
    return type(value).__name__ in kind.replace("None", "NoneType").split(" | ")
