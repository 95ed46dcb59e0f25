"""Training beside the real extraction that fills its cache: it stalls, dies, or takes the longest first."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from chat_families import dialogue, write_jsonl
from extract_runs import exit_codes, run_rank, start_ranks
from support import write_target

from dflash.cache import growing
from dflash.cache.fragment import fragment_path
from dflash.cache.index import load_index
from dflash.cache.manifest import load_manifest
from dflash.cache.planned import load_planned
from dflash.errors import SourceStarved
from dflash.extract.capture import Capturer
from dflash.extract.pipeline import ExtractConfig
from dflash.train.batches import AnchorConfig
from dflash.train.config import TrainConfig
from dflash.train.follow_log import LOG_NAME
from dflash.train.following import FollowConfig
from dflash.train.holdout import HoldoutConfig
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.sampler import SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
EDGES = (64, 96, 160)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """An extraction of about sixty samples in many small shards."""
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(growing, "_QUIET_S", 0.0)
    rows = [{"messages": dialogue(f"q{n}", "word " * (1 + 5 * n % 23))} for n in range(60)]
    data = write_jsonl(tmp_path / "data.jsonl", *rows)
    target = write_target(tmp_path / "target", layers=3)
    small = {"tokens_per_batch": 200, "dtype": "float32", "shard_bytes": 40_000, "order": "mixed"}
    return ExtractConfig(str(target), (data,), tmp_path / "cache", (0, 2), 160, EDGES, **small)


def slow_rank(config: ExtractConfig, world: World) -> None:
    """An extraction that takes its time for each batch."""
    real = Capturer.start

    def start(self, rows):
        time.sleep(0.03)
        return real(self, rows)

    Capturer.start = start
    run_rank(config, world)


def overlapping_rank(config: ExtractConfig, world: World) -> None:
    """An extraction that has not finished before training has begun."""
    real, log = Capturer.start, config.out.with_name("run") / LOG_NAME
    batches = iter(range(1000))

    def start(self, rows):
        late = next(batches) >= 20
        while late and (not log.exists() or log.read_text().count("\n") < 2):
            time.sleep(0.01)
        return real(self, rows)

    Capturer.start = start
    run_rank(config, world)


def run_of(config: ExtractConfig, **changes) -> TrainConfig:
    run = TrainConfig(
        config.out,
        config.out.with_name("run"),
        network=NetworkConfig(1, 4),
        anchors=AnchorConfig(64, 0.5),
        objective=ObjectiveConfig(4),
        sampler=SamplerConfig(tokens_per_batch=200, batches_per_step=2, min_ready=3, max_ready=9),
        epochs=1,
        holdout=HoldoutConfig(0.0),
        follow=FollowConfig(),
    )
    return replace(run, **changes)


def record_of(run: TrainConfig) -> list[dict]:
    return [json.loads(line) for line in (run.out / LOG_NAME).read_text().splitlines()][1:]


def test_a_run_follows_a_real_extraction_and_sees_all_of_it_once(config):
    (process,) = ranks = start_ranks(config, 1, overlapping_rank)
    run = run_of(config, epochs=2)
    result = train(run, World())
    assert exit_codes(ranks) == [0]
    index = load_index(config.out, load_manifest(config.out))
    assert result.tokens == 2 * int(index.lengths.sum())
    assert load_planned(config.out, EDGES).tokens == tuple(
        int(index.lengths[index.buckets == bucket].sum()) for bucket in range(3)
    )
    assert sum(bool(decision.get("parts")) for decision in record_of(run)) > 1
    assert process.exitcode == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_extraction_that_stalls_or_dies_ends_the_run_and_one_that_goes_on_lets_it_finish(config, number):
    (process,) = ranks = start_ranks(config, 1, slow_rank)

    def strike():
        while not (config.out / "index").is_dir() or len(list((config.out / "index").iterdir())) < 12:
            time.sleep(0.01)
        os.kill(process.pid, number)

    striking = threading.Thread(target=strike)
    striking.start()
    run = run_of(config, follow=FollowConfig(max_wait=0.8))
    with pytest.raises(SourceStarved, match="has not delivered"):
        train(run, World())
    striking.join()
    if number == signal.SIGSTOP:
        os.kill(process.pid, signal.SIGCONT)
        restarted = ranks
    else:
        assert exit_codes(ranks) == [-signal.SIGKILL]
        restarted = start_ranks(config, 1, run_rank)
    result = train(replace(run, resume=True, follow=FollowConfig()), World())
    assert exit_codes(restarted) == [0]
    assert result.tokens == int(load_index(config.out, load_manifest(config.out)).lengths.sum())


def test_an_extraction_that_delivers_the_longest_first_is_waited_for_until_all_lengths_are_there(config):
    config = replace(config, order="longest-first")
    ranks = start_ranks(config, 1, slow_rank)
    run = run_of(config)
    result = train(run, World())
    assert exit_codes(ranks) == [0]
    manifest = load_manifest(config.out)
    names = [name for part in record_of(run)[0]["parts"] for name in part]
    first = load_index(config.out, manifest, [fragment_path(config.out, name) for name in names])
    assert set(first.buckets.tolist()) == {0, 1, 2}
    assert len(np.unique(load_index(config.out, manifest).buckets)) == 3
    assert result.tokens == int(load_index(config.out, manifest).lengths.sum())
