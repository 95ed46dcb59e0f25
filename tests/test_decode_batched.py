"""Several sequences at once: each comes out as if it were alone."""

from __future__ import annotations

import pytest
import torch
from overfit import answered, open_target, overfitted, random_prompts
from support import EOS, drafter_config, write_target
from transformers import DynamicCache

from dflash.decode.batched import compact, generate_batch
from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.errors import ConfigError

LENGTHS = [5, 1, 14, 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def learnt(target, prompts):
    """A drafter that is often right on two of the prompts and hardly ever on the others."""
    return overfitted(target, drafter_config(), [answered(target, p, 24) for p in prompts[::2]], steps=40)


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_each_sequence_comes_out_as_if_it_were_alone(target, prompts, learnt, drafted, tokens):
    drafter = learnt if drafted else None
    together = generate_batch(target, drafter, prompts, DecodeConfig(tokens))
    alone = [generate(target, drafter, prompt, DecodeConfig(tokens)) for prompt in prompts]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [sum(r.accepted) for r in together] == [len(r.tokens) - 1 for r in together]
    if drafted and tokens == 24:
        assert len({tuple(result.accepted) for result in together}) > 1


def test_a_sequence_that_stops_leaves_the_others_alone(target, prompts, learnt, monkeypatch):
    whole = [generate(target, None, prompt, DecodeConfig(24)).tokens for prompt in prompts]
    stop = whole[0][6]  # stops the first early
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", [EOS, stop])
    together = generate_batch(target, learnt, prompts, DecodeConfig(24))
    alone = [generate(target, None, prompt, DecodeConfig(24)).tokens for prompt in prompts]
    assert [result.tokens for result in together] == alone
    assert len(alone[0]) < 24


def test_moving_the_cache_together_changes_nothing(target, prompts, learnt, monkeypatch):
    monkeypatch.setattr("dflash.decode.batched.SPARE_ROWS", -(10**6))  # after every cycle
    together = generate_batch(target, learnt, prompts, DecodeConfig(24))
    alone = [generate(target, None, prompt, DecodeConfig(24)).tokens for prompt in prompts]
    assert [result.tokens for result in together] == alone


def test_only_gaps_are_cut_out_and_order_is_kept():
    cache = DynamicCache()
    rows = torch.arange(2 * 5, dtype=torch.float32).view(2, 1, 5, 1)
    cache.update(rows, -rows, 0)
    counts = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]], dtype=torch.bool)
    left = compact(cache, counts)
    assert left.tolist() == [[True] * 3, [False, True, True]]
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [0, 2, 3]
    assert cache.layers[0].keys[1, 0, 1:, 0].tolist() == [7, 9]
    assert torch.equal(cache.layers[0].values, -cache.layers[0].keys)


def test_sampling_draws_the_same_whoever_is_beside(target, prompts):
    """Without a drafter each sequence has a generator of its own, so neighbours do not matter."""
    config = DecodeConfig(12, temperature=1.0, seed=3, top_k=20)
    together = generate_batch(target, None, prompts[:2], config)
    assert together[0].tokens == generate(target, None, prompts[0], config).tokens
    other = generate_batch(target, None, [prompts[0], prompts[3], prompts[2]], config)
    assert other[0].tokens == together[0].tokens


@pytest.mark.parametrize("change", [{"draft": "tree"}, {"adaptive": True}])
def test_what_batches_cannot_do_is_refused(target, prompts, learnt, change):
    with pytest.raises(ConfigError, match="--batch-size 1"):
        generate_batch(target, learnt, prompts, DecodeConfig(8, **change))


def test_an_empty_prompt_is_refused(target, prompts):
    with pytest.raises(ConfigError, match="a prompt is empty"):
        generate_batch(target, None, [prompts[0], prompts[0][:0]], DecodeConfig(8))
