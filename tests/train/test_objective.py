"""The loss: cross-entropy through the frozen head, weighted by slot, and pooled over a whole step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MASK, VOCAB, drafter_config, random_sample
from torch import Tensor
from torch.nn import functional as F

from dflash.drafter import Drafter, init_weights
from dflash.errors import ConfigError
from dflash.head import HeadFacts, TargetHead
from dflash.train.batches import AnchorConfig, BlockShape, Document, PackedBatch, documents, pack
from dflash.train.chunks import ON_CPU
from dflash.train.objective import (
    EXPONENTIAL_ROWS,
    DraftingLoss,
    HeadCrossEntropy,
    LossSums,
    ObjectiveConfig,
)

SHAPE = BlockShape(4, MASK)
ROWS = ON_CPU.rows


def make_loss(*, softcap: float | None = None, dtype: torch.dtype = torch.float32) -> DraftingLoss:
    generator = torch.Generator().manual_seed(1)
    embedding, lm_head = torch.randn(2, VOCAB, 32, generator=generator)
    head = TargetHead(embedding, lm_head, torch.ones(32), HeadFacts(logit_softcap=softcap))
    drafter = Drafter(drafter_config())
    init_weights(drafter, seed=2)
    config = ObjectiveConfig(block_size=4, gamma=2.5)
    return DraftingLoss(drafter, head.to(torch.device("cpu"), dtype), config, buckets=3)


def make_documents(*lengths: int, dtype: torch.dtype = torch.float32) -> list[Document]:
    rng = np.random.default_rng(3)
    samples = [random_sample(rng, number, length) for number, length in enumerate(lengths)]
    for sample in samples:
        sample.hidden_states = sample.hidden_states.to(dtype)
    return documents(
        samples, [0] * len(samples), [n % 3 for n in range(len(samples))], AnchorConfig(density=0.5)
    )


def gradients(loss: DraftingLoss, batches: list[PackedBatch]) -> tuple[Tensor, list[LossSums]]:
    """Gradient of sum(w CE) / sum(w) over these batches as one vector, and their sums."""
    loss.drafter.zero_grad()
    sums = [loss(batch) for batch in batches]
    for part in sums:
        part.loss.backward()
    weight = sum(part.weight for part in sums)
    return torch.cat([p.grad.flatten() for p in loss.drafter.parameters()]) / weight, sums


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows", [1, 3, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 7])
def test_cross_entropy_through_the_head_is_that_of_torch_in_value_and_gradient(rows, softcap):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=generator)
    lm_head = torch.randn(50, 16, generator=generator)
    labels = torch.randint(50, (rows,), generator=generator)
    upstream = torch.rand(rows, generator=generator)
    ours, oracle = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, correct = HeadCrossEntropy.apply(ours, lm_head, labels, softcap)
    logits = oracle @ lm_head.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(correct, logits.argmax(-1) == labels)
    (loss * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, oracle.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 1000.0])  # the last ones are beyond what needs no shift
@pytest.mark.parametrize("sign", [1, -1, None])
@pytest.mark.parametrize("vocab", [7, 256, 300])
@pytest.mark.parametrize("rows", [1, EXPONENTIAL_ROWS + 1, ROWS + 7])
def test_cross_entropy_of_bfloat16_logits_is_that_of_torch_up_to_their_rounding(rows, vocab, sign, size):
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, 16, generator=generator).bfloat16() * size
    lm_head = torch.randn(vocab, 16, generator=generator).bfloat16()
    if sign is not None:  # logits of one sign, and ever more certain ones
        hidden, lm_head = hidden.abs() * sign, lm_head.abs()
    labels = torch.randint(vocab, (rows,), generator=generator)
    logits = hidden @ lm_head.T
    labels[::2] = logits[::2].argmax(-1)  # every other one is right
    ours = hidden.float().requires_grad_()
    loss, correct = HeadCrossEntropy.apply(ours, lm_head, labels, None)
    loss.sum().backward()
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (slopes,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=4e-3, rtol=4e-3)
    certain = expected < 0.01  # a small loss is as exact as a large one
    torch.testing.assert_close(loss[certain].double(), expected[certain], atol=1e-6, rtol=1e-2)
    assert torch.equal(correct, logits.argmax(-1) == labels)
    difference = (ours.grad.double() - slopes @ lm_head.double()).norm(dim=1)
    # each slope is rounded to bfloat16
    assert (difference <= 2**-7 * (slopes.abs() @ lm_head.double().abs()).norm(dim=1) + 1e-6).all()


@pytest.mark.parametrize("label", [0, 1, 2, 4])
def test_of_bfloat16_logits_that_are_the_same_the_first_counts_as_well(label):
    lm_head = torch.tensor([[1.0], [0.0], [1.0], [-1.0], [1.0]]).bfloat16()
    for sign in (1, -1):
        hidden = torch.tensor([[2.0 * sign]])
        _, correct = HeadCrossEntropy.apply(hidden, lm_head, torch.tensor([label]), None)
        assert correct.item() is (label == int((sign * lm_head[:, 0]).argmax()))


def test_bfloat16_logits_that_are_no_numbers_are_a_loss_that_is_none():
    hidden = torch.tensor([[1.0], [float("nan")], [float("inf")]])
    loss, _ = HeadCrossEntropy.apply(hidden, torch.ones(9, 1).bfloat16(), torch.tensor([1, 2, 3]), None)
    assert loss.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("label", [0, 2, 4])
def test_of_tokens_with_the_same_logit_the_first_counts_as_the_drafted_one(label):
    lm_head = torch.tensor([[1.0], [0.0], [1.0], [-1.0], [1.0]])
    loss, correct = HeadCrossEntropy.apply(torch.tensor([[2.0]]), lm_head, torch.tensor([label]), None)
    logits = 2 * lm_head.T
    assert correct.item() is (label == int(logits.argmax()))
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor([label]), reduction="none"))


def test_cross_entropy_stays_finite_where_the_label_is_hopeless():
    hidden = torch.tensor([[200.0]], requires_grad=True)
    loss, correct = HeadCrossEntropy.apply(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([1]), None)
    loss.sum().backward()
    assert loss.item() == pytest.approx(400.0)
    assert not correct.item()
    assert hidden.grad.item() == pytest.approx(2.0)


def test_no_positions_at_all_cost_nothing():
    hidden = torch.zeros(0, 4, requires_grad=True)
    loss, correct = HeadCrossEntropy.apply(hidden, torch.ones(9, 4), torch.zeros(0, dtype=torch.int64), None)
    loss.sum().backward()
    assert len(loss) == len(correct) == 0


@pytest.mark.parametrize("softcap", [None, 8.0])
def test_the_sums_are_those_of_the_formula_block_by_block(softcap):
    loss = make_loss(softcap=softcap)
    docs = make_documents(12, 20, 7, 16)
    batch = pack(docs, SHAPE)
    sums = loss(batch)
    embedded = loss.head.embed(batch.block_ids)
    hidden = loss.drafter(
        embedded, batch.block_positions, batch.features, batch.context_positions, batch.layout
    )
    log_p = torch.log_softmax(loss.head.logits(hidden), -1)
    total = weights = 0.0
    correct, counted, accepted, blocks = torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(3)
    block = 0
    for doc in docs:
        ids, mask = doc.sample.input_ids.tolist(), doc.sample.loss_mask.tolist()
        for anchor in doc.anchors.tolist():
            leading = True
            run = 1
            for k in (1, 2, 3):
                inside = anchor + k < len(ids) and mask[anchor + k]
                if inside:
                    weight = math.exp(-(k - 1) / 2.5)
                    total -= weight * log_p[block, k, ids[anchor + k]].item()
                    weights += weight
                    counted[k - 1] += 1
                    hit = log_p[block, k].argmax().item() == ids[anchor + k]
                    correct[k - 1] += hit
                leading = leading and inside and hit
                run += leading
            accepted[doc.bucket] += run
            blocks[doc.bucket] += 1
            block += 1
    assert sums.loss.item() == pytest.approx(total, rel=1e-5)
    assert sums.weight.item() == pytest.approx(weights, rel=1e-6)
    for ours, expected in (
        (sums.correct, correct),
        (sums.counted, counted),
        (sums.accepted, accepted),
        (sums.blocks, blocks),
    ):
        assert ours.tolist() == expected.tolist()
    assert sums.bucket_loss.sum().item() == pytest.approx(total, rel=1e-5)
    assert sums.bucket_weight.sum().item() == pytest.approx(weights, rel=1e-6)
    assert len(sums.metrics()) == 2 + 2 * 3 + 4 * 3


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=7, max_size=7), st.permutations(range(7)))
def test_any_division_into_micro_batches_gives_the_same_gradient_and_sums(slots, order):
    loss, docs = make_loss(), make_documents(12, 20, 7, 16, 1, 5, 30)
    whole, (sums,) = gradients(loss, [pack(docs, SHAPE)])
    parts = [[docs[i] for i in order if slots[i] == slot] for slot in range(5)]
    split, divided = gradients(loss, [pack(part, SHAPE) for part in parts])
    assert float((split - whole).norm() / whole.norm()) < 1e-5
    total = sum(part.metrics() for part in divided)
    torch.testing.assert_close(total, sums.metrics(), rtol=1e-5, atol=1e-4)


def test_a_batch_without_blocks_adds_zeros_and_reaches_every_parameter():
    loss = make_loss()
    sums = loss(pack([], SHAPE))
    sums.loss.backward()
    assert all((p.grad == 0).all() for p in loss.drafter.parameters())
    assert not sums.metrics().any()
    assert sums.metrics().shape == loss(pack(make_documents(9), SHAPE)).metrics().shape


def test_the_head_is_frozen_and_every_weight_of_the_drafter_is_trained():
    loss = make_loss()
    assert {name.split(".")[0] for name, _ in loss.named_parameters()} == {"drafter"}
    whole, _ = gradients(loss, [pack(make_documents(12, 20), SHAPE)])
    assert whole.isfinite().all()
    assert all(p.grad.abs().sum() > 0 for p in loss.drafter.parameters())
    assert loss.head.embedding.grad is None
    assert loss.head.lm_head.grad is None


def test_with_a_bf16_head_the_float32_weights_compute_in_bf16():
    docs = make_documents(12, 20, 7, dtype=torch.bfloat16)
    exact, (wanted,) = gradients(make_loss(), [pack(docs, SHAPE)])
    loss = make_loss(dtype=torch.bfloat16)
    rough, (sums,) = gradients(loss, [pack(docs, SHAPE)])
    assert {p.dtype for p in loss.drafter.parameters()} == {torch.float32}
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() != wanted.loss.item()
    assert sums.loss.item() == pytest.approx(wanted.loss.item(), rel=0.02)
    assert 0 < float((rough - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_slot_weights_decay_as_in_the_paper(block_size, gamma):
    weights = ObjectiveConfig(block_size).slot_weights()
    assert len(weights) == block_size - 1
    assert weights.tolist() == pytest.approx([math.exp(-k / gamma) for k in range(block_size - 1)])
    assert torch.equal(weights, ObjectiveConfig(block_size, gamma=gamma).slot_weights())


@pytest.mark.parametrize("block_size", [2, 3, 4, 12, 32])
def test_other_block_sizes_get_falling_positive_weights(block_size):
    weights = ObjectiveConfig(block_size).slot_weights()
    assert weights[0] == 1
    assert (weights > 0).all()
    assert (weights.diff() < 0).all()


@pytest.mark.parametrize(
    ("settings_", "text"),
    [({"loss": "kl"}, "--loss 'kl' is unknown; use ce"), ({"gamma": 0.0}, "--gamma 0.0 must be positive")],
)
def test_what_is_no_loss_is_refused(settings_, text):
    with pytest.raises(ConfigError, match=text):
        ObjectiveConfig(**settings_)
