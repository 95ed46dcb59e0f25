"""From logits to tokens: distributions, and which drafts are kept.

Dimensions: V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.decode.config import DecodeConfig


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from.

    Filters apply in the order of Transformers' `generate`: temperature, top-k, top-p.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def of(cls, config: DecodeConfig) -> Sampling:
        """That of a decoding."""
        return cls(config.temperature, config.top_k, config.top_p)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    def weights(self, logits: Tensor) -> Tensor:
        """Probabilities `[..., V]` in float32; when greedy the logits themselves, whose largest counts."""
        if self.greedy:
            return logits
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        probabilities = torch.softmax(scaled, dim=-1)
        return probabilities if self.top_p is None else _nucleus(probabilities, self.top_p)

    def pick(self, weights: Tensor, generator: torch.Generator) -> int:
        """A token from one position's weights `[V]`."""
        return int(weights.argmax()) if self.greedy else draw(weights, generator)

    def pick_each(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """A token from each of the rows `[..., V]`, int64 `[...]`."""
        if self.greedy:
            return weights.argmax(dim=-1)
        flat = torch.multinomial(weights.flatten(0, -2), 1, generator=generator)
        return flat.view(weights.shape[:-1])


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Keep the fewest tokens that together hold `share` (Holtzman et al., 2020), and make them sum to 1."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered  # what likelier tokens hold already
    kept = torch.where(before < share, ordered, torch.zeros_like(ordered))
    kept = torch.zeros_like(probabilities).scatter(-1, order, kept)
    return kept / kept.sum(dim=-1, keepdim=True)


def accept_length(drafts: Tensor, expected: Tensor) -> int:
    """Length of the longest prefix of `drafts [n]` that equals `expected [n]`."""
    return int((drafts == expected).long().cumprod(0).sum())


def reject(drafts: Tensor, proposed: Tensor, wanted: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Rejection sampling: keep a draft with probability min(1, p/q), else draw from max(p - q, 0).

    Args:
        drafts: Ids `[n]`, n >= 1, drawn from `proposed`.
        proposed: The drafter's distributions q `[n, V]`.
        wanted: The target's distributions p `[n + 1, V]`.
        generator: Of the sampling.

    Returns:
        How many drafts are kept, and the token behind them; all of them are distributed as `wanted` says.
    """
    index = drafts[:, None]
    p, q = wanted[:-1].gather(1, index)[:, 0], proposed.gather(1, index)[:, 0]
    chance = torch.rand(len(drafts), generator=generator, device=drafts.device)
    kept = int((chance * q < p).long().cumprod(0).sum())
    if kept == len(drafts):
        return kept, draw(wanted[-1], generator)
    residual = (wanted[kept] - proposed[kept]).clamp_min(0)
    return kept, draw(residual if residual.sum() > 0 else wanted[kept], generator)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """A token from one position's weights `[V]`."""
    return int(torch.multinomial(weights, 1, generator=generator))
