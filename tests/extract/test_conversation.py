"""Every usual shape of a row becomes a conversation, plain text, or tokens; anything else is named."""

from __future__ import annotations

import json

import pytest

from dflash.errors import CorpusError
from dflash.extract.conversation import Conversation, PlainText, Tokens, Unusable, parse_row, thinking_of
from dflash.extract.formats import Row


def parse(thinking="keep", **fields):
    return parse_row(Row("data.jsonl, line 7", fields), thinking)


def turns(**fields):
    sample = parse(**fields)
    assert isinstance(sample, Conversation)
    return [(message["role"], message["content"]) for message in sample.messages]


ASKED = [("user", "hi"), ("assistant", "hello")]
OPENAI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
SHAPES = {
    "messages": {"messages": OPENAI},
    "messages as JSON text": {"messages": json.dumps(OPENAI)},
    "messages with unused columns": {"messages": OPENAI, "text": None, "id": 3},
    "conversations": {"conversations": SHAREGPT},
    "conversations with OpenAI's names": {"conversations": OPENAI},
    "messages with ShareGPT's names": {"messages": SHAREGPT},
    "prompt and completion": {"prompt": "hi", "completion": "hello"},
    "prompt and completion as turns": {"prompt": OPENAI[:1], "completion": OPENAI[1:]},
    "prompt and response": {"prompt": "hi", "response": "hello"},
    "Alpaca": {"instruction": "hi", "input": "", "output": "hello"},
    "Alpaca without input": {"instruction": "hi", "output": "hello"},
    "content parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": ["hello"]},
        ]
    },
    "struct columns": {"messages": [{**turn, "name": None, "from": None} for turn in OPENAI]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_conversation(shape):
    assert turns(**SHAPES[shape]) == ASKED


def test_alpaca_input_follows_the_instruction():
    assert turns(instruction="sum", input="1 2", output="3")[0] == ("user", "sum\n\n1 2")


def test_content_parts_are_joined_by_a_line_end():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns(messages=[{"role": "user", "content": parts}]) == [("user", "a\nb")]


@pytest.mark.parametrize(
    ("spelling", "role"),
    [
        ("human", "user"),
        ("Human", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("model", "assistant"),
        ("bot", "assistant"),
        ("function_call", "assistant"),
        ("observation", "tool"),
        ("function", "tool"),
        ("tool", "tool"),
        ("system", "system"),
        ("developer", "developer"),
    ],
)
def test_roles_in_their_usual_spellings(spelling, role):
    assert turns(conversations=[{"from": spelling, "value": "x"}]) == [(role, "x")]


def test_tools_and_tool_calls_reach_the_template_with_arguments_as_objects():
    """Null content is no content; arguments sent as JSON text are decoded, as servers do."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"messages": [OPENAI[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    for given in (tools, json.dumps(tools)):
        sample = parse(**row, tools=given)
        assert sample.tools == tools
        assert sample.messages[1]["content"] == ""
        assert sample.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert parse(**row, tools=[]).tools is None


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", {"a": 1}])
def test_other_tool_arguments_pass_through(arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    sample = parse(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert sample.messages[0]["tool_calls"] == [call]


def test_plain_text_and_tokens():
    assert parse(text="once") == PlainText("once")
    sample = parse(input_ids=[1, 2, 3], loss_mask=[0, 1, True])
    assert isinstance(sample, Tokens)
    assert sample.input_ids.dtype == "int32"
    assert sample.loss_mask.tolist() == [0, 1, 1]
    assert sample.loss_mask.dtype == "uint8"


def test_images_make_a_row_unusable():
    with pytest.raises(Unusable, match="not_text"):
        parse(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


def test_thinking_is_stripped_on_request():
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello", "reasoning_content": "hm"}
    kept = parse(messages=[OPENAI[0], thought]).messages
    assert kept[1] == thought
    assert parse("strip", messages=[OPENAI[0], thought]).messages == tuple(OPENAI)
    asked = {"role": "user", "content": "what is </think>?"}
    assert parse("strip", messages=[asked]).messages == (asked,)


@pytest.mark.parametrize(
    ("message", "thinking"),
    [
        ({"content": "x"}, ""),
        ({"content": "<think>\nhm\n</think>x"}, "hm"),
        ({"content": "hm</think>x"}, "hm"),
        ({"content": "x", "reasoning_content": " hm "}, "hm"),
        ({"content": "x", "thinking": "hm"}, "hm"),
    ],
)
def test_thinking_is_found_in_all_its_places(message, thinking):
    assert thinking_of(message) == thinking


BAD = {
    "unknown fields": (
        {"question": "a", "answer": "b"},
        r"found answer, question; a row needs one of: messages",
    ),
    "no fields": ({}, "found no fields"),
    "all null": ({"text": None}, "found text; a row needs one of"),
    "messages as prose": ({"messages": "hi"}, "messages: found text that is not JSON"),
    "messages as a number": ({"messages": 3}, "messages: found int; it must be a list of turns"),
    "turns as texts": ({"messages": ["hi"]}, "it must be a list of turns, each an object"),
    "unknown role": (
        {"messages": [{"role": "narrator", "content": "x"}]},
        "turn 0: role 'narrator' is unknown",
    ),
    "no role": ({"messages": [{"content": "x"}]}, "turn 0: role None is unknown"),
    "no content": ({"messages": [{"role": "user"}]}, "turn 0: found role; a user turn needs content"),
    "content as a number": (
        {"messages": [{"role": "user", "content": 3}]},
        "turn 0: found int; content must be text",
    ),
    "text as a number": ({"text": 3}, "text: found int"),
    "tools as an object": ({"messages": OPENAI, "tools": {"a": 1}}, "tools is dict; it must be a list"),
    "ids without mask": ({"input_ids": [1]}, "input_ids without loss_mask"),
    "other lengths": ({"input_ids": [1, 2], "loss_mask": [1]}, r"shape \(2,\), loss_mask \(1,\)"),
    "fractions": ({"input_ids": [1.5], "loss_mask": [1]}, "must be integers"),
    "weights": ({"input_ids": [1], "loss_mask": [2]}, "loss_mask 0 or 1"),
    "negative ids": ({"input_ids": [-1], "loss_mask": [1]}, "between -1 and -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_row_is_one_line_that_says_where_and_what(case):
    fields, message = BAD[case]
    with pytest.raises(CorpusError, match=message) as caught:
        parse(**fields)
    assert str(caught.value).startswith("data.jsonl, line 7")
    assert "\n" not in str(caught.value)
