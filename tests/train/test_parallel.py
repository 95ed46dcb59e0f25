"""The drafter split among ranks trains as a replicated one does, and leaves the same checkpoints."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from support import write_cache
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained

from dflash.head import HEAD_NAME, TargetHead
from dflash.pretrained import load_drafter
from dflash.train.batches import AnchorConfig, BlockShape, documents, pack
from dflash.train.optim import OptimConfig
from dflash.train.parallel import SplitDrafter, exchanging, gathered, whole
from dflash.train.record import METRICS_NAME
from dflash.train.run import Run
from dflash.train.sampler import SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SIX = SamplerConfig(tokens_per_batch=64, batches_per_step=6, min_ready=1, max_ready=8)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("parallel") / "cache", LENGTHS)


def losses(run) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / METRICS_NAME).read_text().splitlines()]


STEPS = 5


def run_of(rank: int, size: int, cache, out, changes) -> dict[str, torch.Tensor]:
    config = tiny_config(cache, out, sampler=SIX, **{"max_steps": STEPS} | changes)
    result = train(config, World(rank, size))
    return {"steps": torch.tensor(result.steps)}


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """The folder of a run in float32 on one rank, by optimizer."""
    folder = tmp_path_factory.mktemp("alone")
    for optimizer in ("adamw", "muon"):
        changes = {"precision": "float32", "optim": OptimConfig(optimizer, lr=1e-3)}
        run_of(0, 1, cache, folder / optimizer, changes)
    return {optimizer: folder / optimizer for optimizer in ("adamw", "muon")}


def grid(quick: list[tuple], *axes: tuple) -> pytest.MarkDecorator:
    """Parametrizes `case` with all combinations; all but the quick ones are long."""
    cases = itertools.product(*axes)
    marks = [pytest.param(case, marks=() if case in quick else pytest.mark.long) for case in cases]
    return pytest.mark.parametrize("case", marks, ids=lambda case: "-".join(map(str, case)))


@grid(
    [("adamw", 2, "ddp"), ("adamw", 3, "fsdp"), ("muon", 3, "ddp"), ("muon", 2, "fsdp")],
    ("adamw", "muon"),
    (2, 3),
    ("ddp", "fsdp"),
)
def test_the_loss_curve_is_the_same_on_any_ranks_and_either_way(cache, alone, tmp_path, case):
    optimizer, size, mode = case
    out, last = tmp_path / "out", f"checkpoints/step-{STEPS:06d}"
    changes = {"precision": "float32", "optim": OptimConfig(optimizer, lr=1e-3), "parallel": mode}
    run_ranks(tmp_path / "ranks", size, run_of, cache, out, changes)
    assert losses(out) == pytest.approx(losses(alone[optimizer]), rel=2e-4)
    ours, weights = trained(out / last), trained(alone[optimizer] / last)
    assert ours.keys() == weights.keys()
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    assert load_drafter(out / last).config.block_size == 4


def test_with_bfloat16_compute_a_split_run_has_the_same_curve(cache, tmp_path):
    run_of(0, 1, cache, tmp_path / "alone", {})
    run_ranks(tmp_path / "ranks", 2, run_of, cache, tmp_path / "split", {"parallel": "fsdp"})
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "alone"), rel=5e-3)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_layers_that_are_computed_again_train_the_same_on_ranks(cache, alone, tmp_path, mode):
    changes = {"precision": "float32", "parallel": mode, "activation_checkpointing": True}
    run_ranks(tmp_path / "ranks", 2, run_of, cache, tmp_path / "out", changes)
    assert losses(tmp_path / "out") == pytest.approx(losses(alone["adamw"]), rel=2e-4)


@grid(
    [
        ("adamw", (1, "ddp"), (3, "fsdp")),
        ("adamw", (2, "fsdp"), (2, "ddp")),
        ("muon", (1, "ddp"), (2, "ddp")),
        ("muon", (2, "fsdp"), (3, "fsdp")),
    ],
    ("adamw", "muon"),
    ((1, "ddp"), (2, "fsdp")),
    ((3, "fsdp"), (2, "ddp")),
)
def test_a_checkpoint_loads_under_any_number_of_ranks_and_either_way(cache, tmp_path, case):
    """What is loaded is what was saved, bit for bit, whoever saved it."""
    (optimizer, (size, mode), (ranks, how)), out = case, tmp_path / "out"
    changes = {"optim": OptimConfig(optimizer, lr=1e-3), "max_steps": 2, "parallel": mode}
    if size == 1:
        run_of(0, 1, cache, out, changes)
    else:
        run_ranks(tmp_path / "saving", size, run_of, cache, out, changes)
    saved = trained(out / "checkpoints" / "step-000002")
    for loaded in run_ranks(tmp_path / "loading", ranks, loaded_as, cache, out, how, optimizer):
        assert same(loaded, saved)


def loaded_as(rank: int, size: int, cache, out, mode, optimizer) -> dict[str, torch.Tensor]:
    config = tiny_config(
        cache,
        out,
        sampler=SIX,
        parallel=mode,
        resume=True,
        max_steps=2,
        optim=OptimConfig(optimizer, lr=1e-3),
    )
    run = Run.open(config, World(rank, size))
    tensors = {}
    for name, parameter in run.drafter.named_parameters():
        tensors[f"master.{name}"] = whole(parameter.detach()).clone()
        for key, value in run.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = whole(value).clone()
    return tensors


def some_ranks_have_nothing(rank: int, size: int, cache, out) -> dict[str, torch.Tensor]:
    """The gradient when only the first rank has anything to train on, and a pass without gradients."""
    run = Run.open(
        tiny_config(cache, out, sampler=SIX, parallel="fsdp", precision="float32"), World(rank, size)
    )
    samples = run.reader.read([0, 1] if rank == 0 else [])
    shape = BlockShape(4, 3)
    batch = pack(documents(samples, [0] * len(samples), [0] * len(samples), AnchorConfig()), shape)
    for last in (False, True):
        with exchanging(run.module, last):
            run.module(batch).loss.backward()
    gradient = torch.cat([whole(p.grad).flatten() for p in run.drafter.parameters()]) * size / 2
    if size > 1:
        assert isinstance(run.module.drafter, SplitDrafter)
    full = pack(documents(run.reader.read([0, 1]), [0, 0], [0, 0], AnchorConfig()), shape)
    with gathered(run.module), torch.no_grad():
        states = run.drafter(
            embed(run, full),
            full.block_positions,
            full.features.float(),
            full.context_positions,
            full.layout,
        )
    return {"gradient": gradient, "states": states.clone()}


def embed(run: Run, batch) -> torch.Tensor:
    return TargetHead.load(run.config.cache / HEAD_NAME).to(run.device, torch.float32).embed(batch.block_ids)


def test_an_empty_micro_batch_hangs_no_split_run_and_the_whole_drafter_can_be_used(cache, tmp_path):
    alone = some_ranks_have_nothing(0, 1, cache, tmp_path / "alone")
    for ours in run_ranks(tmp_path / "ranks", 2, some_ranks_have_nothing, cache, tmp_path / "split"):
        assert float((ours["gradient"] - alone["gradient"]).norm() / alone["gradient"].norm()) < 1e-5
        torch.testing.assert_close(ours["states"], alone["states"], rtol=1e-5, atol=1e-6)
