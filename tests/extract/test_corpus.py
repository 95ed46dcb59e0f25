"""A corpus is cut, counted, numbered and kept the same way whatever reads it."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from chat_families import FAMILIES, build_tokenizer, dialogue, supervised_text, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import ConfigError, CorpusError
from dflash.extract import corpus as corpus_module
from dflash.extract.corpus import CorpusConfig, cut, load_corpus, sample_id
from dflash.extract.token_store import token_store

tokenizer_of = cache(build_tokenizer)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))


@pytest.fixture
def tokenizer():
    return tokenizer_of(FAMILIES["chatml"])


def rows(count):
    return [
        {"messages": dialogue(f"question {n}", f"answer {n} " * (1 + n % 5)), "kind": "ab"[n % 2], "id": n}
        for n in range(count)
    ]


def load(data, tokenizer, **options):
    return load_corpus(CorpusConfig((data,), **options), tokenizer, show=False)


def same(one, other):
    arrays = all(
        np.array_equal(getattr(one, n), getattr(other, n)) for n in ("tokens", "mask", "offsets", "ids")
    )
    return arrays and [getattr(one, n) for n in ("kinds", "names", "dropped", "digest")] == [
        getattr(other, n) for n in ("kinds", "names", "dropped", "digest")
    ]


def test_examples_are_views_with_kind_and_name(tmp_path, tokenizer):
    corpus = load(write_jsonl(tmp_path / "a.jsonl", *rows(4)), tokenizer)
    assert len(corpus) == 4
    assert corpus.lengths.tolist() == [len(corpus.example(n).input_ids) for n in range(4)]
    example = corpus.example(3)
    assert (example.kind, example.name) == ("b", "3")
    assert (example.input_ids.dtype, example.loss_mask.dtype) == (np.int32, np.uint8)
    assert supervised_text(tokenizer, example.input_ids, example.loss_mask) == [
        "answer 3 " * 4 + "<|im_end|>"
    ]
    assert example.id == sample_id(example.input_ids, example.loss_mask) == int(corpus.ids[3])


def test_rows_without_kind_and_name_have_none(tmp_path, tokenizer):
    example = load(write_jsonl(tmp_path / "a.jsonl", {"text": "once"}), tokenizer).example(0)
    assert (example.kind, example.name) == (None, None)


def test_nothing_follows_the_last_supervised_token(tmp_path, tokenizer):
    conversation = dialogue("hi", "hello", "a question that nobody answers")
    example = load(write_jsonl(tmp_path / "a.jsonl", {"messages": conversation}), tokenizer).example(0)
    assert example.loss_mask[-1] == 1
    assert tokenizer.decode(example.input_ids).endswith("hello<|im_end|>")


@given(st.lists(st.integers(0, 1), max_size=40), st.integers(2, 50))
def test_cutting_keeps_every_supervised_token_below_the_limit(mask, limit):
    ids = np.arange(len(mask), dtype=np.int32)
    kept, kept_mask = cut(ids, np.asarray(mask, dtype=np.uint8), limit)
    assert kept.tolist() == list(range(len(kept)))
    assert len(kept) <= limit
    assert kept_mask.sum() == sum(mask[:limit])
    assert not len(kept) or kept_mask[-1] == 1


def test_every_drop_is_counted_by_its_reason(tmp_path, tokenizer):
    whole = {"messages": dialogue("hi", "hello")}
    data = write_jsonl(
        tmp_path / "a.jsonl",
        whole,
        whole,
        {"messages": dialogue("hi")},
        {"prompt": "nobody answers"},
        {"messages": dialogue("hi", "")},
        {"messages": dialogue("a long question " * 50, "too late")},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"text": "h"},
    )
    corpus = load(data, tokenizer, max_length=200)
    assert len(corpus) == 1
    assert corpus.dropped == {"duplicate": 1, "no_assistant_turn": 2, "not_text": 1, "too_few_supervised": 3}
    assert len(load(data, tokenizer, max_length=200, min_supervised=1)) == 3


def test_same_tokens_with_another_mask_are_no_duplicate(tmp_path, tokenizer):
    pair = [{"input_ids": [5, 6, 7], "loss_mask": mask} for mask in ([0, 1, 1], [1, 1, 1])]
    corpus = load(write_jsonl(tmp_path / "a.jsonl", *pair, *pair), tokenizer)
    assert len(set(corpus.ids.tolist())) == len(corpus) == 2
    assert corpus.dropped == {"duplicate": 2}


def test_samples_that_share_an_id_get_two(tmp_path, tokenizer, monkeypatch):
    """64 bits may collide in a large corpus; then the later sample gets another number and is not lost."""
    monkeypatch.setattr(corpus_module, "sample_id", lambda ids, mask, occurrence: 7 + occurrence)
    corpus = load(write_jsonl(tmp_path / "a.jsonl", *rows(3), rows(1)[0]), tokenizer)
    assert corpus.ids.tolist() == [7, 8, 9]
    assert corpus.dropped == {"duplicate": 1}


def test_nothing_left_says_what_happened_to_the_rows(tmp_path):
    data = write_jsonl(tmp_path / "a.jsonl", {"messages": dialogue("hi")}, {"messages": dialogue("hi")})
    with pytest.raises(
        CorpusError, match=r"a\.jsonl: nothing is left to train on \(dropped: 2 no_assistant_turn\)"
    ):
        load(data, tokenizer_of(FAMILIES["chatml"]))
    system = [{"role": "system", "content": "x"}, *dialogue("hi", "hello")]
    data = write_jsonl(tmp_path / "b.jsonl", {"messages": system})
    with pytest.raises(CorpusError, match=r"1 template_refused.*b\.jsonl, line 1: System role not supported"):
        load(data, tokenizer_of(FAMILIES["gemma"]))


def test_plain_text_is_supervised_but_for_the_token_that_begins_it(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", {"text": "hello there"})
    assert load(data, tokenizer).mask.all()
    begun = write_jsonl(tmp_path / "b.jsonl", {"text": "<bos>hello there"})
    assert load(begun, tokenizer_of(FAMILIES["gemma"])).mask.tolist()[:2] == [0, 1]


def test_tokens_of_another_vocabulary_are_refused(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", {"input_ids": [9999, 1], "loss_mask": [1, 1]})
    with pytest.raises(
        CorpusError, match=r"line 1: token id 9999 is outside the tokenizer's vocabulary of \d+"
    ):
        load(data, tokenizer)


def test_ids_and_digest_do_not_depend_on_the_order_of_the_data(tmp_path, tokenizer):
    data = rows(30)
    one = load(write_jsonl(tmp_path / "a.jsonl", *data), tokenizer)
    random.Random(1).shuffle(data)
    other = load(write_jsonl(tmp_path / "b.jsonl", *data), tokenizer)
    assert set(one.ids.tolist()) == set(other.ids.tolist())
    assert one.digest == other.digest


def test_digest_follows_the_settings(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", *rows(3))
    assert load(data, tokenizer).digest != load(data, tokenizer, max_length=1000).digest


def test_processes_give_the_same_corpus_as_one(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus_module, "_CHUNK_ROWS", 7)
    data = write_jsonl(tmp_path / "a.jsonl", *rows(40), *rows(3))
    alone = load(data, tokenizer, processes=1, reuse=False)
    assert same(load(data, tokenizer, processes=2, reuse=False), alone)


def test_an_error_in_a_process_is_the_same_clear_line(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", *rows(3), {"question": "x"})
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 4: found question"):
        load(data, tokenizer, processes=2, reuse=False)


class _NotAgain:
    """A tokenizer that must not be asked."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        if name in ("apply_chat_template", "get_chat_template", "__call__"):
            raise AssertionError("tokenised twice")
        return getattr(self._tokenizer, name)


def test_tokens_are_kept_and_nothing_is_tokenised_twice(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", *rows(20), {"messages": dialogue("hi")})
    first = load(data, tokenizer)
    (tmp_path / "a.jsonl").rename(tmp_path / "moved.jsonl")
    assert same(load(str(tmp_path / "moved.jsonl"), _NotAgain(tokenizer)), first)


@pytest.mark.parametrize("change", ["data", "tokenizer", "template", "settings", "reuse"])
def test_kept_tokens_are_not_used_when_anything_changed(tmp_path, tokenizer, change):
    data = write_jsonl(tmp_path / "a.jsonl", *rows(2))
    load(data, tokenizer)
    family, options = FAMILIES["chatml"], {}
    if change == "data":
        write_jsonl(tmp_path / "a.jsonl", *rows(3))
    elif change == "tokenizer":
        family = family._replace(special=(*family.special, "<extra>"))
    elif change == "template":
        family = family._replace(template=family.template.replace("SmolLM", "Another"))
    elif change == "settings":
        options = {"max_length": 1000}
    else:
        options = {"reuse": False}
    kept = len(list(token_store().iterdir()))
    load(data, build_tokenizer(family), **options)
    assert len(list(token_store().iterdir())) == kept + (change != "reuse")


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_damaged_kept_tokens_are_made_again(tmp_path_factory, data):
    """Wherever a kept file is cut or a byte of it flipped, the corpus is the same as before."""
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder))
        tokenizer = tokenizer_of(FAMILIES["chatml"])
        path = write_jsonl(folder / "a.jsonl", *rows(3))
        corpus = load(path, tokenizer)
        (kept,) = token_store().iterdir()
        content = bytearray(kept.read_bytes())
        where = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[where] ^= 1 << data.draw(st.integers(0, 7))
            kept.write_bytes(content)
        else:
            kept.write_bytes(content[:where])
        assert same(load(path, tokenizer), corpus)
        assert same(load(path, tokenizer), corpus)


def test_a_store_that_cannot_be_written_is_no_error(tmp_path, tokenizer, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "file"))
    assert len(load(write_jsonl(tmp_path / "a.jsonl", *rows(2)), tokenizer)) == 2
    assert "tokens are not kept" in caplog.text


@pytest.mark.parametrize(
    "options", [{"max_length": 1}, {"min_supervised": 0}, {"processes": -1}, {"thinking": "maybe"}]
)
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        CorpusConfig(("a",), **options)


def test_thinking_can_be_stripped(tmp_path):
    tokenizer = tokenizer_of(FAMILIES["deepseek-r1"])
    data = write_jsonl(tmp_path / "a.jsonl", {"messages": dialogue("hi", "<think>\nhm\n</think>\n\nhello")})
    corpus = load(data, tokenizer, thinking="strip")
    assert supervised_text(tokenizer, corpus.tokens, corpus.mask) == ["hello<｜end▁of▁sentence｜>"]  # noqa: RUF001


def test_columns_are_taken_under_other_names(tmp_path, tokenizer):
    plain = [{"prompt": f"q {n}", "response": f"a {n}"} for n in range(3)]
    other = [{"question": row["prompt"], "reply": row["response"], "prompt": None} for row in plain]
    expected = load(write_jsonl(tmp_path / "a.jsonl", *plain), tokenizer)
    data = write_jsonl(tmp_path / "b.jsonl", *other)
    mapped = load(data, tokenizer, column_map=(("question", "prompt"), ("reply", "response")))
    assert same(mapped, expected)
    with pytest.raises(CorpusError, match="found prompt, question, reply; a row needs one of"):
        load(data, tokenizer)
    with pytest.raises(ConfigError, match="several columns the name 'prompt'"):
        CorpusConfig(("a",), column_map=(("question", "prompt"), ("reply", "prompt")))


def test_only_the_last_turn_is_supervised_on_request(tmp_path, tokenizer):
    data = write_jsonl(tmp_path / "a.jsonl", {"messages": dialogue("hi", "hello", "and?", "yes")})
    every, last = load(data, tokenizer), load(data, tokenizer, last_turn_only=True)
    assert supervised_text(tokenizer, last.tokens, last.mask) == ["yes<|im_end|>"]
    assert every.tokens.tolist() == last.tokens.tolist()
    assert every.digest != last.digest


def test_config_is_plain_data():
    assert json.loads(json.dumps(CorpusConfig(("a",)).settings()))["min_supervised"] == 2
