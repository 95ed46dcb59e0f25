"""How much is drafted: as much as pays, and nothing where nothing does."""

from __future__ import annotations

import pytest
import torch
from overfit import answered, open_target, overfitted, random_prompts
from support import drafter_config, write_target

from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.decode.pace import LONGEST_PAUSE, Pace

SLOTS = 7


def paced(pace: Pace, cycles: int, *, chances: list[float], cost) -> list[int]:
    """Drafts of each cycle where draft k is right with these chances and a cycle of n costs `cost(n)`."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(cycles):
        drafted = pace.choose()
        right = (torch.rand(SLOTS, generator=generator) < torch.tensor(chances)).long()
        kept = int(right[:drafted].cumprod(0).sum())
        pace.record(drafted, kept, cost(drafted))
        chosen.append(drafted)
    return chosen


def linear(drafting: float, each: float):
    return lambda n: 1.0 + (drafting if n else 0.0) + each * n


def test_everything_is_drafted_where_drafts_are_right_and_cheap():
    chosen = paced(Pace(SLOTS), 200, chances=[0.95] * SLOTS, cost=linear(0.2, 0.02))
    assert chosen[50:].count(SLOTS) > 130


def test_drafting_pauses_where_it_does_not_pay():
    chosen = paced(Pace(SLOTS), 1000, chances=[0.1] * SLOTS, cost=linear(0.6, 0.2))
    assert sum(n > 0 for n in chosen) < 30
    assert chosen[-LONGEST_PAUSE - 1 :].count(0) >= LONGEST_PAUSE


def test_few_tokens_are_drafted_where_only_the_first_are_right():
    chosen = paced(Pace(SLOTS), 300, chances=[0.9, 0.9, 0.02, *[0.02] * 4], cost=linear(0.1, 0.15))
    late = chosen[100:]
    assert sum(n in (1, 2, 3) for n in late) > 0.9 * len(late)


def test_a_pause_ends_when_drafts_get_better():
    pace = Pace(SLOTS)
    paced(pace, 300, chances=[0.05] * SLOTS, cost=linear(0.6, 0.1))
    chosen = paced(pace, 600, chances=[0.95] * SLOTS, cost=linear(0.6, 0.1))
    assert sum(n > 0 for n in chosen[300:]) > 250


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("drafting", "each"), [(0.05, 0.02), (0.3, 0.1), (1.0, 0.3)])
def test_it_is_never_much_slower_than_plain_decoding(chance, drafting, each):
    """Simulated seconds for the same tokens, exploration included."""
    cost, pace, generator = linear(drafting, each), Pace(SLOTS), torch.Generator().manual_seed(1)
    tokens = seconds = 0.0
    while tokens < 400:
        drafted = pace.choose()
        right = (torch.rand(SLOTS, generator=generator) < chance).long()
        kept = int(right[:drafted].cumprod(0).sum())
        pace.record(drafted, kept, cost(drafted))
        tokens, seconds = tokens + kept + 1, seconds + cost(drafted)
    assert tokens / seconds > 0.93


def test_whatever_is_drafted_output_is_that_of_plain_decoding(tmp_path):
    target = open_target(write_target(tmp_path / "target"))
    prompts = random_prompts([5, 1, 14])
    learnt = overfitted(target, drafter_config(), [answered(target, p, 24) for p in prompts[:2]], steps=25)
    pace = Pace(learnt.config.block_size - 1)
    passes = 0
    for prompt in prompts * 2:
        plain = generate(target, None, prompt, DecodeConfig(40))
        drafted = generate(
            target, learnt, prompt, DecodeConfig(40, adaptive=True, measure_anchors=True), pace
        )
        assert drafted.tokens == plain.tokens
        assert len(drafted.anchor_accepted) == len(drafted.tokens) - 1
        passes += len(drafted.accepted)
    assert passes > 0
