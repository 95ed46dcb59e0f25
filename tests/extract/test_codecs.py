"""Extracting in a codec: scales frozen once for all ranks and runs, losses measured by the target itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from chat_families import dialogue, write_jsonl
from click.testing import CliRunner
from extract_runs import exit_codes, same, samples_of, start_ranks
from support import write_target

from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.info import cache_info, format_info
from dflash.cache.manifest import load_manifest
from dflash.cli import cli
from dflash.errors import CacheMismatch, ConfigError, TargetError
from dflash.extract import codec_probe
from dflash.extract.codec_probe import target_logits, target_states
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.extract.preview import preview
from dflash.target import Target
from dflash.world import World


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target", hidden=64)


@pytest.fixture
def config(tmp_path, target, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return config_of(tmp_path, target)


def config_of(folder, target):
    rows = [{"messages": dialogue(f"question {n}", "word " * (1 + 5 * n % 17))} for n in range(17)]
    return ExtractConfig(
        target=str(target),
        data=(write_jsonl(folder / "data.jsonl", *rows),),
        out=folder / "cache",
        taps=(0, 2, 4),
        max_length=128,
        bucket_edges=(64, 128),
        tokens_per_batch=256,
        shard_bytes=30_000,
    )


def test_a_target_that_is_too_large_to_be_probed_is_one_line_that_names_other_codecs(config, monkeypatch):
    def full(*arguments, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(codec_probe, "Target", full)
    with pytest.raises(TargetError, match=r"^--codec int8 is tried out .* use --codec lossless or raw$"):
        extract(in_codec(config, "int8"), World())


def in_codec(config, codec):
    return replace(config, codec=codec, out=config.out.parent / codec)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, target):
    """A cache of each codec, to look at only."""
    config = config_of(tmp_path_factory.mktemp("finished"), target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(config.out.parent / "home"))
        patch.setattr(codec_probe, "PROBE_TOKENS", 256)
        return {codec: extract(in_codec(config, codec), World()).cache for codec in CODECS}


def test_every_codec_holds_the_states_of_raw_as_closely_as_it_promises(finished):
    exact = samples_of(finished["raw"])
    for codec, bound in (("lossless", 0.0), ("int8", 0.012), ("fp8", 0.03)):
        found = samples_of(finished[codec])
        assert load_manifest(finished[codec]).complete
        assert found.keys() == exact.keys()
        assert codec != "lossless" or same(found, exact)
        for key, sample in exact.items():
            error = (found[key].hidden_states.float() - sample.hidden_states.float()).norm(dim=-1)
            assert float((error / sample.hidden_states.float().norm(dim=-1)).median()) <= bound


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_the_probe_says_what_the_codec_costs_and_info_shows_it(finished, codec):
    error = load_manifest(finished[codec]).codec_error
    assert len(error.relative_error) == len(error.escaped) == len(error.kl) == 3
    assert 0.001 < min(error.relative_error) <= max(error.relative_error) < 0.03
    assert 0 < max(error.kl) < 0.02
    info = cache_info(finished[codec])
    assert info["codec_error"]["kl"] == error.kl
    assert "KL by tap" in format_info(info)
    assert json.loads(json.dumps(info))["identity"]["codec"] == codec


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_probed_without_need_and_scales_are_int8s_alone(finished, codec):
    manifest = load_manifest(finished[codec])
    assert (manifest.codec_error is None) == (codec not in LOSSY_CODECS)
    assert (manifest.channel_scales is None) == (codec != "int8")


def test_a_codec_that_changes_the_target_too_much_is_refused_before_anything_is_written(config):
    strict = replace(in_codec(config, "fp8"), max_divergence=1e-9)
    with pytest.raises(
        TargetError, match=r"--codec fp8 changes .* behind layer \d, .*--max-divergence 1e-09"
    ):
        extract(strict, World())
    assert not strict.out.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_and_a_resumed_run_use_the_scales_that_were_frozen_first(
    config, finished, monkeypatch, ranks
):
    whole, first = samples_of(finished["int8"]), load_manifest(finished["int8"])
    begun = in_codec(config, "int8")
    monkeypatch.setattr("dflash.extract.pipeline._work", _dies)
    with pytest.raises(RuntimeError, match="stopped at once"):
        extract(begun, World())
    monkeypatch.undo()
    monkeypatch.setenv("DFLASH_HOME", str(config.out.parent / "home"))
    monkeypatch.setattr(codec_probe, "_probed", _dies)  # a second calibration might find other scales
    if ranks == 1:
        extract(begun, World())
    else:
        assert exit_codes(start_ranks(begun, ranks)) == [0] * ranks
    assert load_manifest(begun.out).channel_scales == first.channel_scales
    assert same(samples_of(begun.out), whole)


def _dies(*_arguments):
    raise RuntimeError("stopped at once")


def test_a_cache_of_another_codec_is_not_resumed(config, finished):
    for codec in CODECS[1:]:
        with pytest.raises(CacheMismatch, match="codec"):
            extract(replace(config, out=finished["raw"], codec=codec), World())


def test_data_is_appended_in_the_codec_and_with_the_scales_that_are_there(config, finished, tmp_path):
    coded = in_codec(config, "int8")
    shutil.copytree(finished["int8"], coded.out)
    before = load_manifest(coded.out)
    more = write_jsonl(tmp_path / "more.jsonl", {"messages": dialogue("another", "answer " * 9)})
    extract(replace(coded, data=(more,), append=True), World())
    after = load_manifest(coded.out)
    assert after.channel_scales == before.channel_scales
    assert after.codec_error == before.codec_error
    assert len(samples_of(coded.out)) == 18


def test_putting_exact_states_back_changes_nothing_and_wrong_ones_do(target):
    whole = Target(str(target), (0, 2, 4), dtype=torch.float32, device=torch.device("cpu"))
    ids = torch.arange(5, 45)
    states, expected = target_states(whole, ids), target_logits(whole, ids)
    assert states.shape == (40, 3, 64)
    for k, tap in enumerate(whole.taps):
        assert torch.equal(target_logits(whole, ids, {tap: states[:, k]}), expected)
        assert not torch.allclose(
            target_logits(whole, ids, {tap: states[:, k] * 1.5 + 1}), expected, atol=1e-2
        )
    assert torch.equal(target_logits(whole, ids), expected)  # nothing is left behind


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"codec": "zip"}, "zip"),
        ({"codec": "int8", "dtype": "float32"}, "bfloat16"),
        ({"codec": "fp8", "tp": 2}, "transcode"),
        ({"codec": "fp8", "max_divergence": 0.0}, "above 0"),
        ({"codec": "fp8", "max_divergence": float("nan")}, "above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(config, change, text):
    with pytest.raises(ConfigError, match=text):
        replace(config, **change)


def test_a_plan_shows_every_codecs_size_and_which_are_estimates(config):
    lines = preview(replace(config, codec="fp8")).text().splitlines()
    sizes = {line.split()[0]: line for line in lines if "bytes/token" in line}
    assert list(sizes) == list(CODECS)
    assert "389 bytes/token" in sizes["raw"]  # 3 taps x 64 x 2, and 5 beside the states
    assert "203 bytes/token" in sizes["fp8"]  # 3 taps x (64 + 2), and 5
    assert [codec for codec in CODECS if "estimated" in sizes[codec]] == ["lossless", "int8"]
    assert [codec for codec in CODECS if "<- --codec" in sizes[codec]] == ["fp8"]
    assert "lossless" not in preview(replace(config, dtype="float32")).text()


def test_the_command_takes_the_codec_and_names_those_there_are(config):
    flags = ["--target", config.target, "--data", *config.data, "--out", str(config.out), "--taps", "0,2"]
    flags += ["--max-length", "128"]
    done = CliRunner().invoke(cli, ["extract", *flags, "--codec", "int8"])
    assert done.exit_code == 0, done.output
    assert load_manifest(config.out).identity.codec == "int8"
    wrong = CliRunner().invoke(cli, ["extract", *flags, "--codec", "zip"])
    assert wrong.exit_code == 2
    assert "lossless" in wrong.output
