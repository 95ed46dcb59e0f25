"""Several sequences at once, for throughput: one drafting pass and one verification pass a cycle for all.

Sequences keep different numbers of drafts, so the target's cache gets gaps: a row that is not part of its
sequence is masked out, and positions are counted without it. When more than half of the cache is gaps, what
counts is moved together. Greedy output of each sequence is what it would be alone.

Dimensions: R sequences, B slots a block, K taps, H hidden size, V vocabulary rows, T positions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.attention import BlockLayout, KeyValue
from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.drafting import check_fit
from dflash.decode.sampling import Sampling, accept_length, reject
from dflash.drafter import Drafter
from dflash.errors import ConfigError
from dflash.grouped import grouped_attention
from dflash.smallrows import use_small_rows
from dflash.target import Target

SPARE_ROWS = 64
"""Gaps that are not worth moving the cache for."""


def generate_batch(
    target: Target, drafter: Drafter | None, prompts: Sequence[Tensor], config: DecodeConfig
) -> list[Generation]:
    """Decode behind several prompts together; sampling is seeded with `seed + i` for prompt i.

    Args:
        target: The whole target, tapped as the drafter wants.
        drafter: On the target's device, or None for plain decoding.
        prompts: Token ids `[T_i]`, T_i >= 1.
        config: Length and sampling.

    Raises:
        CheckpointError: the drafter does not fit the target.
        ConfigError: a prompt is empty, the target keeps a window or a state, or `config` asks for more than
            plain blocks.
    """
    if drafter is not None:
        check_fit(drafter, target)
    if not all(prompt.numel() for prompt in prompts):
        raise ConfigError("a prompt is empty; give at least one token")
    if config.draft != "block" or config.adaptive or config.measure_anchors:
        raise ConfigError("batches are decoded with plain blocks; use --batch-size 1 for trees and pacing")
    batch = _Batch(target, drafter, config)
    batch.prefill(prompts)
    started = time.perf_counter()
    while batch.active:
        batch.cycle()
    for result in batch.results:
        result.seconds = (time.perf_counter() - started) / len(prompts)
    return batch.results


class BatchDrafter:
    """A drafter at work on several sequences.

    Args:
        drafter: The network.
        target: Lends its embedding and `lm_head`.
        rows: R.
    """

    def __init__(self, drafter: Drafter, target: Target, rows: int) -> None:
        self.drafter, self.head, self.device = drafter, target.head, target.device
        use_small_rows(drafter)
        self.dtype = next(drafter.parameters()).dtype
        self.lengths = [0] * rows
        self._context: list[list[KeyValue]] = [[] for _ in range(rows)]  # by sequence, then layer

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], features: Sequence[Tensor]) -> None:
        """Append the tapped states `[T_i, K*H]` of the next tokens of each of these sequences."""
        counts = [len(part) for part in features]
        positions = [
            torch.arange(self.lengths[row], self.lengths[row] + count, device=self.device)
            for row, count in zip(rows, counts, strict=True)
        ]
        new = self.drafter.context_key_values(torch.cat(list(features)).to(self.dtype), torch.cat(positions))
        split = [zip(*(torch.split(part, counts) for part in layer), strict=True) for layer in new]
        for row, count, *layers in zip(rows, counts, *split, strict=True):
            added = [KeyValue(*layer) for layer in layers]
            before = self._context[row]
            self._context[row] = (
                [_joined(*pair) for pair in zip(before, added, strict=True)] if before else added
            )
            self.lengths[row] += count

    @torch.inference_mode()
    def logits(self, rows: Sequence[int], anchors: Sequence[int], slots: int) -> Tensor:
        """Logits `[R, slots, V]` for the tokens behind the anchor of each of these sequences."""
        config = self.drafter.config
        ids = torch.full((len(rows), config.block_size), config.mask_token_id, device=self.device)
        ids[:, 0] = torch.tensor(anchors, device=self.device)
        lengths = torch.tensor([self.lengths[row] for row in rows], device=self.device)
        positions = lengths[:, None] + torch.arange(config.block_size, device=self.device)
        ends = lengths.cumsum(0)
        layout = BlockLayout.build((ends - lengths).tolist(), ends.tolist(), self.device)
        layers = zip(*(self._context[row] for row in rows), strict=True)
        context = [
            KeyValue(torch.cat([c.key for c in layer]), torch.cat([c.value for c in layer]))
            for layer in layers
        ]
        blocks = self.head.embed(ids).to(self.dtype)
        hidden = self.drafter.denoise(blocks, positions, context, layout, grouped_attention)
        # [R, B, H] -> the slots that are drafted -> [R, slots, V]
        return self.head.logits(hidden[:, 1 : 1 + slots].to(self.head.lm_head.dtype))


def _joined(before: KeyValue, added: KeyValue) -> KeyValue:
    return KeyValue(torch.cat([before.key, added.key]), torch.cat([before.value, added.value]))


class _Batch:
    """Sequences being decoded together; a finished one leaves the target's cache."""

    def __init__(self, target: Target, drafter: Drafter | None, config: DecodeConfig) -> None:
        self.target, self.network, self.config = target, drafter, config
        self.sampling = Sampling.of(config)
        self.cache = target.new_cache()
        _check_batch_target(self.cache)

    def prefill(self, prompts: Sequence[Tensor]) -> None:
        """Run the prompts, padded on the left, and pick each sequence's first token."""
        device, count = self.target.device, len(prompts)
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(count, longest, dtype=torch.int64, device=device)
        self.counts = torch.zeros(count, longest, dtype=torch.bool, device=device)  # what the cache holds
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt.to(device)
            self.counts[row, longest - len(prompt) :] = True
        self.results = [Generation([], target_passes=1) for _ in prompts]
        self.generators = [
            torch.Generator(device=device).manual_seed(self.config.seed + row) for row in range(count)
        ]
        self.drafter = BatchDrafter(self.network, self.target, count) if self.network else None
        self.active = list(range(count))
        positions = (self.counts.long().cumsum(dim=1) - 1).clamp_min(0)
        logits, features = self.target.forward_rows(
            ids, self.cache, keep_logits=1, positions=positions, mask=self.counts.long()
        )
        if self.drafter is not None:
            self.drafter.extend(self.active, [features[row][self.counts[row]] for row in self.active])
        weights = self.sampling.weights(logits[:, -1])
        going = [self._commit(row, [self._pick(row, weights[row])])[1] for row in self.active]
        self._leave(going)

    def cycle(self) -> None:
        """One draft and one verification for all sequences that go on."""
        started = time.perf_counter()
        rooms = [self.config.max_new_tokens - len(self.results[row].tokens) for row in self.active]
        anchors = [self.results[row].tokens[-1] for row in self.active]
        slots = min(self.network.config.block_size, max(rooms)) - 1 if self.network else 0
        drafts, proposed = self._draft(anchors, slots)
        drafting = (time.perf_counter() - started) / len(self.results)
        logits, features = self._verify_pass(torch.cat([drafts.new_tensor(anchors)[:, None], drafts], dim=1))
        weights = self.sampling.weights(logits)
        outcomes = []
        for place, row in enumerate(self.active):
            q = None if proposed is None else proposed[place]
            kept, bonus = self._verify(row, drafts[place], q, weights[place])
            outcomes.append(self._commit(row, [*drafts[place, :kept].tolist(), bonus]))
            self.results[row].accepted.append(outcomes[-1][0])
            self.results[row].target_passes += 1
        for result in self.results:
            result.drafting_seconds += drafting
        self._settle([added for added, _ in outcomes], features)
        self._leave([going for _, going in outcomes])

    def _draft(self, anchors: list[int], slots: int) -> tuple[Tensor, Tensor | None]:
        """Drafted ids `[R, slots]` and the distributions `[R, slots, V]` they are from (None when greedy)."""
        if self.drafter is None or slots == 0:
            empty = torch.zeros(len(anchors), 0, dtype=torch.int64, device=self.target.device)
            return empty, None
        proposed = self.sampling.weights(self.drafter.logits(self.active, anchors, slots))
        if self.sampling.greedy:
            return proposed.argmax(dim=-1), None
        drawn = [
            self.sampling.pick_each(proposed[place], self.generators[row])
            for place, row in enumerate(self.active)
        ]
        return torch.stack(drawn), proposed

    def _verify_pass(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[R, 1 + slots, V]` and states `[R, 1 + slots, K*H]` behind anchors and drafts."""
        first = self.counts.sum(dim=1, keepdim=True)
        positions = first + torch.arange(ids.shape[1], device=ids.device)
        mask = torch.cat([self.counts, torch.ones_like(ids, dtype=torch.bool)], dim=1)
        return self.target.forward_rows(
            ids, self.cache, keep_logits=ids.shape[1], positions=positions, mask=mask.long()
        )

    def _verify(self, row: int, drafts: Tensor, proposed: Tensor | None, wanted: Tensor) -> tuple[int, int]:
        """How many drafts of one sequence are kept, and the target's own token behind them."""
        # A sequence that is nearly full cannot use more than its room: the rest is cut off by `_commit`.
        if proposed is not None and len(drafts):
            return reject(drafts, proposed, wanted, self.generators[row])
        if not self.sampling.greedy:
            return 0, self._pick(row, wanted[0])
        expected = wanted.argmax(dim=-1)
        kept = accept_length(drafts, expected[:-1])
        return kept, int(expected[kept])

    def _pick(self, row: int, weights: Tensor) -> int:
        return self.sampling.pick(weights, self.generators[row])

    def _commit(self, row: int, tokens: list[int]) -> tuple[int, bool]:
        """Append tokens up to a stop token or the limit: how many, and whether the sequence goes on."""
        result = self.results[row]
        for count, token in enumerate(tokens, start=1):
            result.tokens.append(token)
            stopped = token in self.target.stop_tokens and not self.config.ignore_stop
            if stopped or len(result.tokens) >= self.config.max_new_tokens:
                return count, False
        return len(tokens), True

    def _settle(self, added: list[int], features: Tensor) -> None:
        """Count the rows that became part of their sequences, and give the drafter their states."""
        new = torch.arange(features.shape[1], device=features.device)
        kept = new < torch.tensor(added, device=features.device)[:, None]
        self.counts = torch.cat([self.counts, kept], dim=1)
        if self.drafter is not None:
            parts = [features[place, :count] for place, count in enumerate(added)]
            self.drafter.extend(self.active, parts)

    def _leave(self, going: list[bool]) -> None:
        """Drop finished sequences, and move the cache together where most of it is gaps."""
        if not all(going):
            index = torch.tensor(going, device=self.counts.device).nonzero()[:, 0]
            self.cache.batch_select_indices(index)
            self.counts = self.counts[index]
            self.active = [row for row, goes in zip(self.active, going, strict=True) if goes]
        if self.active and self.counts.shape[1] > 2 * int(self.counts.sum(dim=1).max()) + SPARE_ROWS:
            self.counts = compact(self.cache, self.counts)


def compact(cache: Any, counts: Tensor) -> Tensor:
    """Move what counts of each sequence to the end of the cache, in order, and cut off the rest.

    Args:
        cache: Keys and values `[R, g, T, d]` a layer.
        counts: bool `[R, T]`.

    Returns:
        bool `[R, T']`, T' being the longest sequence.
    """
    longest = int(counts.sum(dim=1).max())
    # A stable sort puts gaps first and keeps the order of the rest.
    order = counts.long().argsort(dim=1, stable=True)[:, -longest:]  # [R, T']
    for layer in cache.layers:
        index = order[:, None, :, None].to(layer.keys.device)
        layer.keys = layer.keys.gather(2, index.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
        layer.values = layer.values.gather(
            2, index.expand(-1, layer.values.shape[1], -1, layer.values.shape[3])
        )
    return counts.gather(1, order)


def _check_batch_target(cache: Any) -> None:
    kinds = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer"}
    if kinds:
        raise ConfigError(
            f"batches need full attention in all layers; this target has {', '.join(sorted(kinds))}; "
            "use --batch-size 1"
        )
