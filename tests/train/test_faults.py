"""What a run survives: steps that are not numbers, damaged samples, a full disk, time that is up."""

from __future__ import annotations

import json
import random
import resource
from dataclasses import replace

import pytest
import torch
from support import write_cache
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained

from dflash.cache.reader import CacheReader
from dflash.errors import CacheCorrupt, CheckpointError, ConfigError, TrainingError
from dflash.train import run as run_module
from dflash.train.checkpoint import checkpoints, latest_checkpoint
from dflash.train.faults import CORRUPT_NAME, append_line
from dflash.train.objective import DraftingLoss
from dflash.train.record import METRICS_NAME
from dflash.train.runs import load_run
from dflash.train.trainer import train
from dflash.world import World

ALONE = World()
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("faults") / "cache", LENGTHS)


def metrics(run) -> list[dict]:
    return [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]


def spoil(patch, steps, *, per_step: int = 2, part: str = "loss") -> None:
    """Make the first micro-batch of these steps give a loss, or only a gradient, that is not finite."""
    real, calls = DraftingLoss.forward, []

    def forward(self, batch):
        step, number = divmod(len(calls), per_step)
        calls.append(batch)
        sums = real(self, batch)
        if step + 1 in steps and number == 0:
            if part == "loss":
                sums.loss = sums.loss * float("nan")
            else:
                sums.loss.register_hook(lambda gradient: gradient * float("inf"))
        return sums

    patch.setattr(DraftingLoss, "forward", forward)


@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_recorded_with_its_samples(
    cache, tmp_path, monkeypatch, part
):
    before = train(tiny_config(cache, tmp_path / "short", save_every=2, max_steps=8), ALONE)
    spoil(monkeypatch, {3}, part=part)
    config = tiny_config(cache, tmp_path / "run", save_every=1, keep=9)
    result = train(config, ALONE)
    assert result.steps == 8
    folders = {path.name: path for path in checkpoints(config.out)}
    assert same(trained(folders["step-000002"]), trained(folders["step-000003"]))
    assert not same(trained(folders["step-000003"]), trained(folders["step-000004"]))
    lines = metrics(config.out)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[2]["kind"] == "skipped"
    assert all(isinstance(i, int) for i in lines[2]["samples"])
    # a micro-batch is to blame where its loss says so; for a gradient all of the step's are
    assert len(lines[2]["samples"]) > 0
    assert sum(line["tokens"] for line in lines) == before.tokens  # a skipped step is consumed
    assert [step["step"] for step in load_run(config.out).steps] == [1, 2, 4, 5, 6, 7, 8]


def test_bad_steps_in_a_row_end_the_run_pointing_at_the_last_good_checkpoint(cache, tmp_path, monkeypatch):
    spoil(monkeypatch, {2, 3, 5, 6, 7})
    config = tiny_config(cache, tmp_path / "run", save_every=4, max_bad_steps=3)
    with pytest.raises(
        TrainingError, match=r"step 7: .* 3 such steps in a row .*step-000004: go on .*--resume"
    ):
        train(config, ALONE)
    assert [path.name for path in checkpoints(config.out)] == ["step-000004"]


def spoiled_on_one_rank(rank: int, size: int, cache, out) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, {3} if rank == 1 else (), per_step=1)
        result = train(tiny_config(cache, out / "run", save_every=1, keep=9), World(rank, size))
    return {"steps": torch.tensor(result.steps)}


@FORKS
def test_all_ranks_skip_a_step_that_is_bad_on_one(cache, tmp_path):
    run_ranks(tmp_path / "ranks", 2, spoiled_on_one_rank, cache, tmp_path)
    folders = {path.name: path for path in checkpoints(tmp_path / "run")}
    assert same(trained(folders["step-000002"]), trained(folders["step-000003"]))
    assert metrics(tmp_path / "run")[2]["kind"] == "skipped"
    assert 0 < len(metrics(tmp_path / "run")[2]["samples"]) < len(LENGTHS)


@pytest.fixture
def damaged(tmp_path):
    """A cache with one changed byte, and the id of the sample that it belongs to."""
    cache = write_cache(tmp_path / "damaged", LENGTHS)
    reader = CacheReader(cache)
    extent = reader.index.locate([4])
    path = cache / reader.index.layouts[int(extent.shards[0])].name
    data = bytearray(path.read_bytes())
    data[int(extent.offsets[0])] ^= 1
    path.write_bytes(data)
    return cache, int(reader.index.ids[4])


def test_a_damaged_sample_ends_the_run_with_its_name_and_the_repair(damaged, tmp_path):
    cache, sample = damaged
    with pytest.raises(CacheCorrupt, match=rf"sample {sample}.*dflash cache verify"):
        train(tiny_config(cache, tmp_path / "run"), ALONE)


def test_skip_corrupt_goes_without_the_sample_and_records_it(damaged, tmp_path):
    cache, sample = damaged
    config = tiny_config(cache, tmp_path / "run", skip_corrupt=True)
    result = train(config, ALONE)
    sound = train(tiny_config(write_cache(tmp_path / "sound", LENGTHS), tmp_path / "other"), ALONE)
    assert (result.steps, result.tokens) == (8, sound.tokens)
    ours, theirs = metrics(config.out), metrics(tmp_path / "other")
    assert [line["tokens_by_bucket"] for line in ours] == [line["tokens_by_bucket"] for line in theirs]
    recorded = [json.loads(line) for line in (config.out / CORRUPT_NAME).read_text().splitlines()]
    assert {line["id"] for line in recorded} == {sample}
    with_it = [line["step"] for line in ours if line.get("corrupt_samples")]
    assert with_it == [line["step"] for line in recorded]
    assert with_it


def skipping(rank: int, size: int, cache, out) -> dict[str, torch.Tensor]:
    config = tiny_config(cache, out / f"run-{size}", skip_corrupt=True, precision="float32")
    train(config, World(rank, size))
    return {"none": torch.zeros(1)}


@FORKS
def test_skip_corrupt_is_the_same_run_on_two_ranks(damaged, tmp_path):
    cache, _ = damaged
    skipping(0, 1, cache, tmp_path)
    run_ranks(tmp_path / "ranks", 2, skipping, cache, tmp_path)
    one, two = metrics(tmp_path / "run-1"), metrics(tmp_path / "run-2")
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-3)
    assert [line.get("corrupt_samples") for line in one] == [line.get("corrupt_samples") for line in two]
    assert (tmp_path / "run-1" / CORRUPT_NAME).read_text() == (tmp_path / "run-2" / CORRUPT_NAME).read_text()


def full_disk(*_arguments, **_settings):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on(cache, tmp_path, monkeypatch, capsys):
    whole = train(tiny_config(cache, tmp_path / "whole"), ALONE)
    real, saves = run_module.save_checkpoint, []

    def save(run, taken, state, **settings):
        saves.append(state.step)
        return full_disk() if state.step in (4, 6) else real(run, taken, state, **settings)

    monkeypatch.setattr(run_module, "save_checkpoint", save)
    config = tiny_config(cache, tmp_path / "run", save_every=2)
    result = train(config, ALONE)
    assert saves == [2, 4, 6, 8]
    assert [path.name for path in checkpoints(config.out)] == ["step-000008", "step-000002"]
    assert same(trained(whole.checkpoint), trained(result.checkpoint))
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Warning")]
    assert len(warnings) == 2
    assert "step 4 could not be written ([Errno 28] No space left on device)" in warnings[0]
    assert "step-000002; the next save tries again" in warnings[0]


def test_a_disk_that_is_full_at_the_end_is_an_error_that_names_the_newest_checkpoint(
    cache, tmp_path, monkeypatch
):
    real = run_module.save_checkpoint

    def save(run, taken, state, **settings):
        return full_disk() if state.step == 8 else real(run, taken, state, **settings)

    monkeypatch.setattr(run_module, "save_checkpoint", save)
    with pytest.raises(
        CheckpointError, match=r"step 8 could not be written .*No space.* step-000006|step-000006"
    ):
        train(tiny_config(cache, tmp_path / "run", save_every=3), ALONE)


def limited(rank: int, size: int, cache, out) -> dict[str, torch.Tensor]:
    """A run in a process that may write no file larger than a servable drafter: its state does not fit."""
    config = tiny_config(cache, out / "run", save_every=2, max_steps=4)
    real = run_module.save_checkpoint

    def save(run, taken, state, **settings):
        small = state.step == 2
        if small:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            return real(run, taken, state, **settings)
        finally:
            if small:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "save_checkpoint", save)
        result = train(config, World(rank, size))
    return {"steps": torch.tensor(result.steps)}


@FORKS
def test_a_real_write_that_fails_in_the_middle_leaves_nothing_and_the_run_goes_on(cache, tmp_path):
    run_ranks(tmp_path / "ranks", 1, limited, cache, tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000004"]
    assert latest_checkpoint(tmp_path / "run").name == "step-000004"


def test_a_line_is_appended_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    path = tmp_path / "lines"
    assert append_line(path, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        assert not append_line(path, {"b": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert append_line(path, {"c": 1})
    assert path.read_text() == '{"a": 1}\n{"c": 1}\n'
    assert "lacks a line" in capsys.readouterr().err


def test_max_minutes_stops_with_a_checkpoint_and_says_how_to_go_on(cache, tmp_path):
    config = tiny_config(cache, tmp_path / "run", max_minutes=1e-6)
    stopped = train(config, ALONE)
    assert (stopped.steps, stopped.stopped) == (1, "--max-minutes")
    assert "stopped by --max-minutes; go on with --resume" in stopped.text()
    resumed = train(replace(config, resume=True, max_minutes=60), ALONE)
    whole = train(tiny_config(cache, tmp_path / "whole"), ALONE)
    assert same(trained(resumed.checkpoint), trained(whole.checkpoint))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_minutes": 0}, "--max-minutes 0 must be above 0"),
        ({"max_bad_steps": 0}, "--max-bad-steps is 0"),
        ({"parallel": "zero"}, "--parallel 'zero' is not one of ddp, fsdp"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, changes, text):
    with pytest.raises(ConfigError, match=text):
        tiny_config(tmp_path, tmp_path, **changes)


def damage(path, chance: random.Random) -> None:
    """Cut a file, flip one of its bits, or remove it."""
    kind = chance.choice(["cut", "flip", "remove"])
    if kind == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if kind == "cut":
        del data[chance.randrange(len(data)) :]
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def test_any_damage_to_the_newest_checkpoints_is_found_and_the_next_older_one_used(cache, tmp_path, capsys):
    config = tiny_config(cache, tmp_path / "run", save_every=2, keep=4)
    train(config, ALONE)
    newest_first = checkpoints(config.out)
    contents = {
        path: path.read_bytes() for folder in newest_first for path in folder.rglob("*") if path.is_file()
    }
    for seed in range(60):
        chance = random.Random(seed)
        bad = chance.randrange(1, len(newest_first))
        for folder in newest_first[:bad]:
            damage(chance.choice(sorted(path for path in contents if folder in path.parents)), chance)
        assert latest_checkpoint(config.out) == newest_first[bad], seed
        warned = [line for line in capsys.readouterr().err.splitlines() if "is passed over" in line]
        assert [folder.name in line for folder, line in zip(newest_first, warned, strict=False)] == [
            True
        ] * bad
        for path, data in contents.items():
            path.write_bytes(data)


def test_a_checkpoint_under_another_steps_name_is_passed_over(cache, tmp_path, capsys):
    config = tiny_config(cache, tmp_path / "run", save_every=4)
    train(config, ALONE)
    older = checkpoints(config.out)[1]
    older.rename(older.with_name("step-000099"))
    assert latest_checkpoint(config.out).name == "step-000008"
    assert "step-000099 is passed over: it is of step 4" in capsys.readouterr().err
