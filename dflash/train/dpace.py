"""D-PACE (arXiv 2605.18810): slots weigh as much as the expected acceptance length depends on them.

With `q_i` the probability that slot i drafts right, the expected number of accepted drafts of a block is the
sum over m of `q_1 ... q_m`. Its derivative by `log q_j` is the sum over m >= j of that product: the weight of
slot j. Early in training the products vanish, so `q` is smoothed to `s = (1 - alpha) q + alpha`.

Dimensions: A blocks, S = B-1 slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dpace_weights(ce: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """Weight of every slot, float32 `[A, S]`, without gradient; 0 where it is not counted.

    Args:
        ce: Cross-entropy of the slots that are counted, `[A, S]`.
        counted: Which those are, bool `[A, S]`; the others neither multiply nor add anything.
        alpha: Smoothing in [0, 1]; 1 makes the weight of a slot the number of slots from it on.
    """
    right = torch.exp(-ce.detach().float())
    smoothed = torch.where(counted, (1 - alpha) * right + alpha, 1.0)
    products = smoothed.cumprod(dim=1) * counted  # of slots 1..m, at m
    from_here_on = products.flip(1).cumsum(dim=1).flip(1)
    return from_here_on * counted
