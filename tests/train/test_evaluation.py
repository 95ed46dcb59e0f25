"""Held-out samples are never trained on, are walked through in between, and tell which checkpoint is best."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import write_cache
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained

from dflash.cache.reader import CacheReader
from dflash.cache.subset import subset
from dflash.errors import CacheCorrupt, ConfigError
from dflash.head import HEAD_NAME, TargetHead
from dflash.pretrained import load_drafter
from dflash.train.checkpoint import (
    BEST_NAME,
    FOLDER,
    TENSORS_NAME,
    best_checkpoint,
    checkpoints,
    resolve_drafter,
)
from dflash.train.evaluation import Best, Evaluator
from dflash.train.holdout import HoldoutConfig, split
from dflash.train.record import METRICS_NAME, RunLog
from dflash.train.run import Run
from dflash.train.run_comparison import compare_runs
from dflash.train.runs import load_run
from dflash.train.trainer import train
from dflash.world import World

ALONE = World()
HELD = HoldoutConfig(0.35)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return write_cache(tmp_path_factory.mktemp("evaluation") / "cache", LENGTHS)


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory) -> Path:
    """A run of 8 steps that walked every 3."""
    config = tiny_config(cache, tmp_path_factory.mktemp("held") / "run", holdout=HELD, eval_every=3)
    train(config, ALONE)
    return config.out


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]


def walks(run: Path) -> list[dict]:
    found = [line for line in lines(run) if line.get("kind") == "evaluation"]
    return [{key: value for key, value in line.items() if key != "walk_seconds"} for line in found]


ids = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=80, unique=True).map(
    lambda values: np.array(values, np.uint64)
)


@given(ids, st.floats(0, 0.99), st.integers(1, 50))
def test_every_sample_is_trained_on_or_held_out_and_neighbours_do_not_matter(found, share, cap) -> None:
    rows, held = split(found, HoldoutConfig(share, 100))
    assert sorted([*rows, *held]) == list(range(len(found)))
    for row, sample in enumerate(found):
        alone, _ = split(np.array([sample]), HoldoutConfig(share))
        assert len(alone) == (row in rows)
    capped_rows, capped = split(found, HoldoutConfig(share, cap))
    assert np.array_equal(capped_rows, rows)
    assert set(capped) <= set(held)
    assert len(capped) == min(cap, len(held))


def test_the_share_is_what_was_asked_for_whatever_the_ids_look_like() -> None:
    for found in (np.arange(50_000), np.arange(50_000) << 20):
        rows, _ = split(found.astype(np.uint64), HoldoutConfig(0.02))
        assert 49_000 - 150 < len(rows) < 49_000 + 150  # five standard deviations


def test_what_is_held_out_is_never_drawn(cache, tmp_path) -> None:
    run = Run.open(tiny_config(cache, tmp_path / "run", holdout=HELD, epochs=2, max_steps=None), ALONE)
    whole = CacheReader(cache).index.ids
    rows, held = split(whole, HELD)
    assert len(held) > 1
    drawn = {
        int(run.reader.index.ids[draw.row])
        for step in run.sampler
        for batch in step.batches
        for draw in batch
    }
    assert drawn == set(whole[rows].tolist())
    samples = run.reader.read(range(len(rows)))
    assert [sample.id for sample in samples] == whole[rows].tolist()
    originals = CacheReader(cache).read(rows)
    assert all(torch.equal(a.hidden_states, b.hidden_states) for a, b in zip(samples, originals, strict=True))


def test_a_walk_is_a_line_where_asked_and_at_the_end(cache, finished) -> None:
    found = walks(finished)
    assert [line["step"] for line in found] == [3, 6, 8]
    buckets = CacheReader(cache).index.buckets[split(CacheReader(cache).index.ids, HELD)[1]]
    for line in found:
        assert 1 <= line["walk_tau"] <= 4
        assert line["walk_tau"] == line["walk_tokens"] / line["walk_cycles"]
        assert 1 <= line["heldout_anchor_tau"] <= 4
        assert len(line["heldout_accuracy"]) == 3
        assert line["heldout_samples"] == len(buckets)
        present = [value is not None for value in line["walk_tau_by_bucket"]]
        assert present == [bucket in buckets for bucket in range(3)]
    assert [line["step"] for line in lines(finished) if "kind" not in line] == list(range(1, 9))


def test_a_walk_changes_nothing_of_the_training(cache, finished, tmp_path) -> None:
    config = tiny_config(cache, tmp_path / "run", holdout=HELD, eval_every=1)
    quiet = train(config, ALONE).checkpoint
    assert same(trained(quiet), trained(checkpoints(finished)[0]))
    assert len(walks(config.out)) == 8


def test_readers_of_a_run_keep_walks_and_steps_apart(cache, finished, tmp_path) -> None:
    run = load_run(finished)
    assert len(run.steps) == 8
    assert [line["step"] for line in run.evaluations] == [3, 6, 8]
    other = train(tiny_config(cache, tmp_path / "run"), ALONE).checkpoint.parents[1]
    assert compare_runs([finished, other]).figures["steps"] == [8, 8]


def test_after_a_crash_walks_are_recorded_once(cache, finished, tmp_path, monkeypatch) -> None:
    config = tiny_config(cache, tmp_path / "run", holdout=HELD, eval_every=3, save_every=4)
    real = RunLog.add

    def add(self, figures, *rest):
        real(self, figures, *rest)
        if figures["step"] == 7:
            raise RuntimeError("the machine went down")

    monkeypatch.setattr(RunLog, "add", add)
    with pytest.raises(RuntimeError):
        train(config, ALONE)
    monkeypatch.undo()
    assert [line["step"] for line in walks(config.out)] == [3, 6]
    train(replace(config, resume=True), ALONE)
    assert walks(config.out) == walks(finished)


def test_another_share_is_refused_when_a_run_is_resumed(cache, finished) -> None:
    config = tiny_config(cache, finished, holdout=HoldoutConfig(0.5), resume=True)
    with pytest.raises(ConfigError, match=r"holdout\.share: was 0\.35, now 0\.5"):
        train(config, ALONE)


def evaluated(rank: int, size: int, cache: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = CacheReader(cache)
    held = subset(reader, split(reader.index.ids, HoldoutConfig(0.7))[1])
    evaluator = Evaluator(held, TargetHead.load(cache / HEAD_NAME), World(rank, size), torch.device("cpu"))
    figures = evaluator.walk(load_drafter(checkpoint).float())
    numbers = [figures["walk_tau"], figures["heldout_anchor_tau"], figures["heldout_responses"]]
    return {"figures": torch.tensor([*numbers, *figures["heldout_accuracy"]], dtype=torch.float64)}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ranks_share_the_work_and_agree_on_the_figures(cache, finished, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dflash.train.walk.PASS_SLOTS", 100)  # several passes, and a rank with none left

    def hits(_drafter, _head, batch, limits):  # tiny runs learn nothing that shows
        return torch.minimum(limits, batch.block_positions[:, 0] % 4)

    monkeypatch.setattr("dflash.train.walk._leading_hits", hits)
    checkpoint = checkpoints(finished)[0]
    alone = evaluated(0, 1, cache, checkpoint)["figures"]
    assert alone.isfinite().all()
    assert alone[0] > 1.5
    for ours in run_ranks(tmp_path / "ranks", 3, evaluated, cache, checkpoint):
        assert torch.equal(ours["figures"], alone)


def scripted(monkeypatch, values: list[float]) -> None:
    """Evaluations that give these walks, one after another."""
    real, left = Evaluator.walk, list(values)
    monkeypatch.setattr(Evaluator, "walk", lambda *a: real(*a) | {"walk_tau": left.pop(0)})


def kept(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(run)]


def test_the_best_checkpoint_is_kept_beside_the_newest_marked_and_taken(cache, tmp_path, monkeypatch) -> None:
    scripted(monkeypatch, [1.5, 2.5, 2.0, 2.5])
    config = tiny_config(
        cache, tmp_path / "run", holdout=HELD, eval_every=2, save_every=2, keep=1, keep_best=True
    )
    train(config, ALONE)
    assert kept(config.out) == [8, 4]
    assert (config.out / FOLDER / BEST_NAME).resolve().name == "step-000004"
    assert resolve_drafter(config.out).name == "step-000004"
    again = train(replace(config, resume=True), ALONE)
    assert (again.steps, kept(config.out)) == (8, [8, 4])
    damaged = config.out / FOLDER / "step-000004" / TENSORS_NAME
    damaged.write_bytes(b"")
    assert best_checkpoint(config.out) is None
    assert resolve_drafter(config.out).name == "step-000008"


def test_a_best_walk_between_checkpoints_is_saved_at_once_and_survives_a_resume(
    cache, tmp_path, monkeypatch
) -> None:
    scripted(monkeypatch, [1.5, 2.5, 2.0])
    config = tiny_config(
        cache, tmp_path / "run", holdout=HELD, eval_every=3, save_every=7, keep=1, keep_best=True
    )
    real = RunLog.add

    def add(self, figures, *rest):
        real(self, figures, *rest)
        if figures["step"] == 8:
            raise RuntimeError("the machine went down")

    monkeypatch.setattr(RunLog, "add", add)
    with pytest.raises(RuntimeError):
        train(config, ALONE)
    monkeypatch.setattr(RunLog, "add", real)
    assert kept(config.out) == [7, 6]
    (config.out / FOLDER / BEST_NAME).unlink()  # as if the machine had gone down before it was written
    train(replace(config, resume=True), ALONE)
    assert kept(config.out) == [8, 6]
    assert resolve_drafter(config.out).name == "step-000006"


def test_only_a_better_walk_is_better() -> None:
    best = Best()
    assert [best.see(step, tau) for step, tau in enumerate([1.0, 1.5, 1.5, 1.2, 1.6], 1)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert Best(**best.state()) == best
    assert best.state() == {"evaluated": 5, "step": 5, "walk_tau": 1.6}


def test_a_cache_too_small_to_hold_anything_out_trains_without_walks(cache, tmp_path) -> None:
    config = tiny_config(cache, tmp_path / "run", holdout=HoldoutConfig(1e-9), max_steps=2)
    train(config, ALONE)
    assert walks(config.out) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"share": 1.0}, r"--holdout 1.0 is a share of the samples; it must be in \[0, 1\)"),
        ({"share": -0.1}, "--holdout -0.1"),
        ({"samples": 0}, "--eval-samples is 0; it must be at least 1"),
    ],
)
def test_what_is_no_share_is_refused(change, text) -> None:
    with pytest.raises(ConfigError, match=text):
        HoldoutConfig(**change)


def test_the_best_of_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--keep-best follows the walk over held-out samples"):
        tiny_config(tmp_path, tmp_path, keep_best=True)
    with pytest.raises(ConfigError, match="--eval-every is 0"):
        tiny_config(tmp_path, tmp_path, eval_every=0)


def test_a_damaged_held_out_sample_ends_the_walk_or_is_left_out_if_asked(cache, finished, tmp_path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    reader = CacheReader(copy)
    held = subset(reader, split(reader.index.ids, HELD)[1])
    extents = held.index.locate(np.array([0]))
    shard = copy / held.index.layouts[int(extents.shards[0])].name
    data = bytearray(shard.read_bytes())
    data[int(extents.offsets[0])] ^= 1
    shard.write_bytes(data)
    head, drafter = TargetHead.load(copy / HEAD_NAME), load_drafter(checkpoints(finished)[0]).float()
    with pytest.raises(CacheCorrupt):
        Evaluator(held, head, ALONE, torch.device("cpu")).walk(drafter)
    figures = Evaluator(held, head, ALONE, torch.device("cpu"), skip_corrupt=True).walk(drafter)
    assert figures["heldout_responses"] == len(held.index) - 1
