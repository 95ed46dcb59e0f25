"""Adding a corpus to a finished cache: the same identity but for the corpus, whose digest is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dflash.cache.index import load_index
from dflash.cache.manifest import Manifest, load_manifest, mismatch, save_manifest
from dflash.errors import CacheIncomplete

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

ALREADY = "already_in_cache"
"""Reason under which samples are counted that an earlier corpus has brought."""


def append_corpus(cache: Path, manifest: Manifest, ids: NDArray[np.uint64]) -> Manifest:
    """Let a finished cache owe the samples of another corpus, or go on with one that was appended before.

    The identity keeps the digest of the first corpus, so everything that is committed stays valid.

    Args:
        cache: A cache's folder.
        manifest: What a cache of the new corpus alone would have.
        ids: uint64 [N], ids of the new corpus's samples.

    Returns:
        The manifest that holds from now on.

    Raises:
        CacheMismatch: something else than the corpus differs; names it.
        CacheIncomplete: the cache still owes samples of an earlier corpus.
    """
    there = load_manifest(cache)
    if others := [
        line
        for line in manifest.identity.differences(there.identity)
        if not line.startswith("corpus_digest:")
    ]:
        raise mismatch(cache, others)
    digest = manifest.identity.corpus_digest
    if digest in there.corpora:
        return there
    if not there.complete:
        raise CacheIncomplete(
            f"{cache} is not finished; run the `dflash extract` that began it again before data is added"
        )
    known = np.concatenate([load_index(cache, there).ids, np.array([b.id for b in there.bad], np.uint64)])
    new = int(np.count_nonzero(~np.isin(ids, known)))
    dropped = dict(there.dropped)
    for reason, count in {
        **manifest.dropped,
        ALREADY: manifest.dropped.get(ALREADY, 0) + len(ids) - new,
    }.items():
        if count:
            dropped[reason] = dropped.get(reason, 0) + count
    grown = replace(
        there,
        expected_samples=there.expected_samples + new,
        complete=False,
        content_digest=None,
        dropped=dropped,
        appended=(*there.appended, digest),
    )
    save_manifest(cache, grown)
    return grown
