"""A run: reproducible, resumable bit for bit, the same on any number of ranks, stopped where it should be."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from support import write_cache
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dflash.cache.reader import CacheReader
from dflash.drafter import Drafter, init_weights
from dflash.errors import CacheMismatch, CheckpointError, ConfigError
from dflash.head import HEAD_NAME, TargetHead
from dflash.pretrained import load_drafter
from dflash.stopping import stop_signals
from dflash.train.batches import AnchorConfig, BlockShape, documents, pack
from dflash.train.checkpoint import TENSORS_NAME, checkpoints
from dflash.train.config import TrainConfig
from dflash.train.loader import StepLoader
from dflash.train.network import NetworkConfig
from dflash.train.objective import DraftingLoss, ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.record import METRICS_NAME, RunLog
from dflash.train.run import Run
from dflash.train.sampler import SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

ALONE = World()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("trainer") / "cache", LENGTHS)


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    """A run of 8 steps that nothing disturbed."""
    return train(tiny_config(cache, tmp_path_factory.mktemp("finished") / "run"), ALONE)


def metrics(run) -> list[dict]:
    return [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]


def behind_step(monkeypatch, step: int, action) -> None:
    """Call `action` once, as soon as this step is recorded."""
    real, waiting = RunLog.add, [action]

    def add(self, figures, *rest):
        real(self, figures, *rest)
        if figures["step"] == step and waiting:
            waiting.pop()()

    monkeypatch.setattr(RunLog, "add", add)


def interrupt(number: int):
    return lambda: os.kill(os.getpid(), number)


def test_one_batch_is_learnt_until_every_draft_is_right(tmp_path):
    cache = write_cache(tmp_path / "cache", [16, 12, 20])
    config = tiny_config(
        cache,
        tmp_path / "run",
        anchors=AnchorConfig(64, 1.0),  # every valid position, so that each step is the same batch
        sampler=SamplerConfig(tokens_per_batch=64, batches_per_step=1, min_ready=1, max_ready=2),
        optim=OptimConfig(lr=1e-2),
        max_steps=100,
        save_every=1000,
    )
    result = train(config, ALONE)
    last = metrics(config.out)[-1]
    assert last["accuracy"] == [1.0, 1.0, 1.0]
    assert result.loss < 0.05
    drafter, head = load_drafter(result.checkpoint), TargetHead.load(cache / HEAD_NAME)
    samples = CacheReader(cache).read([0, 1, 2])
    docs = documents(samples, [0] * 3, [0] * 3, config.anchors)
    whole = [replace(doc, anchors=doc.anchors[:-2]) for doc in docs]  # blocks that end inside their document
    sums = DraftingLoss(drafter, head, config.objective, 1)(pack(whole, BlockShape(4, 3)))
    assert float(sums.accepted.sum() / sums.blocks.sum()) == 4.0


def test_the_same_seed_twice_gives_the_same_weights_bit_for_bit(cache, finished, tmp_path):
    again = train(tiny_config(cache, tmp_path / "a"), ALONE)
    other = train(tiny_config(cache, tmp_path / "b", seed=1), ALONE)
    assert same(trained(finished.checkpoint), trained(again.checkpoint))
    assert not same(trained(finished.checkpoint), trained(other.checkpoint))
    volatile = {"seconds", "waited", "ready_steps", "window"}
    figures = [
        [{k: v for k, v in line.items() if k not in volatile} for line in metrics(run)]
        for run in (finished.checkpoint.parents[1], tmp_path / "a")
    ]
    assert figures[0] == figures[1]


def test_a_window_too_small_for_a_step_is_refused_before_anything_is_written(cache, tmp_path):
    with pytest.raises(ConfigError, match="--window-bytes 100 cannot hold one micro-batch of 64 tokens"):
        train(tiny_config(cache, tmp_path / "run", window_bytes=100), ALONE)
    assert not (tmp_path / "run").exists()


def test_the_record_says_how_often_an_epoch_repeats_each_bucket(cache, finished, tmp_path):
    """And each line how often they have been gone through so far; the window never changes the weights."""
    natural = train(tiny_config(cache, tmp_path / "natural", window_bytes=1 << 20), ALONE)
    assert same(trained(natural.checkpoint), trained(finished.checkpoint))
    config = tiny_config(cache, tmp_path / "even")
    train(replace(config, sampler=replace(config.sampler, mix="uniform", epoch_size=600)), ALONE)
    for name in ("natural", "even"):
        record = json.loads((tmp_path / name / "run.json").read_text())["config"]["epoch"]
        passes = metrics(tmp_path / name)[-1]["passes_by_bucket"]
        share = sum(line["tokens"] for line in metrics(tmp_path / name)) / record["tokens"]
        assert passes == pytest.approx([share * each for each in record["passes_by_bucket"]], rel=0.3)
    assert record["tokens"] == 600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_whole_checkpoint_from_which_the_run_goes_on_bit_for_bit(
    cache, finished, tmp_path, monkeypatch, number
):
    config, before = tiny_config(cache, tmp_path / "run"), signal.getsignal(number)
    behind_step(monkeypatch, 4, interrupt(number))
    stopped = train(config, ALONE)
    assert (stopped.steps, stopped.stopped) == (4, number.name)
    assert "go on with --resume" in stopped.text()
    resumed = train(replace(config, resume=True), ALONE)
    assert (resumed.steps, resumed.stopped, resumed.tokens) == (8, None, finished.tokens)
    assert resumed.mix == finished.mix
    assert same(trained(finished.checkpoint), trained(resumed.checkpoint))
    assert [line["step"] for line in metrics(config.out)] == list(range(1, 9))
    assert signal.getsignal(number) is before


def crash() -> None:
    raise RuntimeError("the machine went down")


def test_muon_resumes_bit_for_bit_too(cache, tmp_path, monkeypatch):
    muon = tiny_config(cache, tmp_path / "whole", optim=OptimConfig("muon", lr=1e-3))
    whole = train(muon, ALONE)
    behind_step(monkeypatch, 3, interrupt(signal.SIGTERM))
    halves = replace(muon, out=tmp_path / "halves")
    assert train(halves, ALONE).steps == 3
    resumed = train(replace(halves, resume=True), ALONE)
    assert same(trained(whole.checkpoint), trained(resumed.checkpoint))


def test_after_a_crash_repeated_steps_are_recorded_once(cache, finished, tmp_path, monkeypatch):
    config = tiny_config(cache, tmp_path / "run", save_every=2)
    behind_step(monkeypatch, 5, crash)
    with pytest.raises(RuntimeError, match="went down"):
        train(config, ALONE)
    with (config.out / METRICS_NAME).open("a") as file:
        file.write('{"step": 6, "lo')  # cut off in the middle of a line
    resumed = train(replace(config, resume=True), ALONE)
    assert same(trained(finished.checkpoint), trained(resumed.checkpoint))
    assert [line["step"] for line in metrics(config.out)] == list(range(1, 9))


def test_a_cut_newest_checkpoint_is_passed_over_for_the_one_before(cache, finished, tmp_path, monkeypatch):
    config = tiny_config(cache, tmp_path / "run", save_every=2)
    behind_step(monkeypatch, 5, crash)
    with pytest.raises(RuntimeError):
        train(config, ALONE)
    assert checkpoints(config.out)[0].name == "step-000004"
    newest = checkpoints(config.out)[0] / TENSORS_NAME
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = train(replace(config, resume=True), ALONE)
    assert same(trained(finished.checkpoint), trained(resumed.checkpoint))


def test_resuming_a_finished_run_changes_nothing(cache, tmp_path):
    config = tiny_config(cache, tmp_path / "run", max_steps=3)
    first = train(config, ALONE)
    files = {path: path.stat().st_mtime_ns for path in first.checkpoint.iterdir()}
    again = train(replace(config, resume=True), ALONE)
    assert (again.steps, again.checkpoint) == (3, first.checkpoint)
    assert {path: path.stat().st_mtime_ns for path in again.checkpoint.iterdir()} == files
    assert len(metrics(config.out)) == 3


def test_resume_without_a_run_starts_one(cache, finished, tmp_path):
    fresh = train(tiny_config(cache, tmp_path / "run", resume=True), ALONE)
    assert same(trained(finished.checkpoint), trained(fresh.checkpoint))


def test_an_existing_run_is_not_overwritten_without_resume(cache, finished):
    with pytest.raises(ConfigError, match="holds a run already; go on with --resume"):
        train(tiny_config(cache, finished.checkpoint.parents[1]), ALONE)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optim": OptimConfig(lr=0.5)}, r"optim\.lr: was 0\.001, now 0\.5"),
        ({"seed": 7}, "seed: was 0, now 7"),
        ({"max_steps": 9}, "max_steps: was 8, now 9"),
        ({"epochs": 3}, "epochs: was None, now 3"),
        ({"anchors": AnchorConfig(64, 0.25)}, r"anchors\.density: was 0\.5, now 0\.25"),
        ({"network": NetworkConfig(3, 4)}, r"network\.layers: was 2, now 3"),
        ({"precision": "float32"}, "precision: was 'bfloat16', now 'float32'"),
        (
            {"objective": ObjectiveConfig(4, gamma=1.0), "seed": 1},
            r"objective\.gamma: was None, now 1\.0; seed: was 0, now 1",
        ),
    ],
)
def test_resuming_with_other_settings_is_refused_naming_each_with_both_values(cache, finished, changes, text):
    config = tiny_config(cache, finished.checkpoint.parents[1], resume=True, **changes)
    with pytest.raises(ConfigError, match=f"--resume with other settings: {text}; use the first values"):
        train(config, ALONE)


def test_resuming_on_another_cache_is_refused(finished, tmp_path):
    other = write_cache(tmp_path / "cache", LENGTHS[:-1], seed=1)
    with pytest.raises(CacheMismatch):
        train(tiny_config(other, finished.checkpoint.parents[1], resume=True), ALONE)


def test_a_run_of_damaged_checkpoints_does_not_start_afresh(cache, tmp_path):
    config = tiny_config(cache, tmp_path / "run", max_steps=1)
    path = train(config, ALONE).checkpoint / TENSORS_NAME
    path.write_bytes(b"")
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            train(replace(config, resume=resume), ALONE)


def test_every_weight_moves_the_norms_too(finished):
    start = Drafter(load_drafter(finished.checkpoint).config)
    init_weights(start, 0)
    weights = trained(finished.checkpoint)
    for name, before in start.named_parameters():
        after = weights[f"master.{name}"]
        assert after.dtype == torch.float32
        assert (after != before).float().mean() > 0.9, name


def test_max_steps_stops_in_the_middle_of_an_epoch_and_epochs_end_by_themselves(cache, tmp_path):
    whole = train(tiny_config(cache, tmp_path / "a", epochs=1, max_steps=None), ALONE)
    assert whole.tokens == sum(LENGTHS)
    assert whole.steps > 2
    part = train(tiny_config(cache, tmp_path / "b", epochs=1, max_steps=2), ALONE)
    assert part.steps == 2
    assert part.tokens < whole.tokens
    early = train(tiny_config(cache, tmp_path / "c", epochs=1, max_steps=100), ALONE)
    assert early.steps == whole.steps


def test_checkpoints_are_written_where_asked_and_rotated(cache, tmp_path):
    config = tiny_config(cache, tmp_path / "run", save_every=3, keep=2)
    train(config, ALONE)
    assert [path.name for path in checkpoints(config.out)] == ["step-000008", "step-000006"]


def test_each_step_is_a_line_with_its_figures(finished):
    lines = metrics(finished.checkpoint.parents[1])
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sum(line["tokens"] for line in lines) == finished.tokens
    for line in lines:
        assert len(line["accuracy"]) == 3
        assert 1 <= line["anchor_tau"] <= 4
        assert line["blocks"] > 0
        assert sum(line["tokens_by_bucket"]) == line["tokens"]
    rates = [line["lr"] for line in lines]
    assert rates[0] > 0  # the first step learns too
    assert max(rates) <= 1e-3
    assert rates == sorted(rates, reverse=True)
    assert (finished.checkpoint.parents[1] / "run.json").is_file()


def gradient_of_a_step(rank: int, size: int, cache, out) -> dict[str, Tensor]:
    """The gradient that the trainer's first update sees on this rank, and the sums over all ranks."""
    config = tiny_config(
        cache,
        out / f"{size}-{rank}",
        sampler=SamplerConfig(tokens_per_batch=64, batches_per_step=6, min_ready=1, max_ready=8),
        optim=OptimConfig(lr=1e-3, clip=1e9),
        precision="float32",
    )
    world = World(rank, size)
    run = Run.open(config, world)
    with StepLoader(run.reader, run.sampler, run.blocks, world, run.device) as loader:
        loaded = next(iter(loader))
    assert len(loaded.batches) == 6 // size
    totals, _ = run._backward(loaded)
    seen: dict[str, Tensor] = {"totals": totals}
    run.optimizer.step = lambda: seen.update(
        {name: p.grad.clone() for name, p in run.drafter.named_parameters()}
    )
    run._update(totals, 1e-3)
    return seen | empty_rank(rank, size, run)


def empty_rank(rank: int, size: int, run: Run) -> dict[str, Tensor]:
    """The gradient of the same batch when every rank but the first has nothing to train on."""
    samples = run.reader.read([0, 1] if rank == 0 else [])
    batch = pack(documents(samples, [0] * len(samples), [0] * len(samples), AnchorConfig()), BlockShape(4, 3))
    head = TargetHead.load(run.config.cache / HEAD_NAME).to(run.device, torch.float32)
    drafter = Drafter(run.drafter.config)
    init_weights(drafter, 5)
    loss = DraftingLoss(drafter, head, ObjectiveConfig(4), 3)
    module = DistributedDataParallel(loss) if size > 1 else loss
    module(batch).loss.backward()
    return {"empty": torch.cat([p.grad.flatten() for p in drafter.parameters()]) * size}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_has_the_same_gradient_on_any_number_of_ranks_and_an_empty_rank_hangs_none(
    cache, tmp_path, size
):
    alone = gradient_of_a_step(0, 1, cache, tmp_path)
    for ours in run_ranks(tmp_path / "ranks", size, gradient_of_a_step, cache, tmp_path):
        for name, expected in alone.items():
            assert float((ours[name] - expected).norm() / expected.norm()) < 1e-5, name


def run_and_stop_one_rank(rank: int, size: int, cache, out) -> dict[str, Tensor]:
    """A whole run whose last rank gets a signal behind step 3."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:
            behind_step(patch, 3, interrupt(signal.SIGTERM))
        result = train(tiny_config(cache, out / f"run-{size}", precision="float32"), World(rank, size))
    assert result.stopped == "SIGTERM"
    return {"steps": torch.tensor(result.steps)} | trained(result.checkpoint)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_signal_to_one_rank_stops_all_and_any_number_of_ranks_goes_on(cache, tmp_path):
    first, second = run_ranks(tmp_path / "ranks", 2, run_and_stop_one_rank, cache, tmp_path)
    assert first["steps"] == second["steps"] == 3
    assert same(first, second)
    resumed = train(tiny_config(cache, tmp_path / "run-2", precision="float32", resume=True), ALONE)
    whole = train(tiny_config(cache, tmp_path / "run-1", precision="float32"), ALONE)
    assert (resumed.steps, resumed.tokens) == (8, whole.tokens)
    ours, expected = metrics(tmp_path / "run-2"), metrics(tmp_path / "run-1")
    assert [line["tokens_by_bucket"] for line in ours] == [line["tokens_by_bucket"] for line in expected]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in expected], rel=1e-3)


def test_a_second_signal_acts_at_once():
    with stop_signals() as flag:
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"epochs": None, "max_steps": None}, "a run needs an end"),
        ({"epochs": 0}, "--epochs is 0; it must be at least 1"),
        ({"max_steps": 0}, "--max-steps is 0"),
        ({"save_every": 0}, "--save-every is 0"),
        ({"keep": 0}, "--keep is 0"),
        ({"precision": "float16"}, "precision 'float16' is not one of bfloat16, float32"),
        ({"objective": ObjectiveConfig(8)}, "the loss is for blocks of 8, the network has blocks of 4"),
    ],
)
def test_settings_that_make_no_run_are_refused(tmp_path, changes, text):
    with pytest.raises(ConfigError, match=text):
        tiny_config(tmp_path, tmp_path, **changes)


def test_ranks_that_do_not_divide_a_step_are_refused_before_anything_is_written(cache, tmp_path):
    with pytest.raises(ConfigError, match="--batches-per-step 2 does not divide among 3 ranks"):
        train(tiny_config(cache, tmp_path / "run"), World(0, 3))
    assert not (tmp_path / "run").exists()


def test_the_settings_are_json_and_hold_every_part(tmp_path):
    settings = TrainConfig(tmp_path, tmp_path).settings()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["optim"]["betas"] == [0.9, 0.95]
    assert settings.keys() >= {"network", "anchors", "objective", "sampler", "optim", "epochs", "seed"}
    assert not settings.keys() & {"out", "cache", "resume", "keep", "save_every"}
