"""`dflash compare`: runs beside each other, what keeps them apart first."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support import write_cache
from tiny_runs import LENGTHS, tiny_config

from dflash.cli import cli
from dflash.provenance import RECORD_NAME
from dflash.train.runs import METRICS_NAME, bucket_losses, load_run
from dflash.train.trainer import train
from dflash.world import World


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs that differ in their sampler, and their cache."""
    folder = tmp_path_factory.mktemp("runs")
    config = tiny_config(write_cache(folder / "cache", LENGTHS), folder / "a", max_steps=6)
    train(config, World())
    train(replace(config, out=folder / "b", sampler=replace(config.sampler, policy="shuffle")), World())
    return folder


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def changed(run, out, **changes):
    """A copy of a run whose recorded configuration says something else."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("checkpoints"))
    record = json.loads((out / RECORD_NAME).read_text())
    record["config"] |= changes
    (out / RECORD_NAME).write_text(json.dumps(record))
    return out


def test_figures_are_those_of_the_runs_own_record(runs) -> None:
    report = json.loads(compare(runs / "a", runs / "b", "--json").output)
    lines = [json.loads(line) for line in (runs / "a" / METRICS_NAME).read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    figures = {name: values[0] for name, values in report["figures"].items()}
    assert (figures["steps"], figures["tokens"]) == (6, sum(line["tokens"] for line in lines))
    assert figures["loss"] == pytest.approx(losses[-1])
    assert figures["roughness"] == pytest.approx(np.std(np.diff(losses)))  # a tenth of six steps is none
    assert list(report["by_bucket"]["loss"]) == ["16", "32", "64"]
    assert list(report["by_position"]) == ["1", "2", "3"]
    assert report["differences"] == [
        {"key": "sampler.policy", "values": ["stratified", "shuffle"], "decides": False}
    ]


def test_the_text_shows_settings_and_figures(runs) -> None:
    output = compare(runs / "a", runs / "b").output
    assert "NOT THE SAME" not in output
    assert "sampler.policy  stratified  shuffle" in output
    assert "right at place 3" in output


def test_the_last_walk_over_held_out_samples_is_shown_where_there_is_one(runs, tmp_path) -> None:
    """For a run without one there is a dash; the picture takes both."""
    walked = changed(runs / "a", tmp_path / "walked")
    lines = [json.loads(line) for line in (walked / METRICS_NAME).read_text().splitlines()]
    lines = [line for line in lines if "kind" not in line]
    for step, tau in ((3, 1.25), (6, 1.5)):
        walk = {"kind": "evaluation", "step": step, "walk_tau": tau, "walk_tau_by_bucket": [None, 1.75, tau]}
        lines.insert(step + (step == 6), walk)
    (walked / METRICS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    bare = changed(runs / "b", tmp_path / "bare")
    steps = [line for line in (bare / METRICS_NAME).read_text().splitlines() if '"kind"' not in line]
    (bare / METRICS_NAME).write_text("\n".join(steps) + "\n")
    report = json.loads(compare(walked, bare, "--json", "--plot", tmp_path / "curves.svg").output)
    assert report["figures"]["walk tau"] == [1.5, None]
    assert report["by_bucket"]["walk tau"] == {"16": [None, None], "32": [1.75, None], "64": [1.5, None]}
    assert "walk tau, to 32 tokens" in compare(walked, bare).output
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")


def test_another_cache_seed_or_drafter_comes_first(runs, tmp_path) -> None:
    other = changed(runs / "a", tmp_path / "c", seed=7, cache_digest="0" * 64, epochs=3)
    output = compare(runs / "a", other).output
    words = ["NOT THE SAME", "\ncache_digest", "\nseed", "settings that differ", "\nepochs"]
    assert sorted(words, key=output.index) == words


def test_runs_with_other_blocks_and_buckets_stand_side_by_side(runs, tmp_path) -> None:
    other = changed(runs / "a", tmp_path / "c", bucket_edges=[16, 64])
    path = other / METRICS_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["accuracy"] = line["accuracy"][:1]
        for name in ("loss_by_bucket", "anchor_tau_by_bucket"):
            line[name] = line[name][:2]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = json.loads(compare(runs / "a", other, "--json").output)
    assert report["by_bucket"]["loss"]["32"][1] is None
    assert report["by_position"]["2"][1] is None
    assert compare(runs / "a", other).exit_code == 0


def test_the_same_run_twice_has_no_differences(runs) -> None:
    assert "no settings differ" in compare(runs / "a", runs / "a").output


def test_curves_are_drawn(runs, tmp_path) -> None:
    assert compare(runs / "a", runs / "b", "--plot", tmp_path / "c.svg").exit_code == 0
    assert b"<svg" in (tmp_path / "c.svg").read_bytes()


def test_a_half_written_last_line_is_a_run_that_is_still_going(runs, tmp_path) -> None:
    going = changed(runs / "a", tmp_path / "c")
    with (going / METRICS_NAME).open("a") as file:
        file.write('{"step": 7, "lo')
    assert len(load_run(going).steps) == 6


def test_losses_by_bucket_are_those_of_the_last_steps(runs) -> None:
    last = json.loads((runs / "a" / METRICS_NAME).read_text().splitlines()[-1])
    found = bucket_losses(runs / "a", (16, 32, 64))
    expected = [last["loss"] if loss is None else loss for loss in last["loss_by_bucket"]]
    assert found == pytest.approx(expected)


def test_what_is_no_run_is_one_line(runs, tmp_path) -> None:
    def fails(*arguments: object) -> str:
        result = compare(*arguments)
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
        return result.stderr

    assert "1 runs given" in fails(runs / "a")
    assert f"{tmp_path} is not a run" in fails(runs / "a", tmp_path)
    assert "holds no steps" in fails(runs / "a", _without_steps(runs, tmp_path / "c"))
    assert ".png" in fails(runs / "a", runs / "b", "--plot", "curves.pdf")
    broken = changed(runs / "a", tmp_path / "d")
    (broken / METRICS_NAME).write_text('{"step": 1}\n{"step": 2}\n')
    assert "line 1" in fails(runs / "a", broken)


def _without_steps(runs, out):
    changed(runs / "a", out)
    (out / METRICS_NAME).unlink()
    return out
