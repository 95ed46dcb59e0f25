"""Sample texts of a report: the serving walk, token by token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_pages import Page

from dflash.cache.reader import CacheReader
from dflash.report.samples import run_texts, token_texts
from dflash.report.texts import Piece, pieces_of
from dflash.train.holdout import HoldoutConfig, split
from dflash.train.runs import load_run
from dflash.train.walk import response_runs


def test_runs_of_drafts_and_the_targets_own_tokens_alternate() -> None:
    found = pieces_of(list("abcdefgh"), [3, 1, 3], [2, 0, 5])
    assert found == [Piece("a", 0), Piece("bc", 2), Piece("d", 0), Piece("e", 0), Piece("fgh", 3)]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), max_size=12))
def test_the_pieces_are_the_response_whatever_was_accepted(cycles) -> None:
    strides, drafts = [s for s, _ in cycles], [d for _, d in cycles]
    tokens = [f"<{n}>" for n in range(1 + sum(strides))]
    found = pieces_of(tokens, strides, drafts)
    assert "".join(piece.text for piece in found) == "".join(tokens)
    assert sum(piece.drafts for piece in found) == sum(min(s, d) for s, d in cycles)


def test_samples_are_held_out_ones_and_read_as_the_cache_has_them(reported_runs: Path, tokenizer) -> None:
    run = load_run(reported_runs / "a")
    found = run_texts(run, 2)
    assert found.note.startswith("Held-out samples, drafted by step-000006")
    assert len(found.samples) == 2
    with CacheReader(reported_runs / "cache") as reader:
        _, held = split(reader.index.ids, HoldoutConfig(**run.config["holdout"]))
        samples = {sample.id: sample for sample in reader.read(held)}
    for shown in found.samples:
        sample = samples[shown.id]
        begin, end = response_runs(sample.loss_mask)[0]
        assert "".join(piece.text for piece in shown.pieces) == tokenizer.decode(
            sample.input_ids[begin:end].tolist()
        )
        assert shown.tokens == end - begin - 1
        assert sum(piece.drafts for piece in shown.pieces) >= shown.tokens - shown.cycles


def test_the_page_shows_each_sample_with_its_runs_marked(page_of_two: Page) -> None:
    articles = list(page_of_two.by_id("samples").all("article"))
    assert len(articles) == 4
    for article in articles:
        assert next(article.all("h4")).text() == article.attributes["aria-label"]
        for mark in article.all("mark"):
            assert mark.attributes["title"].endswith(" accepted")


def test_without_a_held_out_part_samples_that_were_trained_on_are_shown_as_such(runs: Path) -> None:
    record = json.loads((runs / "a" / "run.json").read_text())
    record["config"]["holdout"]["share"] = 0.0
    (runs / "a" / "run.json").write_text(json.dumps(record))
    found = run_texts(load_run(runs / "a"), 1)
    assert found.note.startswith("Samples that were trained on")
    assert len(found.samples) == 1


@pytest.mark.parametrize("missing", ["cache", "checkpoint", "digest", "damage"])
def test_what_is_missing_for_texts_is_said_in_their_place(missing: str, runs: Path) -> None:
    path = runs / "a"
    record = json.loads((path / "run.json").read_text())
    if missing == "cache":
        record["config"]["cache"] = str(runs / "gone")
    if missing == "digest":
        record["config"]["cache_digest"] = "0" * 64
    (path / "run.json").write_text(json.dumps(record))
    if missing == "checkpoint":
        shutil.rmtree(path / "checkpoints")
    if missing == "damage":
        for weights in path.rglob("model.safetensors"):
            weights.write_bytes(b"x")
    found = run_texts(load_run(path), 2)
    assert found.samples == ()
    assert found.note.startswith("No sample texts: ")


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(tokenizer) -> None:
    ids = tokenizer.encode("aé€b", add_special_tokens=False)
    assert token_texts(tokenizer, ids) == ["a", "", "é", "", "", "€", "b"]


@given(ids=st.lists(st.integers(0, 259), min_size=1, max_size=30))
def test_the_texts_of_tokens_are_together_the_text_of_all(tokenizer, ids) -> None:
    assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids)
