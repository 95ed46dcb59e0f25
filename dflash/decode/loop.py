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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.drafting import BlockDrafter, check_fit
from dflash.decode.pace import Pace
from dflash.decode.rollback import Rollback
from dflash.decode.sampling import Sampling, accept_length, reject
from dflash.decode.tree import best_first, check_tree_target, follow, keep_rows, tree_mask, tree_positions
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.drafter import Drafter
    from dflash.target import Target


def generate(
    target: Target, drafter: Drafter | None, prompt: Tensor, config: DecodeConfig, pace: Pace | None = None
) -> Generation:
    """Decode behind a prompt, speculatively; without a drafter, one token a pass.

    Args:
        target: The whole target, tapped as the drafter wants.
        drafter: On the target's device, or None.
        prompt: Token ids `[T]`, T >= 1.
        config: Length, sampling, and how to draft.
        pace: With `adaptive`: what earlier prompts have taught; a new one by default.

    Raises:
        CheckpointError: the drafter does not fit the target.
        ConfigError: the prompt is empty, or the target cannot verify trees.
    """
    if drafter is not None:
        check_fit(drafter, target)
    if prompt.numel() == 0:
        raise ConfigError("the prompt is empty; give at least one token")
    decoding = _Decoding(target, drafter, config, pace)
    decoding.prefill(prompt)
    started = time.perf_counter()
    while not decoding.finished:
        decoding.cycle()
    decoding.result.seconds = time.perf_counter() - started
    if decoding.drafter is not None and config.measure_anchors:
        produced = torch.tensor(decoding.result.tokens, device=target.device)
        decoding.take_in()
        sequence = torch.cat([prompt.to(target.device), produced])
        decoding.result.anchor_accepted = decoding.drafter.accepted_from_each(sequence, len(prompt))
    return decoding.result


class _Decoding:
    """One sequence being decoded, with or without a drafter."""

    def __init__(
        self, target: Target, drafter: Drafter | None, config: DecodeConfig, pace: Pace | None
    ) -> None:
        self.target, self.config, self.sampling = target, config, Sampling.of(config)
        self.drafter = BlockDrafter(drafter, target) if drafter else None
        self.slots = drafter.config.block_size - 1 if drafter else 0
        self.pace = (pace or Pace(self.slots)) if config.adaptive and self.slots else None
        self.cache = target.new_cache()
        if config.draft == "tree" and drafter is not None:
            check_tree_target(target.model, self.cache)
        self.context = 0  # tokens in the cache
        self.waiting: list[Tensor] = []  # states that the drafter has not taken in
        self.result = Generation([])
        self.finished = False
        self.generator = torch.Generator(device=target.device).manual_seed(config.seed)

    def prefill(self, prompt: Tensor) -> None:
        logits, features = self.target.forward(prompt.to(self.target.device), self.cache, keep_logits=1)
        self.cache.crop(0)  # layers with a window drop what they no longer need
        self.result.target_passes = 1
        self.context = len(prompt)
        self.waiting.append(features)
        self.take_in()
        self._commit([self.sampling.pick(self.sampling.weights(logits)[-1], self.generator)])

    def cycle(self) -> None:
        """One draft and one verification; without a drafter, one token."""
        started = time.perf_counter()
        room = self.config.max_new_tokens - len(self.result.tokens)  # tokens that may still be produced
        wish = self.slots if self.pace is None else self.pace.choose()
        # The pass adds one token of the target's own, so more than room - 1 drafts could not be used.
        slots = min(wish, room - 1)
        grown = slots > 0 and self.config.draft == "tree"
        added = self._tree_cycle(slots) if grown else self._block_cycle(slots)
        self.result.target_passes += 1
        self.result.accepted.append(added)
        self.context += added
        if self.pace is not None:
            self.pace.record(slots, added - 1, time.perf_counter() - started)

    def take_in(self) -> None:
        """Give the drafter the states that it has not seen; a paused one gets them when it goes on."""
        if self.drafter is not None and self.waiting:
            self.drafter.extend(torch.cat(self.waiting))
        self.waiting.clear()

    def _block_cycle(self, slots: int) -> int:
        """Draft a line, verify it; how many tokens that added."""
        drafts, proposed = self._draft(slots)
        anchor = torch.tensor([self.result.tokens[-1]], device=self.target.device)
        ids = torch.cat([anchor, drafts])
        rollback = Rollback(self.cache, len(ids))
        logits, features = self.target.forward(ids, self.cache, keep_logits=len(ids))
        kept, bonus = self._verify(drafts, proposed, self.sampling.weights(logits))
        added = self._commit([*drafts[:kept].tolist(), bonus])
        # The anchor and the drafts before the last committed token are context now; the rest is forgotten.
        self.result.target_passes += rollback.keep(self.target, ids, added)
        self._keep_states(features[:added])
        return added

    def _tree_cycle(self, slots: int) -> int:
        """Draft a tree, verify it; how many tokens that added."""
        device = self.target.device
        tree = best_first(self._draft_logits(slots), self.config.budget)
        ids = torch.tensor([self.result.tokens[-1], *tree.tokens], device=device)
        logits, features = self.target.forward(
            ids,
            self.cache,
            keep_logits=len(ids),
            positions=tree_positions(tree, self.context, device),
            mask=tree_mask(tree, self.context, self.target.dtype, device),
        )
        chosen = self.sampling.pick_each(self.sampling.weights(logits), self.generator).tolist()
        path, bonus = follow(tree, chosen)
        added = self._commit([*(tree.tokens[node] for node in path), bonus])
        rows = [0, *(node + 1 for node in path)][:added]  # anchor and nodes before the last committed token
        keep_rows(self.cache, self.context, rows)
        self._keep_states(features[rows])
        return added

    def _keep_states(self, features: Tensor) -> None:
        if self.drafter is not None:
            self.waiting.append(features)

    def _draft_logits(self, slots: int) -> Tensor:
        assert self.drafter is not None  # only with one are there slots
        started = time.perf_counter()
        self.take_in()
        logits = self.drafter.logits(self.result.tokens[-1], slots)
        self.result.drafting_seconds += time.perf_counter() - started
        return logits

    def _draft(self, slots: int) -> tuple[Tensor, Tensor | None]:
        """Drafted ids `[slots]` and the distributions `[slots, V]` they are from (None when greedy)."""
        if slots == 0:
            return torch.zeros(0, dtype=torch.int64, device=self.target.device), None
        proposed = self.sampling.weights(self._draft_logits(slots))
        drafts = self.sampling.pick_each(proposed, self.generator)
        return drafts, None if self.sampling.greedy else proposed

    def _verify(self, drafts: Tensor, proposed: Tensor | None, wanted: Tensor) -> tuple[int, int]:
        """How many drafts are kept, and the target's own token behind them; `wanted` is `[slots + 1, V]`."""
        if proposed is not None:
            return reject(drafts, proposed, wanted, self.generator)
        if not self.sampling.greedy:
            return 0, self.sampling.pick(wanted[0], self.generator)
        expected = wanted.argmax(dim=-1)
        kept = accept_length(drafts, expected[:-1])
        return kept, int(expected[kept])

    def _commit(self, tokens: list[int]) -> int:
        """Append tokens up to a stop token or the length limit; returns how many were taken."""
        for count, token in enumerate(tokens, start=1):
            self.result.tokens.append(token)
            stopped = token in self.target.stop_tokens and not self.config.ignore_stop
            if stopped or len(self.result.tokens) >= self.config.max_new_tokens:
                self.finished = True
                return count
        return len(tokens)
