"""The serving walk from the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from overfit import answered, open_target, overfitted, random_prompts
from support import drafter_config, write_cache, write_target

from dflash.cache.reader import CacheReader
from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.loop import generate
from dflash.drafter import Drafter
from dflash.target import Target
from dflash.train import walk as walk_module
from dflash.train.batches import pack
from dflash.train.evaluation import WalkCounts
from dflash.train.padding import Multiples, padded
from dflash.train.walk import (
    PASS_SLOTS,
    Walked,
    WalkSums,
    pooled,
    response_runs,
    walk,
    walk_passes,
    walk_samples,
)


@given(st.lists(st.integers(1, 8), max_size=60))
def test_the_walk_takes_each_stride_from_where_the_last_one_ended(strides: list[int]) -> None:
    """An array that is wrong everywhere but where the walk stands gives exactly the planned strides."""
    accepted = np.ones(sum(strides), np.int64)
    np.put(accepted, np.cumsum([0, *strides])[:-1].astype(int), strides)
    assert walk(accepted) == strides


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_responses_are_the_supervised_runs_of_two_or_more(mask: list[int]) -> None:
    loss_mask = np.array(mask, np.uint8)
    runs = response_runs(loss_mask)
    inside = np.zeros(len(mask), np.uint8)
    for begin, end in runs:
        assert end - begin >= 2
        assert loss_mask[begin:end].all()
        assert begin == 0 or not loss_mask[begin - 1]
        assert end == len(mask) or not loss_mask[end]
        inside[begin:end] = 1
    alone = loss_mask - inside
    assert not (alone[:-1] & alone[1:]).any()


def test_easy_stretches_raise_the_average_above_the_walk() -> None:
    accepted = np.array([4, 3, 2, 1, 1, 1])
    sums = pooled([accepted])
    assert sums.anchor_tau == pytest.approx(2.0)
    assert sums.walk_tau == pytest.approx(6 / 3)
    easy = pooled([np.array([8, 7, 6, 5, 4, 3, 2, 1]), np.array([1])])
    assert easy.walk_tau == pytest.approx(9 / 2)
    assert WalkSums().walk_tau == 1.0


@pytest.fixture(scope="module")
def decoded(tmp_path_factory) -> tuple[Path, Target, Drafter, list[Generation]]:
    """A cache of a target's own greedy answers, a drafter that knows some, and how it decodes the prompts."""
    folder = tmp_path_factory.mktemp("walk")
    target = open_target(write_target(folder / "target"))
    prompts = random_prompts([5, 9, 12, 3])
    samples = [answered(target, prompt, 24) for prompt in prompts]
    drafter = overfitted(target, drafter_config(), samples[:2], steps=60)
    config = DecodeConfig(24, measure_anchors=True)
    results = [generate(target, drafter, prompt, config) for prompt in prompts]
    cache = write_cache(
        folder / "cache", [replace(sample, id=n) for n, sample in enumerate(samples, 1)], dtype="float32"
    )
    return cache, target, drafter, results


def test_the_walk_from_the_cache_is_what_the_decoder_did_on_the_same_texts(decoded) -> None:
    cache, target, drafter, results = decoded
    walked = list(walk_samples(drafter, target.head, CacheReader(cache), [0, 1, 2, 3], torch.device("cpu")))
    assert [one.row for one in walked] == [0, 1, 2, 3]
    for ours, decoding in zip(walked, results, strict=True):
        assert walk(ours.accepted) == decoding.accepted
        assert ours.accepted.tolist() == decoding.anchor_accepted
    sums = pooled(one.accepted for one in walked)
    tokens, cycles = sum(sum(r.accepted) for r in results), sum(len(r.accepted) for r in results)
    assert sums.walk_tau == tokens / cycles > 1.2


def test_rows_and_blocks_of_padding_change_nothing(decoded, monkeypatch) -> None:
    """On CUDA a pass is padded to shapes that training has too."""
    cache, target, drafter, _ = decoded

    def walked() -> list[Walked]:
        rows, cpu = [0, 1, 2, 3], torch.device("cpu")
        return list(walk_samples(drafter, target.head, CacheReader(cache), rows, cpu))

    plain = walked()
    monkeypatch.setattr(walk_module, "pack", lambda docs, shape: padded(pack(docs, shape), Multiples(50, 40)))
    for ours, expected in zip(walked(), plain, strict=True):
        assert ours.row == expected.row
        for mine, other in zip(ours[1:], expected[1:], strict=True):
            assert np.array_equal(mine, other)


def test_accuracy_by_place_is_that_of_drafts_behind_right_ones(decoded) -> None:
    cache, target, drafter, _ = decoded
    walked = list(walk_samples(drafter, target.head, CacheReader(cache), [0, 1, 2, 3], torch.device("cpu")))
    counts = WalkCounts(3, 3)
    for one in walked:
        counts.add(one, 1)
    for place in (1, 2, 3):
        pairs = [pair for one in walked for pair in zip(one.drafts, one.possible, strict=True)]
        reached = [drafts for drafts, possible in pairs if drafts >= place - 1 and possible >= place]
        assert counts.reached[place - 1] == len(reached)
        assert counts.right[place - 1] == sum(drafts >= place for drafts in reached)
    figures = counts.figures()
    assert figures["heldout_accuracy"][0] == counts.right[0] / counts.reached[0]
    assert figures["walk_tau_by_bucket"] == [None, figures["walk_tau"], None]
    assert figures["heldout_anchor_tau"] == pooled(one.accepted for one in walked).anchor_tau


@given(st.lists(st.integers(0, 5000), max_size=40), st.sampled_from([4, 16]))
def test_passes_hold_every_sample_once_and_no_more_than_fits(supervised: list[int], block_size: int) -> None:
    passes = walk_passes(np.array(supervised, np.int64), block_size)
    assert sorted(row for one in passes for row in one) == list(range(len(supervised)))
    for one in passes:
        assert len(one) == 1 or sum(supervised[row] for row in one) * block_size <= PASS_SLOTS
