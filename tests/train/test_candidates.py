"""Sampled softmax: a part of the vocabulary competes in the place of all of it."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from dflash.train.candidates import MULTIPLE, candidates, draw_negatives
from dflash.train.objective import HeadCrossEntropy


@given(st.lists(st.integers(0, 49), min_size=1, max_size=30), st.integers(1, 60), st.integers(0, 1000))
def test_candidates_are_the_labels_and_those_drawn_that_are_none(
    labels: list[int], count: int, seed: int
) -> None:
    drawn = draw_negatives(count, 50, seed, (3, 1 << 63))
    assert len(set(drawn.tolist())) == min(count, 50)
    found = candidates(torch.tensor(labels), torch.from_numpy(drawn), 50)
    rows = found.rows.tolist()
    assert sorted(rows) == sorted(set(labels) | set(drawn.tolist()))
    assert found.rows[found.labels].tolist() == labels
    # all candidates together stand for the whole vocabulary, wherever there is one beside the labels
    if len(rows) > len(set(labels)):
        assert math.isclose(float(found.shift.exp().sum()), 50, rel_tol=1e-5)


@given(st.lists(st.integers(0, 4999), min_size=1, max_size=300), st.integers(1, 4999), st.integers(0, 99))
def test_as_many_compete_as_make_a_multiple_and_stand_for_all(
    labels: list[int], count: int, seed: int
) -> None:
    drawn = draw_negatives(count, 5000, seed, ())
    found = candidates(torch.tensor(labels), torch.from_numpy(drawn), 5000)
    rows, present, others = found.rows.tolist(), set(labels), set(drawn.tolist()) - set(labels)
    assert found.rows[found.labels].tolist() == labels
    assert set(rows) <= present | others
    assert len(rows) == len(set(rows))
    left_out = len(present | others) - len(rows)
    assert 0 <= left_out < MULTIPLE
    if len(rows) > len(present):
        assert math.isclose(float(found.shift.exp().sum()), 5000, rel_tol=1e-4)
    if MULTIPLE < len(others) < 5000 - len(present):
        assert len(rows) % MULTIPLE == 0


def test_the_tokens_come_in_random_order() -> None:
    """So that those left out at the end are as random as those drawn."""
    last = np.concatenate([draw_negatives(60, 100, seed, ())[-20:] for seed in range(500)])
    counts = np.bincount(last, minlength=100)
    # each is among the last 20 with probability 1/5: binomial, 100 expected of 500
    assert abs(counts - 100).max() < 5 * np.sqrt(500 * 0.2 * 0.8)


def test_the_same_samples_draw_the_same_tokens() -> None:
    assert np.array_equal(draw_negatives(20, 1000, 7, (1, 2)), draw_negatives(20, 1000, 7, (1, 2)))
    assert not np.array_equal(draw_negatives(20, 1000, 7, (1, 2)), draw_negatives(20, 1000, 7, (2, 1)))


def test_with_the_whole_vocabulary_drawn_it_is_the_plain_loss() -> None:
    torch.manual_seed(0)
    lm_head, hidden, labels = torch.randn(40, 8), torch.randn(9, 8), torch.randint(0, 40, (9,))
    found = candidates(labels, torch.arange(40), 40)
    loss, _ = HeadCrossEntropy.apply(hidden, lm_head[found.rows], found.labels, None, found.shift)
    assert torch.allclose(loss, F.cross_entropy(hidden @ lm_head.T, labels, reduction="none"), atol=1e-5)


def test_the_normaliser_is_estimated_without_bias() -> None:
    """Averaged over many draws, the estimated sum of exponentials is the true one."""
    torch.manual_seed(1)
    lm_head, hidden = torch.randn(60, 8) * 0.5, torch.randn(1, 8)
    label = torch.tensor([5])
    truth = float((hidden @ lm_head.T).exp().sum())
    estimates = []
    for seed in range(400):
        found = candidates(label, torch.from_numpy(draw_negatives(12, 60, seed, ())), 60)
        logits = hidden @ lm_head[found.rows].T + found.shift
        estimates.append(float(logits.exp().sum()))
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - truth) < 4 * error


def test_gradients_with_shift_and_cap_are_those_of_the_formula() -> None:
    torch.manual_seed(2)
    lm_head, labels = torch.randn(30, 8), torch.randint(0, 30, (7,))
    shift = torch.rand(30)
    ours = torch.randn(7, 8, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    loss, _ = HeadCrossEntropy.apply(ours, lm_head, labels, 5.0, shift)
    logits = torch.tanh(theirs @ lm_head.T / 5.0) * 5.0 + shift
    expected = F.cross_entropy(logits, labels, reduction="none")
    weights = torch.rand(7)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
