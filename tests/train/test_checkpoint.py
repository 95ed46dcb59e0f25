"""Checkpoints are whole or absent, servable, and put everything back exactly."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import drafter_config
from tiny_runs import same, trained

from dflash.drafter import Drafter, init_weights
from dflash.errors import CheckpointError
from dflash.pretrained import load_drafter
from dflash.train import checkpoint as module
from dflash.train.checkpoint import (
    FOLDER,
    STATE_NAME,
    TENSORS_NAME,
    TrainState,
    checkpoints,
    is_whole,
    latest_checkpoint,
    load_state,
    restore,
    save_checkpoint,
    snapshot,
)
from dflash.train.optim import OptimConfig, build_optimizer

FILES = ["config.json", "model.safetensors", STATE_NAME, TENSORS_NAME]


class Training:
    """A drafter and its optimizer, some steps on."""

    def __init__(self, seed: int = 1, **changes) -> None:
        self.drafter = Drafter(drafter_config(**changes))
        init_weights(self.drafter, seed)
        self.optimizer = build_optimizer(self.drafter, OptimConfig(lr=1e-2))
        self.generator = torch.Generator().manual_seed(0)

    def go(self, steps: int) -> Training:
        for _ in range(steps):
            for parameter in self.drafter.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=self.generator)
            self.optimizer.step()
        return self

    def save(self, run, step: int, keep: int = 3):
        state = TrainState(step, {"steps": step}, {"seed": 0})
        return save_checkpoint(run, snapshot(self.drafter, self.optimizer), state, keep=keep)


@pytest.fixture
def training() -> Training:
    return Training().go(3)


def steps(run) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(run)]


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def test_everything_comes_back_exactly_and_goes_on_alike(training, tmp_path):
    path = training.save(tmp_path, 3)
    assert path == tmp_path / FOLDER / "step-000003"
    other = Training(seed=2)
    restore(path, other.drafter, other.optimizer)
    other.generator.set_state(training.generator.get_state())
    first = training.go(2).save(tmp_path / "a", 5)
    second = other.go(2).save(tmp_path / "b", 5)
    assert same(trained(first), trained(second))
    assert {tensor.dtype for tensor in trained(first).values()} == {torch.float32}
    assert load_state(path) == TrainState(3, {"steps": 3}, {"seed": 0})


def test_a_checkpoint_is_a_drafter_that_loads(training, tmp_path):
    loaded = load_drafter(training.save(tmp_path, 3))
    assert loaded.config == training.drafter.config
    for name, tensor in training.drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16())


def test_only_the_newest_are_kept(training, tmp_path):
    for step in range(1, 7):
        training.save(tmp_path, step, keep=2)
        assert steps(tmp_path) == list(range(1, step + 1))[: -3 if step > 2 else None : -1][:2]
    assert latest_checkpoint(tmp_path).name == "step-000006"


def test_steps_are_ordered_as_numbers(training, tmp_path):
    for step in (999_999, 1_000_000):
        training.save(tmp_path, step)
    assert steps(tmp_path) == [1_000_000, 999_999]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, lambda path: path.unlink()], ids=["cut", "missing"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_whole_one(training, tmp_path, name, damage):
    old, new = training.save(tmp_path, 1), training.save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == new
    damage(new / name)
    assert not is_whole(new)
    assert latest_checkpoint(tmp_path) == old


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_damage(training, tmp_path, name):
    checkpoint = training.save(tmp_path, 1)
    path = checkpoint / name
    data = path.read_bytes()
    for place in (len(data) // 3, len(data) // 2, len(data) - 4):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert not is_whole(checkpoint)
    path.write_bytes(data)
    assert is_whole(checkpoint)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(training, tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for step in (1, 2):
        cut(training.save(tmp_path, step) / TENSORS_NAME)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is whole"):
        latest_checkpoint(tmp_path)


def test_a_checkpoint_behind_damaged_newer_ones_is_not_rotated_away(training, tmp_path):
    for step in (2, 5, 8):
        training.save(tmp_path, step)
    for step in (5, 8):
        cut(tmp_path / FOLDER / f"step-{step:06d}" / TENSORS_NAME)
    training.save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [3]
    assert latest_checkpoint(tmp_path).name == "step-000003"


@pytest.mark.parametrize("failing", ["write_tensors", "save_file", "digest_file", "fsync_path"])
def test_a_crash_while_writing_leaves_the_earlier_checkpoint_and_nothing_else(
    training, tmp_path, monkeypatch, failing
):
    before = training.save(tmp_path, 1)

    def fail(*_arguments, **_settings):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, failing, fail)
        with pytest.raises(OSError, match="No space"):
            training.save(tmp_path, 2)
    assert list((tmp_path / FOLDER).iterdir()) == [before]
    assert is_whole(before)


def test_servers_find_no_weights_beside_the_model(training, tmp_path):
    """A server such as vLLM loads every safetensors file of a model's folder."""
    path = training.save(tmp_path, 1)
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]


def test_what_a_killed_writer_left_is_replaced(training, tmp_path):
    (tmp_path / FOLDER / ".step-000002.tmp").mkdir(parents=True)
    (tmp_path / FOLDER / ".step-000002.tmp" / "rubbish").write_text("x")
    path = training.save(tmp_path, 2)
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == sorted(FILES)
    assert list((tmp_path / FOLDER).iterdir()) == [path]


def test_weights_that_are_not_finite_are_not_saved(training, tmp_path):
    before = training.save(tmp_path, 1)
    training.drafter.norm.weight.data[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        training.save(tmp_path, 2)
    assert latest_checkpoint(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("master.norm.weight"), r"master\.norm\.weight is missing, this run needs \(32,\)"),
        (lambda t: t.pop("optimizer.norm.weight.exp_avg"), r"optimizer\.norm\.weight\.exp_avg is missing"),
        (lambda t: t.update({"optimizer.norm.weight.step": torch.ones(2)}), r"\.step is of shape \(2,\)"),
        (lambda t: t.update(other=torch.ones(1)), "holds unknown tensors, e.g. other"),
    ],
)
def test_a_state_of_another_drafter_is_refused(training, tmp_path, change, text):
    path = training.save(tmp_path, 1)
    tensors = load_file(path / TENSORS_NAME)
    change(tensors)
    save_file(tensors, path / TENSORS_NAME)
    with pytest.raises(CheckpointError, match=text):
        restore(path, training.drafter, training.optimizer)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1}'])
def test_a_state_file_that_is_none_is_one_clear_line(training, tmp_path, text):
    path = training.save(tmp_path, 1)
    (path / STATE_NAME).write_text(text)
    assert not is_whole(path)
    with pytest.raises(CheckpointError, match="is not a training state"):
        load_state(path)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        restore(path, training.drafter, training.optimizer)


def test_the_digests_name_all_files_but_their_own(training, tmp_path):
    state = json.loads((training.save(tmp_path, 1) / STATE_NAME).read_text())
    assert sorted([*state["files"], STATE_NAME]) == sorted(FILES)
