"""Distillation: the loss is the divergence to the target's own distribution instead of the data's token.

The target is not there in training, but its last hidden state may be: a cache that taps layer N-1 holds it,
and `lm_head(norm(state))` at position a + k - 1 is what the target said about the token at a + k. Servers
cannot tap that layer, so the drafter does not read it.

Dimensions: A blocks, B slots, R teacher rows, P counted slots, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.errors import ConfigError
from dflash.train.chunks import chunk_rows, missing_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash.cache.manifest import Identity
    from dflash.head import TargetHead
    from dflash.train.batches import Document, PackedBatch

COPIES = 4
"""How many times fewer positions go through the `lm_head` at once than without a teacher's logits."""


def drafter_taps(identity: Identity, loss: str) -> tuple[int, ...]:
    """The layers of a cache that the drafter reads: all, but for the teacher's in distillation.

    Raises:
        ConfigError: `kd` on a cache without the target's last hidden state.
    """
    if loss != "kd":
        return identity.taps
    last = identity.num_target_layers - 1
    if last not in identity.taps:
        taps = ",".join(map(str, identity.taps))
        raise ConfigError(
            f"--loss kd needs the target's last hidden state, but the cache holds layers {taps} of 0..{last}"
            f"; extract with --taps {taps},{last}"
        )
    return tuple(tap for tap in identity.taps if tap != last)


def with_teacher(batch: PackedBatch, docs: Sequence[Document]) -> PackedBatch:
    """The batch of these documents with the deepest tap's states behind its counted slots' predictions."""
    size = batch.block_ids.shape[1]
    kept = [doc for doc in docs if len(doc.anchors)]
    parts, rows, start = [], [np.zeros((0, size - 1), np.int64)], 0
    for doc in kept:
        first, last = int(doc.anchors[0]), int(doc.anchors[-1])
        part = doc.sample.hidden_states[first : last + size - 1, -1]  # position a + k - 1 is at most this
        # slot k of anchor a is predicted from position a + k - 1
        wanted = (doc.anchors - first)[:, None] + np.arange(size - 1)
        rows.append(start + np.minimum(wanted, len(part) - 1))
        parts.append(part)
        start += len(part)
    states = torch.cat(parts) if parts else batch.features.new_zeros(0, 1)
    every = torch.from_numpy(np.concatenate(rows)).flatten()  # [A, B-1] laid flat
    return replace(batch, teacher=states, teacher_rows=every.index_select(0, batch.places))


def teacher_states(batch: PackedBatch, head: TargetHead) -> Tensor:
    """Normed last states `[P, H]` behind the counted slots, in the dtype of the head."""
    assert batch.teacher is not None  # `with_teacher` has been called
    assert batch.teacher_rows is not None
    return head.normed(batch.teacher.index_select(0, batch.teacher_rows)).to(head.lm_head.dtype)


class HeadDivergence(torch.autograd.Function):
    """KL(target || drafter) through a frozen `lm_head` whose logits are never held as a whole.

    As for the cross-entropy, the gradient `(softmax - teacher's softmax) @ lm_head` is formed chunk by chunk
    beside the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Tensor, lm_head: Tensor, labels: Tensor, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Divergence of each position `[P]` in float32, and whether its label has the highest logit `[P]`.

        Args:
            ctx: Of the operation.
            hidden: The drafter's normed states `[P, H]`.
            teacher: The target's normed last states `[P, H]`.
            lm_head: `[V, H]`.
            labels: The data's tokens `[P]`, for the accuracy alone.
            softcap: Logits of both become `cap * tanh(logits / cap)`.
        """
        count, more = len(labels), missing_rows(len(labels), hidden.device)
        rows, teacher = (F.pad(part.to(lm_head.dtype), (0, 0, 0, more)) for part in (hidden, teacher))
        labels = F.pad(labels, (0, more))
        loss = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        correct = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows)
        step = chunk_rows(lm_head, COPIES)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            ours, bend = _log_softmax(rows[part] @ lm_head.T, softcap)
            theirs, _ = _log_softmax(teacher[part] @ lm_head.T, softcap)
            wanted = theirs.exp()
            loss[part] = (wanted * (theirs - ours)).sum(dim=-1)
            correct[part] = ours.argmax(dim=-1) == labels[part]
            slope = ours.exp() - wanted
            gradient[part] = (slope if bend is None else slope * bend).to(rows.dtype) @ lm_head
        ctx.save_for_backward(gradient[:count])
        ctx.hidden_dtype = hidden.dtype
        loss, correct = loss[:count], correct[:count]
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Scale the saved rows by the gradient of each position's loss."""
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * upstream[0][:, None]).to(ctx.hidden_dtype), None, None, None, None


def _log_softmax(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities in float32, and the slope of the cap where there is one."""
    raw = logits.float()
    if softcap is None:
        return torch.log_softmax(raw, dim=-1), None
    bent = torch.tanh(raw / softcap)
    return torch.log_softmax(bent * softcap, dim=-1), 1 - bent.square()
