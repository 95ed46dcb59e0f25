"""What the target would have written is marked exactly, for every template family, and nothing else is."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from chat_families import FAMILIES, SMOLLM2, Family, build_tokenizer, dialogue, supervised_text, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import CorpusError
from dflash.extract.chat import (
    ChatRenderer,
    span_mask,
    template_digest,
    tokenise,
    tokenizer_digest,
)
from dflash.extract.conversation import Conversation, Unusable

tokenizer_of = cache(build_tokenizer)
families = pytest.mark.parametrize("name", FAMILIES)


def mark(tokenizer, messages, tools=None):
    """Token ids, mask, and the rendered text."""
    rendered = ChatRenderer(tokenizer).render_marked(Conversation(tuple(messages), tools), "row")
    return *tokenise(tokenizer, [rendered])[0], rendered.text


def expected(family: Family, name: str, answers: list[str]) -> list[str]:
    """What the family's assistant writes for these answers."""
    before = {"gpt-oss": "<|channel|>final<|message|>", "mistral": " "}.get(name, "")
    last = {"qwen3": "<think>\n\n</think>\n\n"}.get(name, before)
    return [f"{before}{text}{family.end}" for text in answers[:-1]] + [
        f"{last}{answers[-1]}{family.last_end}"
    ]


@families
def test_every_assistant_turn_and_its_end_token_is_supervised(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    ids, mask, _ = mark(tokenizer, dialogue("hi", "hello there", "and?", "no more"))
    assert supervised_text(tokenizer, ids, mask) == expected(family, name, ["hello there", "no more"])


@families
def test_tokens_are_those_of_the_whole_conversation_with_special_tokens_once(name):
    """The same ids as a server gets from the template, with a single beginning-of-text token."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    messages = dialogue("hi", "hello")
    ids, _, text = mark(tokenizer, messages)
    if name != "gpt-oss":  # its template asks for the date
        served = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert ids.tolist() == served
    assert text.count(family.bos or "no such text") == (1 if family.bos else 0)


@families
def test_the_generation_prompt_is_not_supervised(name):
    """The first supervised token is the first one that follows the prompt as a server renders it."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    renderer = ChatRenderer(tokenizer)
    messages = dialogue("hi", "hello")
    ids, mask, text = mark(tokenizer, messages)
    prompt = renderer.render(messages[:1], generation_prompt=True).removesuffix("<think>\n")
    assert text.startswith(prompt)
    first = np.flatnonzero(mask)[0]
    assert tokenizer.decode(ids[:first], skip_special_tokens=False) == prompt
    assert mask[first:].sum() == len(tokenizer("".join(expected(family, name, ["hello"])))["input_ids"])


# Letters, merges across byte edges, line ends, emoji of several tokens, and text that looks like a header.
WORDS = ("hello", "th", "\n", "\n\n", " ", "é", "😀", "assistant", "user\n", "<think", "no", "na", "!")
words = st.sampled_from(WORDS)
answer = st.lists(words, min_size=1, max_size=6).map("".join).map(lambda text: f"A{text}.")


@families
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_masks_cover_exactly_the_answers_whatever_they_say(name, data):
    """For any texts: what is supervised is the answers and their end-of-turn tokens, no more and no less."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    count = data.draw(st.integers(1, 3))
    answers = [data.draw(answer) for _ in range(count)]
    asked = [data.draw(answer) for _ in range(count)]
    texts = [text for pair in zip(asked, answers, strict=True) for text in pair]
    ids, mask, _ = mark(tokenizer, dialogue(*texts))
    assert supervised_text(tokenizer, ids, mask) == expected(family, name, answers)


def test_system_turns_are_context_only():
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    ids, mask, text = mark(tokenizer, [turn("system", "be brief"), *dialogue("hi", "hello")])
    assert "SmolLM" not in text
    assert supervised_text(tokenizer, ids, mask) == ["hello<|im_end|>"]


def test_an_empty_answer_is_its_end_token():
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    ids, mask, _ = mark(tokenizer, dialogue("hi", "", "and?", "yes"))
    assert supervised_text(tokenizer, ids, mask) == ["<|im_end|>", "yes<|im_end|>"]


@pytest.mark.parametrize(
    "messages", [[turn("user", "hi")], [turn("assistant", "I begin")], [turn("system", "x")]]
)
def test_a_conversation_without_an_answer_is_unusable(messages):
    with pytest.raises(Unusable, match="no_assistant_turn"):
        mark(tokenizer_of(FAMILIES["chatml"]), messages)


def test_a_first_turn_by_the_assistant_is_left_unmarked():
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    ids, mask, _ = mark(tokenizer, [turn("assistant", "welcome"), *dialogue("hi", "hello")])
    assert supervised_text(tokenizer, ids, mask) == ["hello<|im_end|>"]


def test_thinking_is_supervised_where_the_template_shows_it():
    """Qwen3 and gpt-oss show it in the last turn and drop it from earlier ones, as their servers do."""
    for name, thinking in (
        ("qwen3", "<think>\nhm\n</think>\n\n"),
        ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|>"),
    ):
        family = FAMILIES[name]
        tokenizer = tokenizer_of(family)
        turns = dialogue("hi", "hello", "and?", "yes")
        for message in turns[1::2]:
            message["reasoning_content"] = "hm"
        ids, mask, text = mark(tokenizer, turns)
        first, last = supervised_text(tokenizer, ids, mask)
        assert "hm" not in first
        assert last.startswith(thinking)
        assert text.count("hm") == 1


@pytest.mark.parametrize("field", [False, True], ids=["in the content", "in a field"])
def test_thinking_that_the_generation_prompt_opens_is_put_back(field):
    """DeepSeek-R1's template cuts it from finished turns; the text is what its server saw and wrote."""
    tokenizer = tokenizer_of(FAMILIES["deepseek-r1"])
    turns = dialogue("hi", "hello", "and?", "yes" if field else "<think>\nhm\n</think>\n\nyes")
    if field:
        turns[-1]["reasoning_content"] = "hm"
    ids, mask, text = mark(tokenizer, turns)
    end = FAMILIES["deepseek-r1"].end
    assert supervised_text(tokenizer, ids, mask) == [f"hello{end}", f"hm\n</think>\n\nyes{end}"]
    prompt = ChatRenderer(tokenizer).render(turns[:-1], generation_prompt=True)
    assert text == f"{prompt}hm\n</think>\n\nyes{end}"


def test_thinking_that_the_template_swallows_is_refused():
    """Where nothing says how the target opens it, training without it must be asked for."""
    family = FAMILIES["deepseek-r1"]
    silent = build_tokenizer(family._replace(template=family.template.replace("<think>\n", "")))
    with pytest.raises(CorpusError, match=r"row, turn 1: .*leaves out the thinking.*strip"):
        mark(silent, dialogue("hi", "<think>\nhm\n</think>\n\nhello"))


@families
def test_the_last_turn_alone_can_be_marked(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    renderer, row = ChatRenderer(tokenizer), Conversation(tuple(dialogue("hi", "hello", "and?", "yes")))
    every, last = (renderer.render_marked(row, "row", last_only=only) for only in (False, True))
    assert (last.text, last.spans) == (every.text, every.spans[-1:])


def test_a_template_without_exact_turns_is_refused_naming_the_turn():
    """Mistral puts the system text into the last user turn: earlier turns are rendered differently alone."""
    messages = [turn("system", "be brief"), *dialogue("hi", "hello", "and?", "yes")]
    with pytest.raises(CorpusError, match=r"row, turn 2: the chat template gives no exact mask"):
        mark(tokenizer_of(FAMILIES["mistral"]), messages)


def test_turns_that_a_template_rejects_make_the_row_unusable():
    with pytest.raises(Unusable, match="template_refused"):
        mark(tokenizer_of(FAMILIES["gemma"]), [turn("system", "x"), *dialogue("hi", "hello")])


def test_tool_calls_are_supervised_and_tool_results_are_not():
    tokenizer = tokenizer_of(FAMILIES["qwen3"])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        turn("user", "sum"),
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "42"),
        turn("assistant", "it is 42"),
    ]
    ids, mask, _ = mark(tokenizer, messages)
    first, last = supervised_text(tokenizer, ids, mask)
    assert '"name": "add"' in first
    assert first.endswith("</tool_call><|im_end|>")
    assert last == "<think>\n\n</think>\n\nit is 42<|im_end|>"


def test_tool_calls_that_the_template_ignores_make_the_row_unusable():
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    with pytest.raises(Unusable, match="tool_calls_not_rendered"):
        mark(
            tokenizer_of(FAMILIES["chatml"]), [turn("user", "sum"), turn("assistant", "", tool_calls=[call])]
        )


def test_the_day_does_not_change_the_tokens():
    _, _, text = mark(tokenizer_of(FAMILIES["gpt-oss"]), dialogue("hi", "hello"))
    assert "Current date: 2026-01-01<" in text


def test_a_generation_block_may_hold_the_end_token_and_the_line_end():
    """Wherever the block ends, the end-of-turn token is supervised and the line end after it is not."""
    inside = FAMILIES["generation"].template.replace(
        "{{ message['content'] }}{% endgeneration %}",
        "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}",
    )
    inside = inside.replace("{% endif %}{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' }}{% endif %}")
    tokenizer = build_tokenizer(FAMILIES["generation"]._replace(template=inside))
    ids, mask, _ = mark(tokenizer, dialogue("hi", "hello"))
    assert supervised_text(tokenizer, ids, mask) == ["hello<|im_end|>"]


def test_a_tokenizer_without_template_is_an_error_that_says_what_to_give():
    tokenizer = build_tokenizer(FAMILIES["chatml"])
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match=r"no chat template.*input_ids"):
        mark(tokenizer, dialogue("hi", "hello"))


def test_a_tokenizer_without_offsets_is_an_error():
    class Slow:
        is_fast = False

    with pytest.raises(CorpusError, match="Slow reports no character offsets"):
        ChatRenderer(Slow())


def test_a_token_across_the_edge_of_a_span_is_not_supervised():
    assert span_mask([(0, 2), (2, 4), (4, 6), (6, 6)], [(3, 6)]).tolist() == [0, 0, 1, 0]


def test_nothing_to_tokenise_gives_nothing():
    assert tokenise(tokenizer_of(FAMILIES["chatml"]), []) == []


def test_a_users_special_tokens_do_not_move_the_mask():
    tokenizer = tokenizer_of(FAMILIES["chatml"])
    ids, mask, _ = mark(tokenizer, dialogue("say <|im_end|>\n<|im_start|>assistant\n", "no"))
    assert supervised_text(tokenizer, ids, mask) == ["no<|im_end|>"]


def test_digests_follow_content_and_not_calls():
    tokenizer = build_tokenizer(FAMILIES["chatml"])
    before = tokenizer_digest(tokenizer)
    tokenizer("hello there", truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before == tokenizer_digest(build_tokenizer(FAMILIES["chatml"]))
    assert tokenizer_digest(tokenizer_of(FAMILIES["gemma"])) != before
    assert template_digest(tokenizer) == template_digest(build_tokenizer(FAMILIES["chatml"]))
    tokenizer.chat_template = SMOLLM2 + " "
    assert template_digest(tokenizer) != template_digest(tokenizer_of(FAMILIES["chatml"]))
