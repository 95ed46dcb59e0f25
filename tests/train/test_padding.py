"""Padding of micro-batches: few shapes, and nothing else is different."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objective import SHAPE, gradients, make_documents, make_loss

from dflash.train.batches import pack
from dflash.train.padding import Multiples, padded
from dflash.train.teacher import with_teacher


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 20), min_size=1, max_size=4),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 12),
)
def test_loss_gradients_and_every_metric_are_those_of_the_batch_without_padding(lengths, rows, blocks):
    loss, batch = make_loss(), pack(make_documents(*lengths), SHAPE)
    more = padded(batch, Multiples(rows, blocks))
    plain, (sums,) = gradients(loss, [batch])
    with_padding, (other,) = gradients(loss, [more])
    assert torch.isfinite(with_padding).all()
    torch.testing.assert_close(with_padding, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other.metrics(), sums.metrics(), rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(3, 40), min_size=1, max_size=5), rows=st.integers(1, 64))
def test_rows_and_blocks_are_multiples_and_the_padding_sees_no_context(lengths, rows):
    batch = pack(make_documents(*lengths), SHAPE)
    more = padded(batch, Multiples(rows, 8))
    assert len(more.context_positions) % rows == 0
    assert more.blocks % 8 == 0
    assert 0 <= more.blocks - batch.blocks < 8
    assert not more.counted[batch.blocks :].any()
    extra = slice(batch.blocks, None)
    assert torch.equal(more.layout.context_start[extra], more.layout.context_end[extra])
    assert len(more.layout.context_start) == more.blocks
    assert torch.equal(more.block_ids[: batch.blocks], batch.block_ids)


def test_a_batch_without_blocks_stays_without_blocks():
    batch = pack([], SHAPE)
    assert padded(batch, Multiples(8, 8)) is batch


def test_counted_slots_and_their_teachers_stay_where_they_were():
    docs = make_documents(12, 9)
    batch = with_teacher(pack(docs, SHAPE), docs)
    more = padded(batch, Multiples(16, 16))
    assert more.blocks > batch.blocks
    assert torch.equal(more.places, more.counted.flatten().nonzero()[:, 0])
    assert torch.equal(more.targets, batch.labels[batch.counted])
    assert torch.equal(more.teacher_rows, batch.teacher_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_blocks_are_told_from_the_padding_by_their_first_slot(dtype):
    batch = pack(make_documents(12, 9, 5, dtype=dtype), SHAPE)
    sums = make_loss(dtype=dtype)(padded(batch, Multiples(64, 64)))
    assert batch.counted[:, 0].all()
    assert sums.blocks.sum() == batch.blocks


@pytest.mark.parametrize("multiple", [1, 7, 64])
@pytest.mark.parametrize("lengths", [(5,), (12, 9, 40)])
def test_features_are_packed_with_the_rows_that_padding_adds(lengths, multiple):
    docs = make_documents(*lengths)
    plain, more = pack(docs, SHAPE), padded(pack(docs, SHAPE, multiple=multiple), Multiples(multiple, 1))
    rows = len(plain.features)
    assert len(more.features) == len(more.context_positions) == rows + -rows % multiple
    assert torch.equal(more.features[:rows], plain.features)
    assert not more.features[rows:].any()
