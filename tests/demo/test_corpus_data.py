"""The conversations shipped for the demo are what their page says they are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dflash.demo

DATA = Path(dflash.demo.__file__).parent / "data"
KINDS = {"short", "long-form", "document"}
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return read("train.jsonl")


@pytest.fixture(scope="module")
def held_out() -> list[Row]:
    return read("heldout.jsonl")


def prompt(row: Row) -> str:
    return str(row["messages"][0]["content"])


def size(row: Row) -> int:
    return sum(len(message["content"]) for message in row["messages"])


def test_there_are_1500_conversations_or_more_of_three_kinds(train: list[Row], held_out: list[Row]) -> None:
    kinds = Counter(row["kind"] for row in [*train, *held_out])
    assert kinds.total() >= 1500
    assert kinds.keys() == KINDS
    assert min(kinds.values()) >= 150


def test_every_row_is_a_question_and_an_answer_with_words_in_it(
    train: list[Row], held_out: list[Row]
) -> None:
    for row in [*train, *held_out]:
        assert row.keys() == {"id", "kind", "messages"}
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"]), row["id"]


def test_no_row_holds_a_special_token(train: list[Row], held_out: list[Row]) -> None:
    for row in [*train, *held_out]:
        assert not any("<|" in message["content"] for message in row["messages"]), row["id"]


def test_a_tenth_of_every_kind_is_held_out(train: list[Row], held_out: list[Row]) -> None:
    for kind in KINDS:
        held = sum(row["kind"] == kind for row in held_out)
        trained = sum(row["kind"] == kind for row in train)
        assert held == round((held + trained) / 10), kind


def test_no_id_and_no_prompt_occurs_twice_or_on_both_sides(train: list[Row], held_out: list[Row]) -> None:
    rows = [*train, *held_out]
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({prompt(row) for row in rows}) == len(rows)


def test_no_document_occurs_on_both_sides(train: list[Row], held_out: list[Row]) -> None:
    def lines(rows: list[Row]) -> set[str]:
        code = [prompt(row) for row in rows if row["kind"] == "document" and "```" in prompt(row)]
        return {text.split("```")[1] for text in code}

    assert lines(held_out)
    assert not lines(held_out) & lines(train)


def test_lengths_are_spread_and_kinds_follow_each_other(train: list[Row], held_out: list[Row]) -> None:
    sizes = {kind: sorted(size(row) for row in [*train, *held_out] if row["kind"] == kind) for kind in KINDS}
    median = {kind: values[len(values) // 2] for kind, values in sizes.items()}
    assert 3 * median["short"] < median["long-form"]
    assert 1.5 * median["long-form"] < median["document"]
    for values in sizes.values():
        assert values[-1] > 2.5 * values[0]


def test_rows_are_sorted_by_id_so_that_a_new_run_gives_a_small_difference(
    train: list[Row], held_out: list[Row]
) -> None:
    for rows in (train, held_out):
        assert rows == sorted(rows, key=lambda row: str(row["id"]))


def test_the_page_beside_the_data_names_licences_and_the_held_out_count(held_out: list[Row]) -> None:
    page = (DATA / "README.md").read_text(encoding="utf-8")
    assert f"{len(held_out)} conversations" in page
    assert "Apache-2.0" in page
    assert "PSF licence" in page
    assert "Python Software Foundation" in page
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (DATA / "LICENSE-python.txt").read_text(encoding="utf-8")
