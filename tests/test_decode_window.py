"""Speculative decoding with a target whose layers keep a window of the past only."""

from __future__ import annotations

import pytest
import torch
from overfit import answered, open_target, overfitted, random_prompts
from support import EOS, VOCAB, drafter_config, write_tokenizer
from transformers import MistralConfig, MistralForCausalLM

from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate


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
