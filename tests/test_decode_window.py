"""Speculative decoding with targets whose layers keep a window of the past, or a state, and not all of it."""

from __future__ import annotations

import pytest
import torch
from overfit import answered, open_target, overfitted, random_prompts
from support import EOS, VOCAB, drafter_config, write_tokenizer
from target_families import write_family
from transformers import MistralConfig, MistralForCausalLM

from dflash.decode.batched import generate_batch
from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.drafter import Drafter
from dflash.errors import ConfigError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("window")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return open_target(folder)


def test_refused_drafts_leave_no_trace_in_the_window(target):
    """Rolling back needs rows that the window has already pushed out: prompts shorter and longer than it."""
    prompts = random_prompts([2, 7, 8, 20])
    drafter = overfitted(target, drafter_config(block_size=6), [answered(target, prompts[0], 30)], steps=40)
    accepted = []
    for prompt in prompts:
        plain = generate(target, None, prompt, DecodeConfig(30))
        drafted = generate(target, drafter, prompt, DecodeConfig(30))
        assert drafted.tokens == plain.tokens
        accepted += drafted.accepted
    assert min(accepted) == 1
    assert max(accepted) > 1


@pytest.fixture(scope="module", params=["qwen3.5", "gemma3", "gpt-oss"])
def stateful(request, tmp_path_factory):
    return open_target(write_family(tmp_path_factory.mktemp("family") / "target", request.param))


def test_a_state_that_cannot_be_cropped_is_put_back(stateful):
    """Linear attention sums up the past: refused drafts must not stay in the sum."""
    stateful.model.generation_config.eos_token_id = None
    config = drafter_config(block_size=6, vocab_size=120, num_target_layers=4, mask_token_id=119)
    prompts = [torch.arange(3, 3 + length) for length in (2, 9, 20)]
    drafter = overfitted(stateful, config, [answered(stateful, prompts[0], 20)], steps=30)
    accepted = []
    for prompt in prompts:
        plain = generate(stateful, None, prompt, DecodeConfig(20))
        drafted = generate(stateful, drafter, prompt, DecodeConfig(20))
        assert drafted.tokens == plain.tokens
        accepted += drafted.accepted
    assert min(accepted) < max(accepted)


def test_trees_and_batches_are_refused_where_the_past_is_not_kept(stateful):
    prompt = torch.arange(3, 9)
    with pytest.raises(ConfigError, match=r"full attention in all layers.*--batch-size 1"):
        generate_batch(stateful, None, [prompt, prompt], DecodeConfig(4))
    config = drafter_config(vocab_size=120, num_target_layers=4, mask_token_id=119)
    with pytest.raises(ConfigError, match=r"full attention in all layers.*--draft block"):
        generate(stateful, Drafter(config), prompt, DecodeConfig(4, draft="tree"))
