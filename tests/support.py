"""Small real things to test with: a random target with a tokenizer, and a cache filled from it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.cache.manifest import TARGET_CONFIG_NAME, Identity, Manifest, create_cache
from dflash.cache.parts import record_parts
from dflash.cache.writer import CacheWriter, Sample, finalize
from dflash.drafter import DrafterConfig
from dflash.files import publish_json
from dflash.head import HEAD_NAME, HeadFacts, TargetHead

if TYPE_CHECKING:
    from pathlib import Path

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>")
VOCAB = 256 + len(SPECIAL)
EOS, MASK = 2, 3


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with ChatML tokens: ids 0..3 special, then one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_target(
    folder: Path, *, layers: int = 6, hidden: int = 32, tied: bool = True, seed: int = 0
) -> Path:
    """A random Llama of that depth and width, with its tokenizer, as a Transformers folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def drafter_config(**changes: Any) -> DrafterConfig:
    """A drafter for `write_target`'s default model."""
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return DrafterConfig(**(values | changes))


def write_cache(
    folder: Path,
    lengths: list[int] | list[Sample],
    *,
    edges: tuple[int, ...] = (16, 32, 64),
    hidden: int = 32,
    seed: int = 0,
    dtype: str = "bfloat16",
    taps: tuple[int, ...] = (1, 3),
    head: TargetHead | None = None,
) -> Path:
    """A complete cache of random samples of these lengths, taps 1 and 3, the last two thirds supervised.

    Or of these samples, whose hidden states must be of `dtype` and of these `taps`. The head is random too,
    unless it is given.
    """
    rng = np.random.default_rng(seed)
    identity = Identity(
        target="tiny",
        revision=None,
        config_digest="c" * 64,
        weights_digest="d" * 64,
        tokenizer_digest="e" * 64,
        template_digest="f" * 64,
        taps=taps,
        num_target_layers=6,
        hidden_size=hidden,
        vocab_size=VOCAB,
        dtype=dtype,
        codec="raw",
        bucket_edges=edges,
        max_length=edges[-1],
        corpus_digest="a" * 64,
    )
    manifest = create_cache(folder, Manifest(identity, len(lengths)))
    table = torch.from_numpy(rng.normal(size=(VOCAB, hidden)).astype(np.float32)).bfloat16()
    head = head or TargetHead(table, table, torch.ones(hidden).bfloat16(), HeadFacts())
    head.save(folder / HEAD_NAME)
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    publish_json(folder / TARGET_CONFIG_NAME, {"config": config, "mask_token_id": MASK})
    with CacheWriter(folder, manifest, "w0") as writer:
        for number, given in enumerate(lengths, start=1):
            writer.write(given if isinstance(given, Sample) else random_sample(rng, number, given, hidden))
    record_parts(folder, manifest)
    finalize(folder)
    return folder


def random_sample(rng: np.random.Generator, number: int, length: int, hidden: int = 32) -> Sample:
    """A sample of random tokens and states."""
    mask = (np.arange(length) >= length // 3).astype(np.uint8)
    ids = rng.integers(4, VOCAB, length).astype(np.int32)
    states = torch.from_numpy(rng.normal(size=(length, 2, hidden)).astype(np.float32)).bfloat16()
    return Sample(number, ids, mask, states)
