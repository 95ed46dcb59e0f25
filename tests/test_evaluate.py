"""Figures of an evaluation: sums over prompts, and what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.decode.config import Generation
from dflash.errors import CheckpointError, ConfigError
from dflash.evaluate import EvalConfig, EvalReport, KindReport, resolve_drafter
from dflash.extract.prompts import Prompt


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
    import numpy as np

    from dflash.evaluate import _selected

    none = np.zeros(1, np.int32)
    prompts = [Prompt(none, none, kind, str(n)) for n, kind in enumerate("aabab")]
    assert [prompt.name for prompt in _selected(prompts, 1)] == ["0", "2"]
    assert [prompt.name for prompt in _selected(prompts, None)] == ["0", "1", "2", "3", "4"]
