"""The drafter at work: it keeps what it needs of the context and drafts the block behind an anchor.

Dimensions: B slots a block, K taps, H hidden size, V vocabulary rows, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.attention import BlockLayout, KeyValue, lone_attention
from dflash.errors import CheckpointError
from dflash.grouped import grouped_attention
from dflash.smallrows import use_small_rows

if TYPE_CHECKING:
    from dflash.drafter import Drafter
    from dflash.target import Target


def check_fit(drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that was trained for another target.

    Raises:
        CheckpointError: names the field with both values.
    """
    config = drafter.config
    pairs = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "number of target layers": (config.num_target_layers, target.num_layers),
        "vocabulary size": (config.vocab_size, target.head.vocab_size),
        "taps": (config.target_layer_ids, target.taps),
    }
    for name, (drafter_has, target_has) in pairs.items():
        if drafter_has != target_has:
            raise CheckpointError(
                f"the drafter does not fit the target: {name} is {drafter_has} in the drafter and "
                f"{target_has} in the target; use the target it was trained for"
            )


class BlockDrafter:
    """A drafter at work on one sequence: it keeps the keys and values of the context it has seen.

    Args:
        drafter: The network, on the target's device.
        target: Lends its embedding and `lm_head`.
    """

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter, self.head = drafter, target.head
        use_small_rows(drafter)
        self.device = target.device
        self.dtype = next(drafter.parameters()).dtype
        self._context: list[KeyValue] = []
        mask = torch.full((drafter.config.block_size,), drafter.config.mask_token_id, device=self.device)
        self._masks = mask

    @property
    def context_length(self) -> int:
        """Tokens of context seen so far."""
        return self._context[0].key.shape[0] if self._context else 0

    @torch.inference_mode()
    def extend(self, features: Tensor) -> None:
        """Append the tapped states `[T, K*H]` of the next T context tokens."""
        start = self.context_length
        positions = torch.arange(start, start + features.shape[0], device=self.device)
        new = self.drafter.context_key_values(features.to(self.dtype), positions)
        if not self._context:
            self._context = new
        else:
            self._context = [
                KeyValue(torch.cat([old.key, add.key]), torch.cat([old.value, add.value]))
                for old, add in zip(self._context, new, strict=True)
            ]

    @torch.inference_mode()
    def logits(self, anchor: int, slots: int) -> Tensor:
        """Logits `[slots, V]` for the tokens behind an anchor that stands right behind the context.

        Args:
            anchor: Token id at position `context_length`.
            slots: Drafts wanted, at most B - 1. The block always has its trained size B.
        """
        ids = self._masks.clone()
        ids[0] = anchor
        end = self.context_length
        positions = torch.arange(end, end + len(ids), device=self.device)
        layout = BlockLayout.build([0], [end], self.device)
        blocks = self.head.embed(ids)[None].to(self.dtype)
        hidden = self.drafter.denoise(blocks, positions[None], self._context, layout, lone_attention)
        return self.head.logits(hidden[0, 1 : 1 + slots].to(self.head.lm_head.dtype))

    @torch.inference_mode()
    def accepted_from_each(self, sequence: Tensor, first: int) -> list[int]:
        """Draft greedily from every position of a sequence whose context has been seen.

        Args:
            sequence: Token ids `[T]`; all but the last have been given to `extend`.
            first: First position to draft from.

        Returns:
            Tokens that a cycle from each of the anchors `first .. T-2` would have added to the sequence:
            leading drafts that equal it, plus one, and never more than it still has.
        """
        anchors = torch.arange(first, len(sequence) - 1, device=self.device)
        if len(anchors) == 0:
            return []
        size = self.drafter.config.block_size
        positions = anchors[:, None] + torch.arange(size, device=self.device)  # [A, B]
        ids = self._masks.expand(len(anchors), size).clone()
        ids[:, 0] = sequence[anchors]
        layout = BlockLayout.build([0] * len(anchors), anchors.tolist(), self.device)
        hidden = self.drafter.denoise(
            self.head.embed(ids).to(self.dtype), positions, self._context, layout, grouped_attention
        )
        drafts = self.head.logits(hidden[:, 1:].to(self.head.lm_head.dtype)).argmax(dim=-1)  # [A, B-1]
        ahead = positions[:, 1:]
        last = len(sequence) - 1
        right = drafts == sequence[ahead.clamp_max(last)]
        added = 1 + right.long().cumprod(dim=1).sum(dim=1)
        return added.minimum(last - anchors).tolist()
