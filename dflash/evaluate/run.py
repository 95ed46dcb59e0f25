"""Decode every prompt plainly and speculatively, in alternating order, so that noise falls on both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from dflash.decode.batched import generate_batch
from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.loop import generate
from dflash.decode.pace import Pace
from dflash.drafter import Drafter
from dflash.errors import CorpusError
from dflash.evaluate.config import THINKING, EvalConfig
from dflash.evaluate.figures import Difference, EvalReport, KindReport
from dflash.evaluate.pair import open_pair
from dflash.extract.prompts import Prompt, load_prompts, selected
from dflash.progress import Progress
from dflash.target import Target


def evaluate(config: EvalConfig) -> EvalReport:
    """Decode every prompt both ways and count.

    Raises:
        CorpusError: no prompts.
        TargetError: the target cannot be loaded.
        CheckpointError: the drafter cannot be loaded or does not fit.
        ConfigError: the target cannot be decoded as asked.
    """
    target, drafter, tokenizer = open_pair(
        config.target, config.drafter, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    found = load_prompts(config.data, tokenizer, template_thinking=THINKING[config.thinking])
    prompts = selected(found, config.per_kind)
    if not prompts:
        raise CorpusError(f"{', '.join(config.data)} holds no prompts")
    report = EvalReport(KindReport(), {}, drafter.config.block_size, greedy=config.temperature == 0)
    decoder = _BothWays(target, drafter, config.decoding())
    with Progress("eval", len(prompts), "prompts") as bar:
        for number, some in enumerate(_chunks(prompts, config.batch_size)):
            for prompt, plain, speculative in decoder.run(some, plain_first=number % 2 == 0):
                found_difference = decoder.difference(prompt, plain, speculative) if report.greedy else None
                for part in report.parts(prompt):
                    part.add(plain, speculative)
                    part.differences += [found_difference] if found_difference else []
            bar.advance(len(some), report.total.summary())
    return report


def _chunks(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for first, end in pairwise([*range(0, len(prompts), size), len(prompts)]):
        yield prompts[first:end]


class _BothWays:
    """Decodes prompts with and without the drafter."""

    def __init__(self, target: Target, drafter: Drafter, config: DecodeConfig) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        # Costs are those of the machine, so every prompt adds to what is known of them.
        self.pace = Pace(drafter.config.block_size - 1)

    def run(
        self, prompts: Sequence[Prompt], *, plain_first: bool
    ) -> Iterator[tuple[Prompt, Generation, Generation]]:
        """Each prompt, its plain and its speculative output."""
        done: dict[bool, list[Generation]] = {}
        for plain in (plain_first, not plain_first):
            done[plain] = self._decode(prompts, None if plain else self.drafter)
        yield from zip(prompts, done[True], done[False], strict=True)

    def _decode(self, prompts: Sequence[Prompt], drafter: Drafter | None) -> list[Generation]:
        ids = [torch.from_numpy(prompt.input_ids).long() for prompt in prompts]
        if len(ids) > 1:
            return generate_batch(self.target, drafter, ids, replace(self.config, measure_anchors=False))
        return [generate(self.target, drafter, ids[0], self.config, self.pace if drafter else None)]

    def difference(self, prompt: Prompt, plain: Generation, speculative: Generation) -> Difference | None:
        """Where the two part, and how sure the target is there; None when they are equal."""
        pairs = enumerate(zip(plain.tokens, speculative.tokens, strict=False))
        position = next((n for n, (mine, other) in pairs if mine != other), None)
        if position is None:
            return None
        ids = [*prompt.input_ids.tolist(), *plain.tokens[:position]]
        logits, _ = self.target.forward(
            torch.tensor(ids, device=self.target.device), self.target.new_cache(), keep_logits=1
        )
        mine, other = plain.tokens[position], speculative.tokens[position]
        high = float(logits[0, mine])
        resolution = torch.finfo(self.target.dtype).eps * max(abs(high), 1.0)
        gap = high - float(logits[0, other])
        return Difference(prompt.name, position, mine, other, gap, resolution)
