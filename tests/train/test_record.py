"""The figures of a step are ratios of sums, and its record survives a restart."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dflash.train.record import METRICS_NAME, RunLog, step_figures


def add(log: RunLog, step: int, loss: float = 1.0) -> None:
    log.add({"step": step, "loss": loss, "anchor_tau": 2.0}, np.array([[3, 1], [0, 4]]), 0.5, held=[4, 10])


def make_log(run, *, enabled: bool = True) -> RunLog:
    return RunLog(run, (16, 32), (0.5, 0.5), enabled=enabled)


def test_figures_divide_what_was_summed_over_the_step():
    sums = [[6.0, 4.0], [3.0, 1.0], [4.0, 2.0], [10.0, 0.0], [5.0, 0.0], [6.0, 0.0], [4.0, 0.0]]
    assert step_figures(torch.tensor(sums, dtype=torch.float64).flatten(), 3, 2) == {
        "loss": 1.5,
        "accuracy": [0.75, 0.5],
        "anchor_tau": 2.0,
        "anchor_tau_by_bucket": [2.0, None],
        "loss_by_bucket": [1.5, None],
        "blocks": 5,
    }


def test_a_step_without_blocks_has_no_ratios():
    figures = step_figures(torch.zeros(14, dtype=torch.float64), 3, 2)
    assert (figures["loss"], figures["anchor_tau"], figures["accuracy"]) == (0.0, None, [None, None])


def test_a_line_holds_what_was_drawn(tmp_path):
    log = make_log(tmp_path)
    add(log, 1)
    (line,) = [json.loads(text) for text in (tmp_path / METRICS_NAME).read_text().splitlines()]
    assert (line["tokens"], line["tokens_by_bucket"], line["seconds"], log.last_tokens) == (8, [3, 5], 0.5, 8)
    assert line["mix"]["shares"] == [0.375, 0.625]


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_start_behind_a_step_cuts_off_what_comes_after_it(tmp_path, done):
    log = make_log(tmp_path)
    for step in (1, 2, 3):
        add(log, step)
    with (tmp_path / METRICS_NAME).open("a") as file:
        file.write('{"step": 4, "lo')
    again = make_log(tmp_path)
    again.start(done)
    add(again, done + 1)
    steps = [json.loads(text)["step"] for text in (tmp_path / METRICS_NAME).read_text().splitlines()]
    assert steps == list(range(1, done + 2))
    assert again.summary(0.0).startswith(f"step {done + 1}, loss 1.000, anchor tau 2.00")


def test_the_final_loss_is_the_mean_of_the_last_tenth(tmp_path):
    log = make_log(tmp_path, enabled=False)
    assert np.isnan(log.final_loss())
    for step in range(1, 21):
        add(log, step, loss=float(step))
    assert log.final_loss() == 19.5


def test_other_ranks_write_nothing(tmp_path):
    log = make_log(tmp_path, enabled=False)
    log.start(0)
    add(log, 1)
    assert not list(tmp_path.iterdir())


def test_the_mix_of_earlier_starts_is_counted(tmp_path):
    whole, first, second = make_log(tmp_path), make_log(tmp_path), make_log(tmp_path)
    for step in (1, 2, 3):
        add(whole, step)
    add(first, 1)
    second.start(1, json.loads(json.dumps(first.mix_state())))
    add(second, 2)
    add(second, 3)
    assert second.mix() == whole.mix()
    assert second.mix()["draws"] == 6


def test_the_progress_line_shows_each_bucket_against_its_quota(tmp_path):
    """Half high is on quota, a full block is twice it or more."""
    log = RunLog(tmp_path, (16, 32, 64, 128), (0.25, 0.25, 0.25, 0.25), enabled=False)
    log.add({"step": 1, "loss": 1.0, "anchor_tau": None}, np.array([[2, 1, 0, 1]]), 0.5, held=[1, 1, 0, 1])
    assert "mix █▄ ▄ 25.0% off" in log.summary(0.0)


def test_every_line_says_how_often_each_bucket_has_been_gone_through(tmp_path):
    """8 tokens a step, 3 and 5 of buckets that hold 4 and 10."""
    log = make_log(tmp_path)
    log.start(0)
    for step in range(1, 5):
        add(log, step)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["passes_by_bucket"] == [0.75, 0.5]
    assert lines[3]["passes_by_bucket"] == [3.0, 2.0]
