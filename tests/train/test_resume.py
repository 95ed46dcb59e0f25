"""N steps are k steps, kill -9, and N - k steps: bit for bit, wherever a run is cut, however it draws."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import write_cache
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained

from dflash.train.config import TrainConfig
from dflash.train.optim import OptimConfig
from dflash.train.record import METRICS_NAME, RunLog
from dflash.train.sampler import COMPOSITIONS, POLICIES, SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
GRID = sorted(itertools.product(POLICIES, COMPOSITIONS, ("adamw", "muon"), (1, 3)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("resume") / "cache", LENGTHS)


def killed_behind(rank: int, size: int, config: TrainConfig, step: int) -> dict[str, torch.Tensor]:
    """A run in a process that is killed behind this step."""
    real = RunLog.add

    def add(self, figures, *rest):
        real(self, figures, *rest)
        if figures["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "add", add)
        train(config, World(rank, size))
    return {"none": torch.zeros(1)}


def cut_and_resume(cache, tmp_path, case: tuple[str, str, str, int], seed: int) -> None:
    policy, compose, optimizer, accumulated = case
    chance = random.Random(seed)
    steps = chance.randrange(4, 13)  # an epoch is 3 to 5 steps
    cut = chance.randrange(1, steps)
    config = tiny_config(
        cache,
        tmp_path / "whole",
        sampler=SamplerConfig(
            policy, compose, tokens_per_batch=64, batches_per_step=accumulated, min_ready=1, max_ready=4
        ),
        optim=OptimConfig(optimizer, lr=1e-3),
        max_steps=steps,
        save_every=chance.randrange(1, cut + 1),
    )
    whole = train(config, World())
    halves = replace(config, out=tmp_path / "halves")
    run_ranks(tmp_path / "ranks", 1, killed_behind, halves, cut, ends={0: -signal.SIGKILL})
    np.random.seed(chance.randrange(1000))  # noqa: NPY002 - the generators that a run must not depend on
    torch.manual_seed(chance.randrange(1000))
    random.seed(chance.randrange(1000))
    resumed = train(replace(halves, resume=True), World())
    assert (resumed.steps, resumed.tokens) == (whole.steps, whole.tokens), (steps, cut)
    assert same(trained(whole.checkpoint), trained(resumed.checkpoint)), (steps, cut)
    lines = [json.loads(line) for line in (halves.out / METRICS_NAME).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))


# Each way to draw once, with either optimizer and accumulation in turn; the long tests take all of them.
@pytest.mark.parametrize("number", range(0, len(GRID), 4))
def test_a_run_cut_by_kill_9_goes_on_bit_for_bit(cache, tmp_path, number):
    case = (*GRID[number][:2], ("adamw", "muon")[number // 4 % 2], (1, 3)[number // 8 % 2])
    cut_and_resume(cache, tmp_path, case, number)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_every_kind_of_run_cut_anywhere_goes_on_bit_for_bit(cache, tmp_path, case, seed):
    cut_and_resume(cache, tmp_path, case, seed)


def going_on(rank: int, size: int, config: TrainConfig) -> dict[str, torch.Tensor]:
    train(replace(config, resume=True), World(rank, size))
    return {"none": torch.zeros(1)}


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        # each policy and each mode; the long tests take all pairs
        pytest.param(policy, mode, marks=() if (number % 2 == 0) == (mode == "ddp") else pytest.mark.long)
        for number, policy in enumerate(POLICIES)
        for mode in ("ddp", "fsdp")
    ],
)
def test_with_another_number_of_ranks_the_draws_are_the_same_and_the_loss_within_rounding(
    cache, tmp_path, policy, mode
):
    config = tiny_config(
        cache,
        tmp_path / "whole",
        sampler=SamplerConfig(policy, tokens_per_batch=64, batches_per_step=6, min_ready=1, max_ready=8),
        precision="float32",
        max_steps=6,
        save_every=2,
        parallel=mode,
    )
    train(config, World())
    other = replace(config, out=tmp_path / "other")
    run_ranks(tmp_path / "first", 1, killed_behind, other, 3, ends={0: -signal.SIGKILL})
    run_ranks(tmp_path / "second", 3 if mode == "ddp" else 2, going_on, other)
    ours, expected = (
        [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]
        for run in (other.out, config.out)
    )
    assert [line["tokens_by_bucket"] for line in ours] == [line["tokens_by_bucket"] for line in expected]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in expected], rel=2e-4)
