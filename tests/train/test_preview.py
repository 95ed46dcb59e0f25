"""`dflash sample`: a table and a picture of what settings would do with a cache."""

from __future__ import annotations

import json
import sys
from itertools import islice

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support import write_cache
from tiny_runs import tiny_config

from dflash.cache.manifest import load_manifest
from dflash.cli import cli
from dflash.provenance import RECORD_NAME
from dflash.train.compare import figures, trace
from dflash.train.holdout import HoldoutConfig
from dflash.train.preview import open_index, trained_corpus
from dflash.train.run import Run
from dflash.train.runs import METRICS_NAME
from dflash.train.sampler import Corpus, Sampler, SamplerConfig
from dflash.train.variants import parse_variant
from dflash.world import World

LENGTHS = [20, 40, 60, 10, 30, 12, 50, 8, 33, 21] * 4
SMALL = "tokens-per-batch=64,batches-per-step=2"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("sample") / "cache", LENGTHS)


def sample(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["sample", *map(str, arguments)])


def small(cache, *arguments: object) -> Result:
    settings = (f"{SMALL},compose=mixed", f"{SMALL},sampler=fifo,compose=bucketed,min-ready=2,max-ready=4")
    flags = [word for text in settings for word in ("--settings", text)]
    return sample(cache, *flags, "--ranks", 2, "--draws", 120, *arguments)


def write_run(folder, losses: list[float], edges: list[int]) -> None:
    folder.mkdir()
    (folder / RECORD_NAME).write_text(json.dumps({"config": {"bucket_edges": edges}}))
    line = {"step": 1, "loss": 2.0, "tokens": 5, "loss_by_bucket": losses}
    (folder / METRICS_NAME).write_text(json.dumps(line) + "\n")


def test_the_table_has_a_row_a_setting(cache) -> None:
    result = small(cache, "--producer", "longest-first")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "40 samples" in lines[0]
    assert "longest-first" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines[-2:]}
    assert set(rows) == {"A", "B"}
    assert float(rows["A"][1].split("/")[0]) < float(rows["B"][1].split("/")[0])


def test_without_settings_the_usual_ones_are_compared(cache) -> None:
    rows = json.loads(sample(cache, "--draws", 16, "--json").output)["rows"]
    assert (rows[0]["settings"], rows[0]["draws"]) == ("sampler=stratified,compose=mixed", 16)
    assert len(rows) == 4


def test_how_often_an_epoch_repeats_each_bucket_is_counted(cache) -> None:
    """Once in the natural mix; with equal shares, as the epoch's tokens divide."""
    settings = [f"{SMALL},mix=uniform", f"{SMALL},mix=uniform,epoch-size=6000", SMALL]
    flags = [word for text in settings for word in ("--settings", text)]
    output = sample(cache, *flags, "--ranks", 2, "--draws", 60).output
    rows = json.loads(sample(cache, *flags, "--ranks", 2, "--draws", 60, "--json").output)["rows"]
    tokens = [sum(n for n in LENGTHS if low < n <= edge) for low, edge in ((0, 16), (16, 32), (32, 64))]
    assert rows[0]["passes_by_bucket"] == pytest.approx([sum(tokens) / 3 / held for held in tokens])
    assert rows[1]["passes_by_bucket"] == pytest.approx([2000 / held for held in tokens])
    assert rows[2]["passes_by_bucket"] == [1.0, 1.0, 1.0]
    assert f"B  16: {2000 / tokens[0]:.2f}  32: {2000 / tokens[1]:.2f}  64: {2000 / tokens[2]:.2f}" in output
    assert "C  16: " not in output


def drawn_by_training(cache, out, share: float, config: SamplerConfig, steps: int) -> tuple[Corpus, list]:
    """What a training knows of the samples, and the rows of its first steps, by micro-batch."""
    settings = tiny_config(cache, out, holdout=HoldoutConfig(share), sampler=config)
    run = Run.open(settings, World())
    drawn = [[[draw.row for draw in batch] for batch in step.batches] for step in islice(run.sampler, steps)]
    return run.corpus, drawn


@pytest.mark.parametrize("compose", ["mixed", "bucketed"])
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.35])
def test_the_plan_is_what_training_draws(cache, tmp_path, share, seed, compose) -> None:
    text = f"{SMALL},compose={compose},seed={seed},min-ready=1,max-ready=4"
    config = parse_variant(text).config
    corpus, drawn = drawn_by_training(cache, tmp_path / "run", share, config, 30)
    manifest = load_manifest(cache)
    planned = Sampler(trained_corpus(open_index(cache, manifest), manifest, HoldoutConfig(share)), config)
    assert [[[draw.row for draw in batch] for batch in step.batches] for step in islice(planned, 30)] == drawn
    flags = ["--settings", text, "--holdout", share, "--ranks", 2, "--draws", 60, "--json"]
    report = json.loads(sample(cache, *flags).stdout)
    expected = figures(trace(drawn, corpus, config.packing, 2), np.array(planned.quota)).to_json()
    shown = {name: report["rows"][0][name] for name in expected}
    assert shown == json.loads(json.dumps(expected))
    held_out = f" ({40 - len(corpus)} held out)" if share else ""
    assert f"{len(corpus)} samples{held_out}, {corpus.lengths.sum():,} tokens" in report["header"]


def test_as_much_is_held_out_as_in_training_unless_told_otherwise(cache) -> None:
    defaults = {
        name: parameter.default
        for name in ("sample", "train")
        for parameter in cli.commands[name].params
        if parameter.name == "holdout"
    }
    assert defaults == {"sample": 0.02, "train": 0.02}
    assert small(cache).stdout == small(cache, "--holdout", 0.02).stdout


def test_losses_by_bucket_predict_a_roughness(cache, tmp_path) -> None:
    write_run(tmp_path / "run", [1.0, None, 3.0], [16, 32, 64])
    mixed, queue = json.loads(small(cache, "--losses", tmp_path / "run", "--json").output)["rows"]
    assert 0 < mixed["roughness"] < queue["roughness"]


def test_a_run_with_other_buckets_is_refused(cache, tmp_path) -> None:
    write_run(tmp_path / "run", [1.0, 3.0], [16, 64])
    result = small(cache, "--losses", tmp_path / "run")
    assert result.exit_code == 2
    assert "[16, 64]" in result.output
    assert "[16, 32, 64]" in result.output


@pytest.mark.parametrize("name", ["mix.png", "mix.svg", "mix.html"])
def test_the_picture_is_written_in_the_format_of_its_name(cache, tmp_path, name: str) -> None:
    assert small(cache, "--plot", tmp_path / name).exit_code == 0
    data = (tmp_path / name).read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype"}[name.split(".")[1]])
    assert (b"<svg" in data) == (name != "mix.png")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--settings", "min-redy=3"], ["'min-redy'"]),
        (
            ["--settings", "tokens-per-batch=32"],
            ["tokens-per-batch=32", "60 tokens", "--tokens-per-batch 60"],
        ),
        (["--ranks", "3"], ["--batches-per-step 8", "3 ranks"]),
        (["--ranks", "9", "--draws", "8"], ["--ranks 9", "--draws 8"]),
        (["--holdout", "1"], ["--holdout 1.0", "[0, 1)"]),
        (["--holdout", "0.999"], ["no samples to draw", "smaller --holdout"]),
        (["--producer", "fastest"], ["--producer fastest"]),
        (["--plot", "mix.pdf"], ["mix.pdf", ".png"]),
        (["--plot", "no/such/folder.png"], ["no/such"]),
        (["--losses", "nowhere"], ["nowhere is not a run"]),
    ],
)
def test_bad_input_is_one_line(cache, arguments: list[str], words: list[str]) -> None:
    result = sample(cache, *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_what_is_no_cache_is_refused(tmp_path) -> None:
    assert "is not a cache" in sample(tmp_path).stderr


def test_a_picture_without_matplotlib_says_how_to_get_it(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = small(cache, "--plot", tmp_path / "mix.png")
    assert result.exit_code == 2
    assert "dflash-trainer[plot]" in result.stderr
