"""A tiny byte-level tokenizer, and chat templates written from the published behaviour of real families."""
# ruff: noqa: RUF001, E501 - templates and special tokens as published

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    """One template family."""

    template: str
    special: tuple[str, ...]
    eos: str
    end: str
    """Token that ends an assistant turn in the middle of a conversation."""
    last_end: str
    """Token that ends the last one."""
    bos: str | None = None
    system: bool = True


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# The system text goes into the last user turn, which is why it has no exact mask over several turns.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}{% for message in turns %}"
    "{% if message['role'] == 'user' %}{% if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)

DEEPSEEK_R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% else %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

# Thinking is shown in the last turn only, where a turn without any gets an empty block.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% set content = message['content'] %}{% set reasoning = '' %}"
    "{% if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ content }}{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The last turn ends with <|return|>, earlier ones with <|end|>; thinking is shown in the last turn only.
HARMONY = (
    "{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% if loop.last and message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_IM = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(SMOLLM2, _IM, "<|im_end|>", "<|im_end|>", "<|im_end|>"),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|eot_id|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "gemma": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<end_of_turn>",
        "<end_of_turn>",
        "<bos>",
        system=False,
    ),
    "mistral": Family(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", "</s>", "<s>", system=False
    ),
    "deepseek-r1": Family(
        DEEPSEEK_R1,
        (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
        ),
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
    ),
    "qwen3": Family(QWEN3, (*_IM, "<think>", "</think>"), "<|im_end|>", "<|im_end|>", "<|im_end|>"),
    "gpt-oss": Family(
        HARMONY,
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
        "<|return|>",
        "<|end|>",
        "<|return|>",
    ),
    "generation": Family(GENERATION, _IM, "<|im_end|>", "<|im_end|>", "<|im_end|>"),
}
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("t", "h")]


def build_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 270 tokens, some of several bytes, with the family's special tokens."""
    vocab = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for one, other in _MERGES:
        vocab.setdefault(one + other, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in family.special])
    names = {"eos_token": family.eos} | ({"bos_token": family.bos} if family.bos else {})
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=family.template, clean_up_tokenization_spaces=False, **names
    )


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **fields}


def dialogue(*texts: str) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    return [turn(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]


def write_jsonl(path: Path, *rows: Any) -> str:
    """Write rows and return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def supervised_text(tokenizer: Any, ids: Any, mask: Any) -> list[str]:
    """Text of each run of supervised tokens."""
    runs: list[list[int]] = []
    previous = 0
    for token, marked in zip(ids.tolist(), mask.tolist(), strict=True):
        if marked and not previous:
            runs.append([])
        if marked:
            runs[-1].append(token)
        previous = marked
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
