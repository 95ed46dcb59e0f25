"""Figures of an evaluation: sums over prompts, and what is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from overfit import open_target
from support import drafter_config, write_target

from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.loop import generate
from dflash.drafter import Drafter, init_weights
from dflash.errors import CheckpointError, ConfigError, CorpusError
from dflash.evaluate.config import THINKING, EvalConfig
from dflash.evaluate.figures import Difference, EvalReport, KindReport
from dflash.evaluate.plot import plot_positions
from dflash.evaluate.run import _BothWays, evaluate
from dflash.extract.benchmarks import BENCHMARKS, benchmark_rows
from dflash.extract.prompts import Prompt, load_prompts, selected
from dflash.pretrained import write_drafter
from dflash.target import load_tokenizer
from dflash.train.checkpoint import resolve_drafter


def generation(accepted: list[int], tokens: list[int], seconds: float) -> Generation:
    return Generation(tokens, accepted, len(accepted) + 1, seconds, seconds / 4, [2] * (len(tokens) - 1))


def test_figures_are_pooled_over_prompts_and_not_averaged() -> None:
    report = KindReport()
    report.add(generation([1] * 6, [5] * 7, 3.0), generation([3, 3], [5] * 7, 1.0))
    report.add(generation([1], [5, 6], 1.0), generation([1], [5, 7], 1.0))
    assert (report.prompts, report.equal, report.cycles, report.walked) == (2, 1, 3, 7)
    assert report.walk_tau == pytest.approx(7 / 3)
    assert report.anchor_tau == pytest.approx(2.0)
    assert report.speedup == pytest.approx(2.0)
    assert "4.5 tokens/s" in report.summary()


def test_acceptance_by_position_is_the_share_of_cycles_that_got_so_far() -> None:
    report = KindReport()
    report.add(generation([1] * 9, [5] * 10, 1.0), generation([4, 1, 3, 1], [5] * 10, 1.0))
    assert report.by_position(3) == pytest.approx([2 / 4, 2 / 4, 1 / 4])


def test_without_prompts_the_figures_are_neutral() -> None:
    report = KindReport()
    assert (report.walk_tau, report.anchor_tau, report.speedup) == (1.0, 1.0, 1.0)
    assert report.by_position(2) == [0.0, 0.0]


def test_the_table_has_a_row_for_each_kind_and_one_for_all() -> None:
    report = EvalReport(KindReport(), {"short": KindReport(), "document": KindReport()}, 4)
    rows = [line.split()[0] for line in report.table().splitlines()]
    assert rows[:4] == ["prompts", "document", "short", "all"]
    assert set(report.to_json()["kinds"]) == {"short", "document"}


@pytest.mark.parametrize(
    ("change", "word"), [({"dtype": "float16"}, "float16"), ({"per_kind": 0}, "--per-kind")]
)
def test_settings_that_cannot_be_evaluated_are_refused(change: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        EvalConfig("t", Path("d"), ("p",), **change)


def test_a_folder_without_a_drafter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        resolve_drafter(tmp_path)


def test_only_so_many_prompts_of_each_kind_are_taken() -> None:
    none = np.zeros(1, np.int32)
    prompts = [Prompt(none, none, kind, str(n)) for n, kind in enumerate("aabab")]
    assert [prompt.name for prompt in selected(prompts, 1)] == ["0", "2"]
    assert [prompt.name for prompt in selected(prompts, None)] == ["0", "1", "2", "3", "4"]


def test_a_difference_is_a_near_tie_within_a_few_steps_of_the_dtype() -> None:
    assert Difference("p", 3, 5, 6, gap=0.1, resolution=0.0625).near_tie
    assert not Difference("p", 3, 5, 6, gap=0.6, resolution=0.0625).near_tie


def test_differences_are_told_below_the_table_where_output_must_be_equal() -> None:
    report = EvalReport(KindReport(), {}, 4)
    report.total.differences += [Difference("p", 3, 5, 6, 0.1, 0.06), Difference("q", 1, 5, 6, 2.0, 0.06)]
    assert "outputs that differ: 2, of which 1 part at a near-tie" in report.table()
    assert "widest gap 2 in logits" in report.markdown()


def test_prompts_count_by_kind_and_by_the_power_of_two_above_their_length() -> None:
    report = EvalReport(KindReport(), {}, 4)
    for length in (1, 16, 17, 64, 65):
        for part in report.parts(Prompt(np.zeros(length, np.int32), np.zeros(0, np.int32), "a", "p")):
            part.prompts += 1
    assert {edge: part.prompts for edge, part in report.lengths.items()} == {16: 2, 32: 1, 64: 1, 128: 1}
    assert report.kinds["a"].prompts == report.total.prompts == 5
    assert "<= 128 tokens" in report.table()


def test_the_markdown_table_has_as_many_cells_in_every_row() -> None:
    rows = EvalReport(KindReport(), {"a": KindReport(), "b": KindReport()}, 4).markdown().split("\n\n")[0]
    assert len({line.count("|") for line in rows.splitlines()}) == 1
    assert len(rows.splitlines()) == 5


def test_with_a_temperature_equality_is_not_claimed() -> None:
    report = EvalReport(KindReport(prompts=1, equal=0), {}, 4, greedy=False)
    assert report.rows()[-1][-1] == "-"


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_benchmark_is_loaded_by_name_and_its_questions_are_asked(name, monkeypatch, tmp_path) -> None:
    asked = "What is 2 + 3?"
    rows = [{"question": asked, "problem": asked, "prompt": [asked] if name == "mt-bench" else asked}]
    rows[0]["category"] = "math"
    seen = []
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda path, subset, split: (
            seen.append((path, split)) or [row | {"category": "math"} for row in rows]
        ),
    )
    (prompt,) = load_prompts([name], load_tokenizer(str(write_target(tmp_path / "t"))))
    assert seen == [(BENCHMARKS[name].path, BENCHMARKS[name].split)]
    assert prompt.kind == ("math" if name == "mt-bench" else name)
    assert prompt.name == f"{name}-0"


def test_a_benchmark_that_cannot_be_loaded_asks_for_a_file(monkeypatch) -> None:
    def fail(*_args, **_kwargs):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(CorpusError, match=r"--data gsm8k: cannot load openai/gsm8k \(no network\); offline"):
        list(benchmark_rows("gsm8k"))


def test_the_template_is_told_about_thinking_where_that_is_asked_for(tmp_path) -> None:
    tokenizer = load_tokenizer(str(write_target(tmp_path / "t")))
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    )
    data = tmp_path / "p.jsonl"
    data.write_text('{"prompt": "hi"}\n')
    texts = [
        tokenizer.decode(load_prompts([str(data)], tokenizer, template_thinking=value)[0].input_ids)
        for value in THINKING.values()
    ]
    assert texts == ["hi", "hiTrue", "hiFalse"]


def test_batches_evaluate_to_the_same_acceptance_and_the_plot_is_drawn(tmp_path) -> None:
    target = write_target(tmp_path / "target")
    drafter = Drafter(drafter_config())
    init_weights(drafter, seed=0)
    (tmp_path / "drafter").mkdir()
    write_drafter(drafter, tmp_path / "drafter")
    data = tmp_path / "p.jsonl"
    data.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (1, 30, 5)))
    config = EvalConfig(str(target), tmp_path / "drafter", (str(data),), max_new_tokens=10)
    alone, together = evaluate(config), evaluate(replace(config, batch_size=2))
    assert together.total.equal == alone.total.equal == 3
    assert together.total.walked == alone.total.walked
    assert together.total.cycles == alone.total.cycles
    plot_positions(tmp_path / "p.png", {"a": alone, "b": together})
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_bfloat16_output_is_compared_and_its_differences_are_weighed(tmp_path) -> None:
    target = open_target(write_target(tmp_path / "target"), dtype=torch.bfloat16)
    decoder = _BothWays(target, Drafter(drafter_config()).bfloat16(), DecodeConfig(4))
    prompt = Prompt(np.arange(5, 15, dtype=np.int32), np.zeros(0, np.int32), None, "p")
    plain = generate(target, None, torch.arange(5, 15), DecodeConfig(6))
    other = Generation([*plain.tokens[:2], (plain.tokens[2] + 1) % 40, *plain.tokens[3:]])
    assert decoder.difference(prompt, plain, plain) is None
    found = decoder.difference(prompt, plain, other)
    assert (found.position, found.plain, found.drafted) == (2, plain.tokens[2], other.tokens[2])
    assert found.gap >= 0
    assert found.resolution >= torch.finfo(torch.bfloat16).eps
