"""`--plan` tells what a run will do, from the corpus and the target's configuration alone."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from chat_families import dialogue, write_jsonl
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support import write_target

from dflash.cli import cli
from dflash.errors import ConfigError
from dflash.extract import space
from dflash.extract.pipeline import extract
from dflash.extract.preview import histogram, plain_waste, preview, suggested_edges
from dflash.extract.settings import ExtractConfig
from dflash.extract.space import bytes_needed, free_space
from dflash.world import World

lengths_ = st.lists(st.integers(1, 3000), min_size=1, max_size=200).map(lambda x: np.asarray(x, np.int32))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def config(tmp_path, target, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    rows = [{"messages": dialogue(f"question {n}", "word " * (1 + 7 * n % 40))} for n in range(40)]
    data = write_jsonl(tmp_path / "data.jsonl", *rows, {"messages": dialogue("unanswered")})
    return ExtractConfig(
        str(target), (data,), tmp_path / "new" / "cache", (0, 2), 256, (64, 128, 256), dtype="float32"
    )


def test_the_plan_is_what_the_run_then_does(config):
    planned = preview(config)
    done = extract(config, World())
    assert (planned.tokens, len(planned.lengths)) == (done.tokens, done.samples)
    assert planned.pad_share == pytest.approx(done.pad_share)
    assert planned.dropped == done.dropped == {"no_assistant_turn": 1}
    assert sum(samples for _, samples, _ in planned.buckets()) == done.samples
    assert sum(tokens for _, _, tokens in planned.buckets()) == done.tokens
    # Headers of shards and fragments are all that the estimate leaves out; here they are most of it.
    files = [path for folder in ("shards", "index") for path in (config.out / folder).rglob("*.*")]
    written = sum(path.stat().st_size for path in files)
    assert planned.bytes_needed <= written <= planned.bytes_needed + 4096 * len(files)


def test_the_plan_loads_no_weights_and_touches_nothing(config, target, tmp_path):
    bare = shutil.copytree(target, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    flags = ["--target", str(bare), "--data", *config.data, "--out", str(config.out), "--taps", "0,2"]
    result = CliRunner().invoke(cli, ["extract", *flags, "--max-length", "256", "--plan"])
    assert result.exit_code == 0, result.output
    for words in (
        "samples  40 (rows left out: 1 no_assistant_turn)",
        "133 bytes/token",
        "--bucket-edges ",
        "not measured; add --probe",
        "batches of 32 in file order",
    ):
        assert words in result.output
    assert not config.out.parent.exists()


def test_a_probe_measures_the_target(config):
    probed = preview(config, probe_seconds=0.05)
    assert probed.speed.tokens_per_s > 0
    assert probed.speed.seconds < 5
    assert "tokens/s; measured in" in probed.text()


def test_a_disk_that_is_too_small_is_named(config, monkeypatch):
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: space.shutil._ntuple_diskusage(9, 9, 1000))
    assert "NOT ENOUGH" in preview(config).text()
    with pytest.raises(ConfigError, match=r"are still to be written, 0\.0 GB are free; .*--force"):
        extract(config, World())
    assert extract(replace(config, force=True), World()).samples == 40


@given(lengths_, st.integers(1, 8))
def test_suggested_edges_share_the_tokens_evenly(lengths, count):
    """No bucket is heavier than its share, but for one sample's tokens and the rounding to round numbers."""
    edges = suggested_edges(lengths, count, 3072)
    assert list(edges) == sorted(set(edges))
    assert edges[-1] == 3072
    assert len(edges) <= count
    if len(edges) == count and count > 1:
        below = lengths[lengths <= edges[0]].sum()
        assert below >= lengths.sum() // count


def test_suggested_edges_of_a_real_spread_are_even():
    lengths = np.random.default_rng(0).lognormal(5.8, 0.9, 20_000).clip(8, 3072).astype(np.int32)
    number = np.searchsorted(suggested_edges(lengths, 5, 3072), lengths)
    mass = np.bincount(number, weights=lengths) / lengths.sum()
    assert mass.max() < 0.24
    assert mass.min() > 0.16


@given(lengths_)
def test_the_histogram_counts_every_sample_in_few_short_lines(lengths):
    title, *lines = histogram(lengths)
    assert sum(int(line.split()[1].replace(",", "")) for line in lines) == len(lengths)
    assert len(lines) <= 24
    assert max(map(len, [title, *lines])) <= 80


def test_plain_batches_waste_what_they_pad():
    assert plain_waste(np.asarray([10, 5, 1, 1], np.int32), 2) == pytest.approx(1 - 17 / 22)
    assert plain_waste(np.asarray([7], np.int32), 32) == 0.0


def test_space_is_found_where_nothing_exists_yet(tmp_path):
    assert free_space(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert bytes_needed([], 100) == 0
    assert bytes_needed([3, 4], 100) == 7 * 105 + 2 * 56
