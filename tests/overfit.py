"""A drafter that has learnt some of a tiny target's own greedy answers, so that acceptance varies."""

from __future__ import annotations

import numpy as np
import torch
from support import VOCAB

from dflash.cache.writer import Sample
from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.drafter import Drafter, DrafterConfig, init_weights
from dflash.target import Target
from dflash.train.batches import BlockShape, Document, pack
from dflash.train.objective import DraftingLoss, ObjectiveConfig


def open_target(folder, taps: tuple[int, ...] = (1, 3), dtype: torch.dtype = torch.float32) -> Target:
    """The target in this folder, on the CPU."""
    return Target(str(folder), taps, dtype=dtype, device=torch.device("cpu"))


def random_prompts(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Prompts of byte tokens, int64 `[T]` each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (length,), generator=generator) for length in lengths]


def answered(target: Target, prompt: torch.Tensor, tokens: int) -> Sample:
    """The prompt with the target's greedy answer behind it, and the states of both."""
    answer = generate(target, None, prompt, DecodeConfig(tokens)).tokens
    ids = torch.cat([prompt, torch.tensor(answer)])
    _, features = target.forward(ids, target.new_cache(), keep_logits=1)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
    states = features.clone().unflatten(1, (len(target.taps), -1))  # [T, K*H] -> [T, K, H]
    return Sample(1, ids.numpy().astype(np.int32), mask, states)


def overfitted(
    target: Target, config: DrafterConfig, samples: list[Sample], steps: int, lr: float = 3e-3
) -> Drafter:
    """A drafter trained for so many steps on every anchor of these samples at once; float32."""
    drafter = Drafter(config)
    init_weights(drafter, seed=1)
    documents = [Document(sample, np.flatnonzero(sample.loss_mask)[:-1], 0) for sample in samples]
    batch = pack(documents, BlockShape(config.block_size, config.mask_token_id))
    loss = DraftingLoss(drafter, target.head, ObjectiveConfig(config.block_size), buckets=1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for _ in range(steps):
        sums = loss(batch)
        (sums.loss / sums.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval().requires_grad_(False)
