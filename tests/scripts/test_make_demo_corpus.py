"""The script that makes the demo's conversations: same prompts every time, and answers kept by its rules."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo_documents
import make_demo_corpus as script
from demo_prompts import Family, draw_prompts, load_families
from make_demo_corpus import Answer, Conversation, Kind, Prompt

END = 2
KIND = {kind.name: kind for kind in script.KINDS}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return script.make_prompts()


def test_prompts_are_the_same_every_time_and_other_seeds_give_others(prompts: list[Prompt]) -> None:
    short = load_families("short")
    assert draw_prompts(short, script.SEED) == [p.text for p in prompts if p.kind == "short"]
    assert draw_prompts(short, 1) != draw_prompts(short, 2)
    long_form = draw_prompts(load_families("long-form"), script.SEED)
    assert long_form == [p.text for p in prompts if p.kind == "long-form"]


def test_prompts_and_ids_are_unique_and_more_than_are_wanted(prompts: list[Prompt]) -> None:
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == len(prompts)
    counts = Counter(p.kind for p in prompts)
    assert all(counts[kind.name] > kind.wanted for kind in script.KINDS)


def test_every_slot_is_filled(prompts: list[Prompt]) -> None:
    assert not [p.text for p in prompts if p.kind != "document" and ("{" in p.text or "}" in p.text)]


def test_a_family_hands_out_every_word_before_any_comes_back() -> None:
    words = [f"word{n}" for n in range(30)]
    drawn = draw_prompts([Family(30, ["Say {w}."], {"w": words})], 7)
    assert sorted(drawn) == sorted(f"Say {word}." for word in words)


def test_a_family_asked_for_more_than_it_has_ends_short() -> None:
    assert len(draw_prompts([Family(9, ["Say {w}."], {"w": ["one", "two"]})], 7)) == 2


def test_functions_are_cut_out_whole_and_moved_to_the_left() -> None:
    sources = list(demo_documents.function_sources(["textwrap", "no_such_module"]))
    assert any(text.startswith("def dedent(text):\n    ") for text in sources)
    assert any(text.startswith("def fill(self, text):\n    ") for text in sources)
    for text in sources:
        compile(text, "function", "exec")


def test_sources_name_their_licence() -> None:
    assert "PSF licence" in (demo_documents.__doc__ or "")
    assert "PSF licence" in " ".join(script.README.split())
    assert "Apache-2.0" in script.README


def repeated(run: list[int], count: int) -> list[int]:
    """`run`, `count` times, with a different token between."""
    return [token for n in range(count) for token in [*run, 100 + n]]


def test_a_run_that_comes_back_too_often_is_a_loop_that_starts_at_its_second_place() -> None:
    run = list(range(50, 58))
    assert script.loop_start([1, *repeated(run, 3)[:-1]], []) is None
    assert script.loop_start([1, *repeated(run, 4)[:-1]], []) == 10


def test_a_run_that_the_prompt_holds_as_often_is_a_copy() -> None:
    run = list(range(50, 58))
    assert script.loop_start(repeated(run, 4)[:-1], repeated(run, 4)) is None


@given(st.lists(st.integers(3, 40), min_size=8, max_size=60, unique=True))
def test_an_answer_without_repetition_is_no_loop(tokens: list[int]) -> None:
    assert script.loop_start(tokens, []) is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One two. Three four. Five", "One two. Three four."),
        ('He said "no." Then', 'He said "no."'),
        ("1. Bread\n2. Bu", ""),
        ("All of it ended!", "All of it ended!"),
        ("Here it is.\n```python\nx = 1\n", "Here it is."),
        ("Here it is.\n```python\nx = 1\n```\n", "Here it is.\n```python\nx = 1\n```"),
    ],
)
def test_a_cut_falls_after_a_full_sentence_or_a_closed_block(text: str, kept: str) -> None:
    assert script.cut_at_sentence(text) == kept


class WordTokenizer:
    """One token a word; the ids are those of the words it has met, after three special ones."""

    eos_token_id = END
    added_tokens_decoder = dict.fromkeys((0, 1, END))

    def __init__(self) -> None:
        self.words: list[str] = ["<0>", "<1>", "<2>"]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode(messages[0]["content"])


def judge(text: str, *, finished: bool = True, kind: str = "long-form", **changed: Any) -> Conversation | str:
    tokenizer = WordTokenizer()
    tokens = tokenizer.encode(text) + ([END] if finished else [])
    prompt = Prompt("a", kind, "Tell me.")
    limits = Kind(kind, changed.get("shortest", 10), changed.get("longest", 500), 400, 9, 9)
    return script.accept(tokenizer, prompt, Answer("a", 2, tokens), limits)


LONG = "It was a very long day and nobody came. Then the rain began and we went home."


def test_an_answer_that_ends_by_itself_is_kept_to_the_letter() -> None:
    kept = judge(LONG)
    assert isinstance(kept, Conversation)
    assert (kept.text, kept.cut, kept.tokens) == (LONG, False, 2 + len(LONG.split()) + 2)
    assert [message["role"] for message in kept.row()["messages"]] == ["user", "assistant"]


def test_an_unfinished_answer_is_cut_at_a_sentence_but_a_short_question_is_dropped() -> None:
    text = LONG.removesuffix(" home.")
    kept = judge(text, finished=False)
    assert isinstance(kept, Conversation)
    assert kept.cut
    assert kept.text == "It was a very long day and nobody came."
    assert judge(text, finished=False, kind="short") == "unfinished"


def test_a_looping_answer_is_cut_before_the_loop() -> None:
    kept = judge(f"{LONG} " + " ".join(["And so the years went by, all of them."] * 4), finished=False)
    assert isinstance(kept, Conversation)
    assert kept.text == f"{LONG} And so the years went by, all of them."


def test_what_is_too_short_or_outside_the_span_or_has_special_tokens_is_dropped() -> None:
    assert judge("Yes, it is.") == "too short an answer"
    assert judge(LONG, longest=12) == judge(LONG, shortest=99) == "outside the span"
    assert judge(f"<1> {LONG}") == "special token"


def test_finished_answers_come_first_and_only_as_many_as_are_wanted() -> None:
    kind = Kind("long-form", 1, 99, 9, wanted=3, batch=9)
    cut = [Conversation(Prompt(id_, "long-form", id_), "text", 9, 5, cut=True) for id_ in "ac"]
    whole = [Conversation(Prompt(id_, "long-form", id_), "text", 9, 5, cut=False) for id_ in "bd"]
    assert [chosen.prompt.id for chosen in script.choose([*cut, *whole], kind)] == ["a", "b", "d"]


@given(st.sets(st.text("0123456789abcdef", min_size=16, max_size=16), max_size=60))
def test_a_tenth_is_held_out_whatever_the_order(ids: set[str]) -> None:
    held = script.hold_out(sorted(ids))
    assert held == script.hold_out(sorted(ids, reverse=True))
    assert len(held) == round(len(ids) / 10)
    assert held <= ids


def test_a_torn_last_line_of_the_work_file_is_answered_again(tmp_path: Path) -> None:
    work = tmp_path / "work.jsonl"
    work.write_text('{"id": "a", "prompt_tokens": 3, "tokens": [5, 2]}\n{"id": "b", "pro')
    assert script.read_answers(work) == {"a": Answer("a", 3, [5, 2])}


@pytest.fixture(scope="module")
def target() -> script.Target:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    made = script.Target.__new__(script.Target)
    made.model, made.end = LlamaForCausalLM(config).eval(), END
    return made


def test_a_batch_of_padded_prompts_is_answered_as_each_alone_is(target: script.Target) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 40, (length,), generator=generator).tolist() for length in (3, 9, 5, 14, 1)]
    together = target.answer(prompts, 40)
    assert together == [target.answer([prompt], 40)[0] for prompt in prompts]
    for prompt, answer in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.inference_mode():
            greedy = target.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert greedy.tolist() == answer
        assert END not in answer[:-1]
