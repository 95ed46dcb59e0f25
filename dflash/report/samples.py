"""A few responses of a run's cache, walked through with its best or newest checkpoint. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.cache.listing import load_tokenizer
from dflash.cache.parts import check_part
from dflash.cache.reader import CacheReader, Sample
from dflash.drafter import Drafter
from dflash.errors import DflashError
from dflash.head import HEAD_NAME, TargetHead
from dflash.pretrained import load_drafter
from dflash.report.texts import RunTexts, SampleText, pieces_of
from dflash.train.checkpoint import best_checkpoint, latest_checkpoint
from dflash.train.holdout import HoldoutConfig, split
from dflash.train.runs import Run
from dflash.train.walk import Walked, response_runs, walk, walk_samples

_SHORTEST, _LONGEST = 12, 200
"""Supervised tokens of a sample that is shown, if there are such."""
_PROMPT = 400
"""Characters of a prompt that are shown, from its end."""


def run_texts(run: Run, count: int) -> RunTexts:
    """Up to `count` responses of samples that the run did not train on, or else of its first ones."""
    cache = Path(run.config["cache"])
    if not cache.is_dir():
        return RunTexts(note=f"No sample texts: the cache {cache} is not there.")
    try:
        checkpoint = best_checkpoint(run.path) or latest_checkpoint(run.path)
        if checkpoint is None:
            return RunTexts(note=f"No sample texts: {run.path} holds no checkpoint.")
        with CacheReader(cache, allow_incomplete=True) as reader:
            if reader.manifest.digest() != run.config.get("cache_digest"):
                return RunTexts(note=f"No sample texts: {cache} is not the cache of this run.")
            rows, kind = _chosen(reader, run.config.get("holdout") or {}, count)
            samples = _walked(reader, load_drafter(checkpoint, torch.float32), rows)
    except DflashError as error:
        return RunTexts(note=f"No sample texts: {error}")
    return RunTexts(samples, f"{kind}, drafted by {checkpoint.name}.")


def _chosen(reader: CacheReader, holdout: dict[str, Any], count: int) -> tuple[list[int], str]:
    """Rows of short samples: held-out ones if there are any."""
    _, held = split(reader.index.ids, HoldoutConfig(**holdout)) if holdout else (None, np.zeros(0, np.int64))
    rows = held if len(held) else np.arange(len(reader.index))
    supervised = reader.index.supervised[rows].astype(np.int64)
    unfit = (supervised < _SHORTEST) | (supervised > _LONGEST)
    # fitting ones as they come, which is by chance, since ids are hashes; then the shortest of the others
    order = np.lexsort((np.where(unfit, supervised, 0), unfit))
    kind = "Held-out samples" if len(held) else "Samples that were trained on"
    return rows[order[:count]].tolist(), kind


@torch.no_grad()
def _walked(reader: CacheReader, drafter: Drafter, rows: Sequence[int]) -> list[SampleText]:
    """The first response of each of these samples that has one."""
    head = TargetHead.load(check_part(reader.cache, reader.manifest, HEAD_NAME))
    head = head.to(torch.device("cpu"), torch.float32)
    tokenizer = load_tokenizer(reader)
    drafter.eval()
    found = []
    for row in rows:  # one by one: samples are few, and need not fit into memory together
        (sample,) = reader.read([row])
        walked = next(iter(walk_samples(drafter, head, reader, [row], torch.device("cpu"))), None)
        if walked is not None:
            found.append(_text(sample, walked, tokenizer))
    return found


def _text(sample: Sample, walked: Walked, tokenizer: Any) -> SampleText:
    begin, end = response_runs(sample.loss_mask)[0]
    strides = walk(walked.accepted)
    starts = np.cumsum([0, *strides[:-1]])
    before = tokenizer.decode(sample.input_ids[:begin].tolist())
    return SampleText(
        id=sample.id,
        prompt=before if len(before) <= _PROMPT else f"…{before[-_PROMPT:]}",
        pieces=pieces_of(
            token_texts(tokenizer, sample.input_ids[begin:end].tolist()),
            strides,
            walked.drafts[starts].tolist(),
        ),
        cycles=len(strides),
        tokens=sum(strides),
    )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text: nothing where it ends inside a character."""
    whole, ends = tokenizer.decode(ids), [0]
    for count in range(1, len(ids)):
        ends.append(max(ends[-1], len(tokenizer.decode(ids[:count]).rstrip("\ufffd"))))
    ends.append(max(ends[-1], len(whole)))
    return [whole[start:end] for start, end in pairwise(ends)]
