"""Anchors are dealt per sample and valid; a packed batch holds exactly the blocks that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerator import META, tensors_in
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_sample

from dflash.cache.writer import Sample
from dflash.drafter import in_blocks
from dflash.errors import ConfigError
from dflash.train.batches import AnchorConfig, BlockShape, Document, choose_anchors, documents, pack

MASKS = st.lists(st.booleans(), min_size=1, max_size=60).map(lambda bits: np.array(bits, np.uint8))
SHAPE = BlockShape(size=4, mask_token_id=3)


def make_sample(mask: np.ndarray, number: int = 1) -> Sample:
    rng = np.random.default_rng(number)
    sample = random_sample(rng, number, len(mask), hidden=2)
    sample.loss_mask = mask
    return sample


@settings(max_examples=150, deadline=None)
@given(
    MASKS,
    st.integers(0, 2**64 - 1),
    st.integers(0, 9),
    st.integers(1, 20),
    st.floats(0.01, 1),
    st.integers(0, 3),
)
def test_anchors_are_valid_distinct_ascending_and_as_many_as_asked_for(
    mask, number, epoch, cap, density, seed
):
    config = AnchorConfig(cap, density, seed)
    anchors = choose_anchors(mask, number, epoch, config)
    assert anchors.dtype == np.int64
    assert (np.diff(anchors) > 0).all()
    assert all(mask[a] and mask[a + 1] for a in anchors)
    valid = sum(1 for a in range(len(mask) - 1) if mask[a] and mask[a + 1])
    assert len(anchors) == min(max(1, round(density * int(mask.sum()))), cap, valid)
    assert (choose_anchors(mask, number, epoch, config) == anchors).all()


def test_anchors_change_with_the_seed_the_epoch_and_the_sample_and_with_nothing_else():
    mask = np.ones(200, np.uint8)
    drawn = [
        tuple(choose_anchors(mask, number, epoch, AnchorConfig(20, 1.0, seed)))
        for number, epoch, seed in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]
    ]
    assert len(set(drawn)) == 4
    samples = [make_sample(mask, number) for number in (1, 2, 3)]
    config = AnchorConfig(20, 1.0, 0)
    alone = [
        documents([s], [epoch], [0], config)[0].anchors for s, epoch in zip(samples, (0, 5, 2), strict=True)
    ]
    together = documents(samples[::-1], (2, 5, 0), (1, 1, 1), config)[::-1]
    assert all((a == b.anchors).all() for a, b in zip(alone, together, strict=True))
    assert tuple(alone[0]) == drawn[0]


def test_every_valid_position_is_drawn_equally_often():
    mask = np.ones(33, np.uint8)
    epochs, drawn = 1000, 8
    counts = np.zeros(32)
    for epoch in range(epochs):
        counts[choose_anchors(mask, 7, epoch, AnchorConfig(drawn, 1.0))] += 1
    expected = epochs * drawn / 32
    # without replacement the variance is (1 - drawn/32) of the multinomial's; 61.1 is the 99.9 % point for 31
    statistic = ((counts - expected) ** 2 / expected).sum() / (1 - drawn / 32)
    assert statistic < 61.1
    assert counts[0] > 0
    assert counts[-1] > 0


def expected_blocks(sample: Sample, anchors: np.ndarray) -> list[tuple[list[int], list[int], list[bool]]]:
    """Input ids, labels and counted flags of each block, slot by slot as the contract says."""
    ids, mask, blocks = sample.input_ids.tolist(), sample.loss_mask.tolist(), []
    for anchor in anchors.tolist():
        ahead = [anchor + k for k in range(1, SHAPE.size)]
        counted = [place < len(ids) and bool(mask[place]) for place in ahead]
        labels = [ids[place] if count else 0 for place, count in zip(ahead, counted, strict=True)]
        blocks.append(([ids[anchor], 3, 3, 3], labels, counted))
    return blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(MASKS, max_size=4), st.sampled_from([0.1, 0.5, 1.0]))
def test_a_packed_batch_is_its_documents_one_after_another(masks, density):
    samples = [make_sample(mask, number) for number, mask in enumerate(masks)]
    docs = documents(samples, [0] * len(samples), range(len(samples)), AnchorConfig(density=density))
    batch = pack(docs, SHAPE)
    blocks, starts, ends, buckets, rows = [], [], [], [], 0
    for number, doc in enumerate(docs):
        blocks += expected_blocks(doc.sample, doc.anchors)
        starts += [rows] * len(doc.anchors)
        ends += (rows + doc.anchors).tolist()
        buckets += [number] * len(doc.anchors)
        used = int(doc.anchors.max(initial=0))
        part = slice(rows, rows + used)
        assert torch.equal(batch.features[part], doc.sample.hidden_states[:used].flatten(1))
        assert batch.context_positions[part].tolist() == list(range(used))
        rows += used
    assert len(batch.features) == len(batch.context_positions) == rows
    assert batch.blocks == len(blocks)
    packed = zip(batch.block_ids.tolist(), batch.labels.tolist(), batch.counted.tolist(), strict=True)
    assert list(packed) == blocks
    if blocks:
        assert torch.equal(in_blocks(batch.distinct_ids, SHAPE.size), batch.block_ids)
    assert batch.places.tolist() == [n for n, is_one in enumerate(batch.counted.flatten().tolist()) if is_one]
    assert torch.equal(batch.targets, batch.labels[batch.counted])
    assert batch.block_positions.tolist() == [
        [anchor + k for k in range(4)] for doc in docs for anchor in doc.anchors.tolist()
    ]
    assert batch.layout.context_start.tolist() == starts
    assert batch.layout.context_end.tolist() == ends
    assert batch.buckets.tolist() == buckets
    assert batch.samples == tuple(sample.id for sample in samples)
    assert batch.tokens == sum(len(mask) for mask in masks)


def test_labels_never_come_from_the_next_document():
    docs = [Document(make_sample(np.ones(5, np.uint8), number), np.array([0, 3]), 0) for number in (1, 2)]
    batch = pack(docs, SHAPE)
    assert batch.counted.tolist() == [[True] * 3, [True, False, False]] * 2
    for block, doc in ((1, 0), (3, 1)):
        assert batch.labels[block].tolist() == [docs[doc].sample.input_ids[4], 0, 0]


@pytest.mark.parametrize("docs", [0, 1, 3])
def test_documents_without_anchors_pack_to_nothing(docs):
    batch = pack([Document(make_sample(np.zeros(9, np.uint8)), np.zeros(0, np.int64), 0)] * docs, SHAPE)
    assert (batch.blocks, len(batch.features), len(batch.layout.context_start)) == (0, 0, 0)
    assert batch.labels.shape == batch.counted.shape == (0, 3)
    assert batch.tokens == 9 * docs


def test_a_batch_moves_whole_and_stays_where_it_is():
    batch = pack([Document(make_sample(np.ones(9, np.uint8)), np.array([2, 5]), 0)], SHAPE)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(META)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}
    assert (moved.samples, moved.tokens) == (batch.samples, 9)


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"anchors": 0}, "--anchors 0 leaves samples without a block"),
        ({"density": 0.0}, r"--anchor-density 0.0 must be in \(0, 1\]"),
        ({"density": 1.1}, "--anchor-density 1.1 must be"),
        ({"seed": -1}, "--seed -1 must not be negative"),
    ],
)
def test_settings_that_train_nothing_are_refused(settings_, text):
    with pytest.raises(ConfigError, match=text):
        AnchorConfig(**settings_)
