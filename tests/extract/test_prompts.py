"""Prompts for evaluation are what a server would be asked, with the data's answer beside them."""

from __future__ import annotations

import pytest
from chat_families import FAMILIES, build_tokenizer, dialogue, turn, write_jsonl

from dflash.errors import CorpusError
from dflash.extract.prompts import load_prompts


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_what_the_template_asks_with_its_generation_prompt(tmp_path, name):
    family = FAMILIES[name]
    tokenizer = build_tokenizer(family)
    row = {"messages": dialogue("hi", "hello", "and?", "yes"), "kind": "chat", "id": 7}
    (prompt,) = load_prompts([write_jsonl(tmp_path / "a.jsonl", row)], tokenizer)
    if name != "gpt-oss":  # its template asks for the date
        served = tokenizer.apply_chat_template(
            row["messages"][:3], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        assert prompt.input_ids.tolist() == served["input_ids"]
    assert tokenizer.decode(prompt.reference_ids).endswith(f"yes{family.last_end}")
    assert "hello" not in tokenizer.decode(prompt.reference_ids)
    assert (prompt.kind, prompt.name) == ("chat", "7")


def test_a_question_without_answer_has_an_empty_reference(tmp_path):
    tokenizer = build_tokenizer(FAMILIES["chatml"])
    data = write_jsonl(tmp_path / "a.jsonl", {"prompt": "hi"}, {"messages": dialogue("hi")})
    first, second = load_prompts([data], tokenizer)
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert first.reference_ids.size == 0
    assert first.kind is None
    assert first.name.endswith("a.jsonl, line 1")


def test_tokens_are_split_at_the_first_supervised_one(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]})
    (prompt,) = load_prompts([data], build_tokenizer(FAMILIES["chatml"]))
    assert (prompt.input_ids.tolist(), prompt.reference_ids.tolist()) == ([1, 2], [3, 4])


def test_rows_that_ask_nothing_are_left_out(tmp_path):
    tokenizer = build_tokenizer(FAMILIES["chatml"])
    silent = [{"messages": [turn("system", "x")]}, {"input_ids": [1, 2], "loss_mask": [1, 1]}]
    data = write_jsonl(tmp_path / "a.jsonl", *silent, {"prompt": "hi"})
    assert len(load_prompts([data], tokenizer)) == 1
    with pytest.raises(CorpusError, match="no row has a user turn"):
        load_prompts([write_jsonl(tmp_path / "b.jsonl", *silent)], tokenizer)


def test_plain_text_is_no_prompt(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", {"text": "once"})
    with pytest.raises(CorpusError, match="line 1: plain text has no prompt"):
        load_prompts([data], build_tokenizer(FAMILIES["chatml"]))
