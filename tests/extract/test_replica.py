"""`--tp`: ranks that hold the target together fill the cache that one alone fills."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_families import dialogue, write_jsonl
from extract_runs import exit_codes, samples_of, start_ranks
from support import write_target
from target_families import FAMILIES, write_family
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from dflash import board as board_module
from dflash.cache.manifest import load_manifest
from dflash.errors import ConfigError, DflashError, RankFailed, TargetError
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.extract.preview import preview
from dflash.extract.replica import Replica, ReplicaTarget
from dflash.lifeline import lifeline
from dflash.target import TruncatedTarget, tapped
from dflash.world import World

# Ranks are forked: several imports of torch would cost more than all the rest.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SAMPLES, LAYERS, HIDDEN, TAPS = 30, 3, 32, (0, 2)
LENGTHS = (9, 5)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """4 heads, 2 key/value heads."""
    return write_target(tmp_path_factory.mktemp("models") / "target", layers=LAYERS, hidden=HIDDEN)


@pytest.fixture
def config(tmp_path, target, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return config_of(tmp_path, target)


def config_of(folder, target):
    rows = [{"messages": dialogue(f"question {n}", "word " * (1 + 5 * n % 23))} for n in range(SAMPLES)]
    data = write_jsonl(folder / "data.jsonl", *rows)
    return ExtractConfig(
        str(target), (data,), folder / "cache", TAPS, 160, (64, 160), 2, 200, "float32", 12_000, tp=2
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target):
    """What one rank alone extracts."""
    alone = replace(config_of(tmp_path_factory.mktemp("whole"), target), tp=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(alone.out.parent / "home"))
        extract(alone, World())
    return samples_of(alone.out)


def assert_same_within_rounding(cache, whole):
    samples = samples_of(cache)
    assert samples.keys() == whole.keys()
    for number, sample in samples.items():
        assert np.array_equal(sample.input_ids, whole[number].input_ids)
        assert np.array_equal(sample.loss_mask, whole[number].loss_mask)
        torch.testing.assert_close(sample.hidden_states, whole[number].hidden_states, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_fill_the_cache_of_one_rank_and_only_their_first_ranks_write(config, whole, size):
    """Also two replicas at once, which share the work."""
    assert exit_codes(start_ranks(config, size)) == [0] * size
    manifest = load_manifest(config.out)
    assert manifest.complete
    assert manifest.expected_samples == SAMPLES == len(whole)
    assert_same_within_rounding(config.out, whole)
    writers = {path.name.split("-")[0] for path in config.out.glob("shards/*/*")}
    assert writers <= {f"rank{first}" for first in range(0, size, 2)}
    assert "rank0" in writers


def check_streams(config, world):
    """Hooks get plain whole streams, equal to those of a rank alone, though the weights are split."""
    replica, ids = Replica(world, 2), [np.arange(4, 4 + n, dtype=np.int32) for n in LENGTHS]
    options = {"dtype": torch.float32, "device": CPU}
    expected = torch.empty(sum(LENGTHS), len(TAPS), HIDDEN)
    TruncatedTarget(config.target, TAPS, **options).capture(ids, expected)
    with replica.joined("test") as board, board.telling_failure(), lifeline(board) as line:
        target = ReplicaTarget(config.target, TAPS, replica=replica, line=line, **options)
        split = [p for p in target.model.layers.parameters() if isinstance(p, DTensor)]
        assert config.target.endswith("gpt-oss") or any(2 * p.to_local().numel() == p.numel() for p in split)
        seen, out = [], torch.empty_like(expected)
        with tapped(target.model.layers, TAPS, lambda _, output: seen.append(output)):
            if replica.is_first:
                target.capture(ids, out)
                target.dismiss()
            else:
                target.follow(lambda: None)
        assert [type(output) for output in seen] == [torch.Tensor] * len(TAPS)
        assert {output.shape for output in seen} == {(len(LENGTHS), max(LENGTHS), HIDDEN)}
        streams = torch.stack(seen, dim=2)
        got = torch.cat([stream[:length] for stream, length in zip(streams, LENGTHS, strict=True)])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert not replica.is_first or torch.equal(out, got)


def test_taps_are_whole_streams_on_every_rank_of_a_replica(config):
    assert exit_codes(start_ranks(config, 2, check_streams)) == [0, 0]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_streams_of_one_rank(tmp_path, config, name):
    family = write_family(tmp_path / name, name)
    assert exit_codes(start_ranks(replace(config, target=str(family)), 2, check_streams)) == [0, 0]


def slowed(monkeypatch):
    """Let every batch take so long that a test can act meanwhile."""
    forward = TruncatedTarget._capture_padded  # what both ranks of a replica come to

    def slow(*args):
        time.sleep(0.05)
        forward(*args)

    monkeypatch.setattr(TruncatedTarget, "_capture_padded", slow)


def started(config, run):
    ranks = start_ranks(config, 2, run)
    while not list(config.out.glob("shards/*/*")):
        assert all(process.is_alive() for process in ranks)
        time.sleep(0.01)
    return ranks


def run_stopped(config, world):
    raise SystemExit(40 if extract(config, world).stopped == "SIGTERM" else 41)


def test_a_signal_to_a_rank_that_follows_stops_its_replica_and_tp_may_change_between(
    config, whole, monkeypatch
):
    slowed(monkeypatch)
    ranks = started(replace(config, shard_bytes=1 << 30), run_stopped)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert exit_codes(ranks, 20) == [40, 40]
    assert 0 < len(samples_of(config.out, allow_incomplete=True)) < SAMPLES
    monkeypatch.undo()
    monkeypatch.setenv("DFLASH_HOME", str(config.out.parent / "home"))
    extract(replace(config, tp=1), World())
    assert_same_within_rounding(config.out, whole)


def run_bereft(config, world):
    try:
        extract(config, world)
    except DflashError as error:
        expected = r"rank 1 is gone; it was at [^\n]*; run the same command again"
        raise SystemExit(42 if re.match(expected, str(error)) else 43) from error


def test_a_killed_rank_ends_its_replica(config, whole, monkeypatch):
    slowed(monkeypatch)
    monkeypatch.setattr(board_module, "_FAREWELL_S", 0.5)  # the dead one will not take its leave
    ranks = started(config, run_bereft)
    ranks[1].kill()
    assert exit_codes(ranks, 20) == [42, -signal.SIGKILL]
    monkeypatch.undo()
    monkeypatch.setenv("DFLASH_HOME", str(config.out.parent / "home"))
    assert exit_codes(start_ranks(config, 2)) == [0, 0]
    assert_same_within_rounding(config.out, whole)


def run_short_of_memory(config, world):
    """The second rank has too little memory for its second batch."""
    forward, calls = TruncatedTarget._capture_padded, []

    def scarce(*args):
        calls.append(1)
        if world.rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        forward(*args)

    TruncatedTarget._capture_padded = scarce
    try:
        extract(config, world)
    except RankFailed as error:
        told = "rank 1 has failed: the memory of cpu does not suffice for a batch of" in str(error)
        raise SystemExit(44 if told else 45) from error
    except DflashError as error:
        raise SystemExit(46 if "set a lower --tokens-per-batch" in str(error) else 47) from error


def test_too_little_memory_on_one_rank_ends_its_replica_with_what_to_do(config):
    assert exit_codes(start_ranks(config, 2, run_short_of_memory), 20) == [44, 46]


def run_with_a_fault(config, world):
    """The first rank sees NaN in its third batch, once."""
    capture, calls = TruncatedTarget.capture, []

    def faulty(self, sequences, out):
        capture(self, sequences, out)
        calls.append(1)
        if world.rank == 0 and len(calls) == 3:
            out[0] = float("nan")

    TruncatedTarget.capture = faulty
    extract(config, world)


def test_a_sample_that_is_run_again_is_run_by_the_whole_replica(config, whole):
    assert exit_codes(start_ranks(config, 2, run_with_a_fault)) == [0, 0]
    assert_same_within_rounding(config.out, whole)


def run_without_a_plan(config, world):
    LlamaConfig.base_model_tp_plan = None
    try:
        extract(config, world)
    except TargetError as error:
        raise SystemExit(48 if "has no `tp_plan`" in str(error) and "\n" not in str(error) else 49) from error


def test_a_family_that_transformers_cannot_split_is_refused_in_one_line(config):
    assert exit_codes(start_ranks(config, 2, run_without_a_plan), 20) == [48, 48]


@pytest.mark.parametrize(("size", "tp"), [(1, 2), (3, 2), (8, 3)])
def test_ranks_that_do_not_make_whole_replicas_are_refused(config, size, tp):
    with pytest.raises(ConfigError, match=rf"--tp {tp} does not divide the number of processes, {size};"):
        extract(replace(config, tp=tp), World(0, size, 0))


def test_heads_that_cannot_be_shared_out_are_refused(config):
    with pytest.raises(ConfigError, match="--tp 4 does not divide the target's 2 num_key_value_heads"):
        TruncatedTarget(config.target, TAPS, dtype=torch.float32, device=CPU, tp=4)


def test_a_probe_on_one_process_is_refused_and_a_plan_is_not(config):
    assert preview(config).tokens > 0
    with pytest.raises(ConfigError, match="--probe runs the target on one process, and --tp 2"):
        preview(config, probe_seconds=1.0)
    with pytest.raises(ConfigError, match="--tp 0 must be at least 1"):
        replace(config, tp=0)
