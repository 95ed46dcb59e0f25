"""Sampled softmax: let a part of the vocabulary compete where the whole `lm_head` is most of the work.

The softmax of a position runs over the labels of its micro-batch, which are the likely competitors, and over
tokens drawn uniformly from the rest, each standing for as many as were not drawn (`shift`). The normaliser is
thereby estimated without bias (Bengio and Senecal, 2008; Jean et al., 2015). By default all compete.

Dimensions: P positions, V vocabulary rows, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MULTIPLE = 256


class Candidates(NamedTuple):
    """The rows of the `lm_head` that compete."""

    rows: Tensor
    """int64 `[C]`, all different."""
    labels: Tensor
    """Place of each position's label among the rows, int64 `[P]`."""
    shift: Tensor
    """Added to the candidates' logits, float32 `[C]`: the log of how many tokens each one stands for."""


def draw_negatives(count: int, vocab_size: int, seed: int, samples: Sequence[int]) -> np.ndarray:
    """Different tokens drawn uniformly, in random order, int64 `[min(count, V)]`; by the seed and the ids."""
    generator = np.random.default_rng((seed, *samples))
    return generator.choice(vocab_size, size=min(count, vocab_size), replace=False)


def candidates(labels: Tensor, negatives: Tensor, vocab_size: int) -> Candidates:
    """The labels that occur and those negatives that are none of them.

    Of these the last ones are left out, so that C is a multiple of `MULTIPLE`, unless all the vocabulary
    competes: how many there are would differ from step to step, and kernels are compiled for each new shape.

    Args:
        labels: int64 `[P]`.
        negatives: int64, all different, in random order.
        vocab_size: V.
    """
    present, index = torch.unique(labels, return_inverse=True)
    fresh = negatives[~torch.isin(negatives, present)]
    others, kept = vocab_size - len(present), len(fresh) - (len(present) + len(fresh)) % MULTIPLE
    if kept > 0 and len(fresh) < others:
        fresh = fresh[:kept]
    stands_for = others / max(len(fresh), 1)
    shift = torch.zeros(len(present) + len(fresh), device=labels.device)
    shift[len(present) :] = math.log(max(stands_for, 1.0))
    return Candidates(torch.cat([present, fresh]), index, shift)
