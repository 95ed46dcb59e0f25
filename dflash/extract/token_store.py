"""A tokenised corpus as flat arrays, and its copy on disk, so that no corpus is tokenised twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.files import publish

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """One sample of the corpus."""

    id: int
    """uint64; stable hash of the tokens and the mask."""
    input_ids: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """uint8 [T]; 1 where the assistant wrote the token."""
    kind: str | None = None
    """The row's `kind` field."""
    name: str | None = None
    """The row's `id` field."""


@dataclass(frozen=True)
class TokenizedCorpus:
    """All samples, in the order of the data. N samples, T tokens together."""

    tokens: np.ndarray
    """int32 [T]"""
    mask: np.ndarray
    """uint8 [T]"""
    offsets: np.ndarray
    """int64 [N+1]; sample i is tokens[offsets[i]:offsets[i+1]]"""
    ids: np.ndarray
    """uint64 [N]"""
    kinds: tuple[str | None, ...]
    """[N], or empty where no row had one"""
    names: tuple[str | None, ...]
    """[N], or empty where no row had one"""
    dropped: dict[str, int]
    """Rows that were left out, by reason."""
    digest: str
    """Sha256 of the sorted ids and of the settings."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N], tokens of each sample."""
        return np.diff(self.offsets).astype(np.int32)

    def example(self, row: int) -> Example:
        """Sample `row` (0 <= row < N), as views into the flat arrays."""
        span = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return Example(
            id=int(self.ids[row]),
            input_ids=self.tokens[span],
            loss_mask=self.mask[span],
            kind=self.kinds[row] if self.kinds else None,
            name=self.names[row] if self.names else None,
        )


def corpus_from(
    samples: Sequence[tuple[int, np.ndarray, np.ndarray, str | None, str | None]],
    dropped: Mapping[str, int],
    settings: Mapping[str, Any],
) -> TokenizedCorpus:
    """Join samples of (id, input_ids int32 [T], loss_mask uint8 [T], kind, name); there is at least one."""
    numbers, tokens, masks, kinds, names = zip(*samples, strict=True)
    ids = np.asarray(numbers, dtype=np.uint64)
    digest = hashlib.sha256(np.sort(ids).astype("<u8").tobytes())
    digest.update(json.dumps(settings, sort_keys=True).encode())
    return TokenizedCorpus(
        tokens=np.concatenate(tokens).astype(np.int32, copy=False),
        mask=np.concatenate(masks).astype(np.uint8, copy=False),
        offsets=np.concatenate([[0], np.cumsum([len(ids) for ids in tokens])]).astype(np.int64),
        ids=ids,
        kinds=tuple(kinds) if any(kinds) else (),
        names=tuple(names) if any(names) else (),
        dropped=dict(dropped),
        digest=digest.hexdigest(),
    )


def token_store() -> Path:
    """Folder of kept tokens: `$DFLASH_HOME/tokens`, else `~/.cache/dflash/tokens`."""
    return Path(os.environ.get("DFLASH_HOME") or Path.home() / ".cache" / "dflash").expanduser() / "tokens"


def save_tokens(key: str, corpus: TokenizedCorpus) -> None:
    """Keep a corpus under a key. A store that cannot be written costs time later, so it is only a warning."""
    from safetensors.numpy import save_file

    tensors = _tensors(corpus)
    labels = {
        "kinds": corpus.kinds,
        "names": corpus.names,
        "dropped": corpus.dropped,
        "digest": corpus.digest,
    }
    tensors["labels"] = np.frombuffer(json.dumps(labels).encode(), dtype=np.uint8)
    metadata = {"checksum": _checksum(tensors)}
    path = token_store() / f"{key}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, lambda tmp: save_file(tensors, tmp, metadata))
    except OSError as error:
        _log.warning("tokens are not kept for the next run: %s", error)


def load_tokens(key: str) -> TokenizedCorpus | None:
    """The corpus kept under a key; None where there is none, or it is damaged and has to be made again."""
    from safetensors import SafetensorError, safe_open

    path = token_store() / f"{key}.safetensors"
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            checksum = (file.metadata() or {}).get("checksum")
        if checksum != _checksum(tensors):
            _log.warning("kept tokens %s are damaged (checksum differs) and are made again", path)
            return None
        labels = json.loads(tensors.pop("labels").tobytes())
        return TokenizedCorpus(
            **tensors,
            kinds=tuple(labels["kinds"]),
            names=tuple(labels["names"]),
            dropped=labels["dropped"],
            digest=labels["digest"],
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        _log.warning("kept tokens %s are damaged (%s) and are made again", path, error)
        return None


def _tensors(corpus: TokenizedCorpus) -> dict[str, np.ndarray]:
    return {"tokens": corpus.tokens, "mask": corpus.mask, "offsets": corpus.offsets, "ids": corpus.ids}


def _checksum(tensors: Mapping[str, np.ndarray]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        array = tensors[name]
        state.update(f"{name} {array.dtype} {array.shape}\n".encode())
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()
