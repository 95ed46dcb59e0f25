"""What a drafter is trained to do: predict the B-1 tokens behind an anchor, the near ones mattering most.

Loss = sum(w * CE) / sum(w) with `w_k = exp(-(k - 1) / gamma)` (DFlash, arXiv 2602.06036). Both sums are
returned apart, so that the quotient can be taken over a whole optimizer step, whatever its micro-batches and
ranks are. `dpace` takes its weights from the drafter's own confidence; `kd` puts the divergence to the
target's distribution in the place of CE.

Nothing here waits for what the device has computed: a batch says where its counted slots are.

Dimensions: A blocks, B slots, P counted slots, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.errors import ConfigError
from dflash.train.chunks import chunk_rows, missing_rows
from dflash.train.dpace import dpace_weights
from dflash.train.teacher import HeadDivergence, teacher_states

if TYPE_CHECKING:
    from dflash.drafter import Drafter
    from dflash.head import TargetHead
    from dflash.train.batches import PackedBatch
    from dflash.train.candidates import Candidates
from dflash.train.parallel import zero_of

SOFTMAX_ROWS = 64
"""Positions whose float32 probabilities exist at once on a CPU: they stay in its cache."""
EXPONENTIAL_ROWS = 32
"""Positions whose bfloat16 logits become exponentials at once on a CPU."""
LARGEST_LOGIT = 60.0
"""Up to this the exponentials of logits, their sums and their products need no shift in float32's range."""
SUMMED = 256
"""Exponentials that are summed at once: the sum of a piece is rounded to bfloat16, the sum of all is not."""

LOSSES = ("ce", "dpace", "kd")

_PAPER_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which loss, and how it weighs the slots of a block."""

    block_size: int = 16
    loss: str = "ce"
    """`ce`: cross-entropy to the data's tokens, the paper's loss; `dpace`: the same weighed by confidence;
    `kd`: divergence to the target's own distribution."""
    gamma: float | None = None
    """Decay of the slot weights; by the paper's values when None (7, 5, 4 for blocks of 16, 10, 8)."""
    sampled_softmax: int | None = None
    """Tokens drawn to compete with the labels of a micro-batch; the whole vocabulary when None."""
    dpace_alpha: float = 0.5
    """Smoothing of `dpace`'s weights; the other losses decay by `gamma`."""

    def __post_init__(self) -> None:
        """Refuse what is no loss.

        Raises:
            ConfigError: names the value and what is allowed.
        """
        if self.loss not in LOSSES:
            raise ConfigError(f"--loss {self.loss!r} is unknown; use {', '.join(LOSSES)}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"--dpace-alpha {self.dpace_alpha} must be in [0, 1]")
        if self.loss == "kd" and self.sampled_softmax is not None:
            raise ConfigError(
                "--loss kd compares whole distributions: it cannot go with --sampled-softmax; leave one out"
            )
        if self.gamma is not None and self.gamma <= 0:
            raise ConfigError(f"--gamma {self.gamma} must be positive")
        if self.sampled_softmax is not None and self.sampled_softmax < 1:
            raise ConfigError(
                f"--sampled-softmax is {self.sampled_softmax}; draw at least 1 token, or leave it out"
            )

    def slot_weights(self) -> Tensor:
        """`w_k` for k = 1..B-1, float32 `[B-1]`."""
        # The paper's values are 0.44, 0.5 and 0.5 of the block size; other sizes get a ratio between them.
        gamma = self.gamma or _PAPER_GAMMA.get(self.block_size, max(self.block_size * 0.45, 1.0))
        return torch.exp(-torch.arange(self.block_size - 1, dtype=torch.float32) / gamma)


@dataclass
class LossSums:
    """What one micro-batch adds to a step; every field is a sum, so steps and ranks add up."""

    loss: Tensor
    """sum(w * CE), scalar float32, differentiable."""
    weight: Tensor
    """sum(w), scalar float32."""
    correct: Tensor
    """Correct predictions by slot, float32 `[B-1]`."""
    counted: Tensor
    """Counted positions by slot, float32 `[B-1]`."""
    accepted: Tensor
    """Sum over blocks of 1 + leading correct slots, by bucket, float32 `[buckets]`."""
    blocks: Tensor
    """Blocks by bucket, float32 `[buckets]`."""
    bucket_loss: Tensor
    """sum(w * CE) by bucket, float32 `[buckets]`."""
    bucket_weight: Tensor
    """sum(w) by bucket, float32 `[buckets]`."""

    def metrics(self) -> Tensor:
        """All sums in one float64 vector, detached, for a single reduction over ranks."""
        return torch.cat([part.detach().double().reshape(-1) for part in vars(self).values()])


class HeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen `lm_head` whose logits are never held as a whole.

    The gradient with respect to the hidden state of a position is `(softmax - onehot) @ lm_head`, times what
    arrives from above. It is formed chunk by chunk beside the loss, so the logits are computed once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        labels: Tensor,
        softcap: float | None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss of each position.

        Args:
            ctx: Of the operation.
            hidden: `[P, H]`.
            lm_head: `[V, H]`, or the rows that compete.
            labels: Place of the right row, `[P]`.
            softcap: Logits become `cap * tanh(logits / cap)`.
            shift: Added to the logits of each row, `[V]`.

        Returns:
            Cross-entropy `[P]` in float32, and whether the label has the highest logit, bool `[P]`.
        """
        count, more = len(labels), missing_rows(len(labels), hidden.device)
        rows, labels = F.pad(hidden.to(lm_head.dtype), (0, 0, 0, more)), F.pad(labels, (0, more))
        loss = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(labels), dtype=torch.bool, device=hidden.device)
        scale, gradient = torch.empty_like(loss), torch.empty_like(rows)
        step = chunk_rows(lm_head)
        buffer = rows.new_empty(min(step, len(labels)), lm_head.shape[0])
        for start in range(0, len(labels), step):
            part = slice(start, start + step)
            logits = torch.mm(rows[part], lm_head.T, out=buffer[: len(rows[part])])
            loss[part], correct[part], scale[part] = _to_slopes(logits, labels[part], softcap, shift)
            torch.mm(logits, lm_head, out=gradient[part])
        ctx.save_for_backward(gradient[:count], scale[:count])
        ctx.hidden_dtype = hidden.dtype
        loss, correct = loss[:count], correct[:count]
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scale the saved rows, also by the gradient of each position's loss."""
        gradient, scale = ctx.saved_tensors
        scaled = gradient.float() * (upstream[0] * scale)[:, None]
        return scaled.to(ctx.hidden_dtype), None, None, None, None


def _to_slopes(
    raw: Tensor, labels: Tensor, softcap: float | None, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, correctness and scale of logits `[p, V]`, which become the slopes of the loss divided by it."""
    on_cpu = raw.device.type == "cpu"
    plain = on_cpu and raw.dtype == torch.bfloat16 and softcap is None and shift is None
    rows = EXPONENTIAL_ROWS if plain else SOFTMAX_ROWS if on_cpu else max(len(raw), 1)
    results = []
    for part, wanted in zip(torch.split(raw, rows), torch.split(labels, rows), strict=True):
        found = _exponential_loss(part, wanted) if plain else None
        results.append(found or _shifted_loss(part, wanted, softcap, shift))
    losses, hits, scales = zip(*results, strict=True)
    return torch.cat(losses), torch.cat(hits), torch.cat(scales)


def _exponential_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same for bfloat16 logits in a third of the passes, or nothing where one may need a shift.

    Over their sum exponentials are slopes, but for the label's: it has minus the sum of the others.
    """
    places = torch.arange(len(labels)), labels
    wanted = logits[places]
    logits[places] = -math.inf
    others = _highest(logits)
    if not bool((torch.maximum(wanted, others).abs() <= LARGEST_LOGIT).all()):
        logits[places] = wanted
        return None
    correct, tied = wanted > others, (wanted == others).nonzero()[:, 0]
    correct[tied] = labels[tied] < logits[tied].argmax(dim=-1)  # of equals the first
    whole = logits.exp_().shape[1] // SUMMED * SUMMED
    pieces = torch.unflatten(logits[:, :whole], 1, (-1 if whole else 0, SUMMED)).sum(dim=-1)
    rest = torch.cat([pieces, logits[:, whole:]], dim=1).sum(dim=-1, dtype=torch.float32)
    logits[places] = -rest.to(logits.dtype)
    own = wanted.float()
    return F.softplus(rest.log() - own), correct, (rest + own.exp()).reciprocal()


def _highest(rows: Tensor) -> Tensor:
    """The highest of each row of bfloat16 values, `[p]`: from zero on their bits order like integers."""
    bits = rows.view(torch.int16).amax(dim=-1)
    return bits.view(rows.dtype) if bool((bits >= 0).all()) else rows.amax(dim=-1)


def _shifted_loss(
    raw: Tensor, labels: Tensor, softcap: float | None, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_to_slopes`, by float32 probabilities of all positions at once; the scale is 1."""
    capped = raw if softcap is None else torch.tanh(raw / softcap) * softcap
    scores = raw.new_empty(raw.shape, dtype=torch.float32).copy_(capped)
    loss, correct = _softmax_loss(scores if shift is None else scores.add_(shift), labels)
    raw.copy_(scores if softcap is None else scores.mul_(1 - (capped.float() / softcap).square()))
    return loss, correct, torch.ones_like(loss)


def _softmax_loss(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and correctness of float32 logits `[p, V]`, which become its slope `softmax - onehot`."""
    index = labels[:, None]
    wanted = scores.gather(1, index)
    top, correct = _best(scores, index, wanted)
    probabilities = torch.softmax(scores, dim=-1, out=scores)
    # log p(label) = z(label) - z(best) + log p(best): p(best) >= 1/V, while p(label) itself may underflow
    loss = top - wanted - probabilities.amax(dim=-1, keepdim=True).log()
    probabilities.scatter_add_(1, index, probabilities.new_full(index.shape, -1.0))
    return loss[:, 0], correct


def _best(scores: Tensor, index: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row `[p, 1]`; whether it is the label's, bool `[p]`: of equals the first.

    Args:
        scores: Logits `[p, V]`.
        index: The labels `[p, 1]`.
        wanted: Their logits `[p, 1]`.
    """
    if scores.device.type != "cpu":
        top, best = scores.max(dim=-1, keepdim=True)
        return top, (best == index)[:, 0]
    # On a CPU the place of a maximum costs ten times its value, so only ties are looked up.
    others = scores.scatter_(1, index, -math.inf).amax(dim=-1, keepdim=True)
    scores.scatter_(1, index, wanted)
    correct = (wanted > others)[:, 0]
    tied = (wanted == others)[:, 0].nonzero()[:, 0]
    correct[tied] = scores[tied].argmax(dim=-1) == index[tied, 0]
    return torch.maximum(wanted, others), correct


class DraftingLoss(nn.Module):
    """Drafter, frozen head and loss as one module, so that DDP sees one forward and one backward.

    The dtype of the head is the compute dtype: with a bfloat16 head the float32 drafter runs under autocast,
    with a float32 head everything is float32.
    """

    def __init__(self, drafter: Drafter, head: TargetHead, config: ObjectiveConfig, buckets: int) -> None:
        super().__init__()
        self.drafter, self.head, self.buckets = drafter, head, buckets
        # beside the head, where batches come to; no buffer, which DDP would send from rank to rank
        self.config, self.slot_weights = config, config.slot_weights().to(head.lm_head.device)
        self.width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
        """Channels of the features that the drafter reads; a teacher's come behind them."""

    def forward(self, batch: PackedBatch) -> LossSums:
        """Sums of one micro-batch; a batch without blocks adds zeros and still reaches every parameter."""
        if batch.blocks == 0:
            return self._nothing(batch)
        dtype, device = self.head.lm_head.dtype, batch.block_ids.device.type
        with nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            return self._of_blocks(batch, dtype)

    def _of_blocks(self, batch: PackedBatch, dtype: torch.dtype) -> LossSums:
        hidden = self.drafter(
            self.head.embed(batch.distinct_ids).float(),  # the residual stream stays in float32
            batch.block_positions,
            batch.features[:, : self.width].to(dtype),
            batch.context_positions,
            batch.layout,
            first_slot=1,
        )
        # only counted slots reach the lm_head: [A, B-1, H] -> [P, H]; an index has a cheap gradient
        positions = hidden.flatten(0, 1).index_select(0, batch.places)
        if self.config.loss == "kd":
            teacher, cap = teacher_states(batch, self.head), self.head.facts.logit_softcap
            ce, hit = HeadDivergence.apply(  # type: ignore[no-untyped-call]
                positions, teacher, self.head.lm_head, batch.targets, cap
            )
        else:
            ce, hit = self._cross_entropy(positions, batch.targets, batch.candidates)
        return self._sums(batch, ce, hit)

    def _weights(self, batch: PackedBatch, ce: Tensor) -> Tensor:
        """Weight of each counted slot, `[P]`."""
        if self.config.loss == "dpace":
            weights = dpace_weights(_spread(ce.detach(), batch), batch.counted, self.config.dpace_alpha)
            return weights.flatten().index_select(0, batch.places)
        return self.slot_weights.index_select(0, batch.places % len(self.slot_weights))

    def _cross_entropy(
        self, hidden: Tensor, labels: Tensor, competing: Candidates | None
    ) -> tuple[Tensor, Tensor]:
        lm_head, cap, shift = self.head.lm_head, self.head.facts.logit_softcap, None
        if competing is not None:
            rows, labels, shift = competing
            lm_head = lm_head.index_select(0, rows)
        return HeadCrossEntropy.apply(hidden, lm_head, labels, cap, shift)  # type: ignore[no-untyped-call,no-any-return]

    def _sums(self, batch: PackedBatch, ce: Tensor, hit: Tensor) -> LossSums:
        counted = batch.counted
        weight = self._weights(batch, ce)  # [P]
        correct = _spread(hit, batch)
        accepted = 1 + correct.cumprod(dim=1).sum(dim=1)  # [A]
        bucket, real = batch.buckets, counted[:, 0].float()  # the first slot of a real block always counts
        of_position = bucket.index_select(0, batch.places // counted.shape[1])  # [P]
        weighted = weight * ce
        return LossSums(
            loss=weighted.sum(),
            weight=weight.sum(),
            correct=correct.sum(dim=0),
            counted=counted.float().sum(dim=0),
            accepted=self._by_bucket(bucket, accepted * real),
            blocks=self._by_bucket(bucket, real),
            bucket_loss=self._by_bucket(of_position, weighted.detach()),
            bucket_weight=self._by_bucket(of_position, weight),
        )

    def _by_bucket(self, bucket: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(self.buckets, device=values.device).index_add_(0, bucket, values)

    def _nothing(self, batch: PackedBatch) -> LossSums:
        slots, device = batch.counted.shape[1], batch.block_ids.device
        zero = zero_of(self.drafter, slots + 1)
        none, per_slot, per_bucket = (
            torch.zeros(shape, device=device) for shape in ((), (slots,), (self.buckets,))
        )
        return LossSums(zero, none, per_slot, per_slot, per_bucket, per_bucket, per_bucket, per_bucket)


def _spread(values: Tensor, batch: PackedBatch) -> Tensor:
    """Values of the counted slots `[P]` in their places, float32 `[A, B-1]`; 0 elsewhere."""
    flat = torch.zeros(batch.counted.numel(), device=values.device)
    return flat.index_copy_(0, batch.places, values.float()).view(batch.counted.shape)
