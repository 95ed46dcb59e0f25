"""Speculative decoding: the drafter proposes a block, the target verifies it in one pass, nothing changes.

Each cycle (contract, section 4):

1. The drafter gets `[anchor, MASK x (B-1)]` and the states of all tokens before the anchor, and drafts B-1
   tokens.
2. The target runs over the anchor and the drafts in one pass.
3. The longest prefix of drafts that the target would have produced itself is kept, and one token of the
   target's own behind it; that one is the next anchor. The target's cache is cropped to what was kept.

Greedy output therefore equals plain greedy decoding, whatever the drafter says. With a temperature, drafts
are accepted by rejection sampling (Leviathan et al., 2023; Chen et al., 2023), which keeps the target's
distribution.

Dimensions: B slots a block, K taps, H hidden size, V vocabulary rows, T tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.attention import BlockLayout, KeyValue, grouped_attention, lone_attention
from dflash.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from dflash.drafter import Drafter
    from dflash.target import Target


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of the sampling; unused when greedy."""
    ignore_stop: bool = False
    """Go on behind the end-of-sequence token (measurements of fixed length)."""
    measure_anchors: bool = False
    """Afterwards, draft from every position of the output too and see how much would have been accepted."""

    def __post_init__(self) -> None:
        """Refuse what cannot be decoded.

        Raises:
            ConfigError: names the value and its range.
        """
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} must be 1 or more")
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} must not be negative; 0 is greedy")


@dataclass
class Generation:
    """Tokens behind a prompt and what they cost."""

    tokens: list[int]
    """Produced tokens; ends with the stop token where one was produced."""
    accepted: list[int] = field(default_factory=list)
    """Tokens that each verification cycle added (accepted drafts + 1); their mean is tau."""
    target_passes: int = 0
    """Forward passes of the target, the prefill included."""
    seconds: float = 0.0
    """Wall time behind the prefill."""
    drafting_seconds: float = 0.0
    """Share of it that the drafter took."""
    anchor_accepted: list[int] = field(default_factory=list)
    """With `measure_anchors`: accepted drafts + 1 from every position of the output but the last."""

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a verification cycle adds on average; 1.0 when there was none."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 1.0


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
        return kept, _draw(wanted[-1], generator)
    residual = (wanted[kept] - proposed[kept]).clamp_min(0)
    return kept, _draw(residual if residual.sum() > 0 else wanted[kept], generator)


def _draw(weights: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def generate(target: Target, drafter: Drafter | None, prompt: Tensor, config: DecodeConfig) -> Generation:
    """Decode behind a prompt, speculatively; without a drafter, one token a pass.

    Args:
        target: The whole target, tapped as the drafter wants.
        drafter: On the target's device, or None.
        prompt: Token ids `[T]`, T >= 1.
        config: Length and sampling.

    Raises:
        CheckpointError: the drafter does not fit the target.
        ConfigError: the prompt is empty.
    """
    if drafter is not None:
        check_fit(drafter, target)
    if prompt.numel() == 0:
        raise ConfigError("the prompt is empty; give at least one token")
    decoding = _Decoding(target, BlockDrafter(drafter, target) if drafter else None, config)
    decoding.prefill(prompt)
    started = time.perf_counter()
    while not decoding.finished:
        decoding.cycle()
    decoding.result.seconds = time.perf_counter() - started
    if decoding.drafter is not None and config.measure_anchors:
        sequence = torch.cat(
            [prompt.to(target.device), torch.tensor(decoding.result.tokens, device=target.device)]
        )
        decoding.result.anchor_accepted = decoding.drafter.accepted_from_each(sequence, len(prompt))
    return decoding.result


class _Decoding:
    """One sequence being decoded, with or without a drafter."""

    def __init__(self, target: Target, drafter: BlockDrafter | None, config: DecodeConfig) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.cache = target.new_cache()
        self.result = Generation([])
        self.finished = False
        self.generator = torch.Generator(device=target.device).manual_seed(config.seed)

    def prefill(self, prompt: Tensor) -> None:
        logits, features = self.target.forward(prompt.to(self.target.device), self.cache, keep_logits=1)
        self.cache.crop(0)  # layers with a window drop what they no longer need
        self.result.target_passes = 1
        if self.drafter is not None:
            self.drafter.extend(features)
        self._commit([self._pick(self._probabilities(logits)[-1])])

    def cycle(self) -> None:
        """One draft and one verification; without a drafter, one token."""
        anchor = self.result.tokens[-1]
        room = self.config.max_new_tokens - len(self.result.tokens)  # tokens that may still be produced
        started = time.perf_counter()
        # The pass adds one token of the target's own, so more than room - 1 drafts could not be used.
        slots = 0 if self.drafter is None else min(self.drafter.drafter.config.block_size, room) - 1
        drafts, proposed = self._draft(anchor, slots)
        self.result.drafting_seconds += time.perf_counter() - started
        ids = torch.cat([torch.tensor([anchor], device=self.target.device), drafts])
        logits, features = self.target.forward(ids, self.cache, keep_logits=len(ids))
        self.result.target_passes += 1
        kept, bonus = self._verify(drafts, proposed, logits)
        added = self._commit([*drafts[:kept].tolist(), bonus])
        self.result.accepted.append(added)
        # The anchor and the drafts before the last committed token are context now; the rest is forgotten.
        self.cache.crop(added - len(ids))
        if self.drafter is not None:
            self.drafter.extend(features[:added])

    def _draft(self, anchor: int, slots: int) -> tuple[Tensor, Tensor | None]:
        """Drafted ids `[slots]` and the distributions `[slots, V]` they are from (None when greedy)."""
        if self.drafter is None or slots == 0:
            return torch.zeros(0, dtype=torch.int64, device=self.target.device), None
        logits = self.drafter.logits(anchor, slots)
        if self.config.temperature == 0:
            return logits.argmax(dim=-1), None
        proposed = self._probabilities(logits)
        return torch.multinomial(proposed, 1, generator=self.generator)[:, 0], proposed

    def _verify(self, drafts: Tensor, proposed: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """How many drafts are kept, and the target's own token behind them."""
        wanted = self._probabilities(logits)  # [slots + 1, V]
        if proposed is None:
            if self.config.temperature == 0:
                expected = wanted.argmax(dim=-1)
                kept = accept_length(drafts, expected[:-1])
                return kept, int(expected[kept])
            return 0, self._pick(wanted[0])
        return reject(drafts, proposed, wanted, self.generator)

    def _probabilities(self, logits: Tensor) -> Tensor:
        if self.config.temperature == 0:
            return logits  # the argmax is all that greedy decoding asks for
        return torch.softmax(logits.float() / self.config.temperature, dim=-1)

    def _pick(self, weights: Tensor) -> int:
        if self.config.temperature == 0:
            return int(weights.argmax())
        return _draw(weights, self.generator)

    def _commit(self, tokens: list[int]) -> int:
        """Append tokens up to a stop token or the length limit; returns how many were taken."""
        for count, token in enumerate(tokens, start=1):
            self.result.tokens.append(token)
            stopped = token in self.target.stop_tokens and not self.config.ignore_stop
            if stopped or len(self.result.tokens) >= self.config.max_new_tokens:
                self.finished = True
                return count
        return len(tokens)
