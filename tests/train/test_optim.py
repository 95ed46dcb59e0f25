"""The learning rate's curve, and which parameters are decayed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import drafter_config

from dflash.drafter import Drafter
from dflash.errors import ConfigError
from dflash.train.optim import OptimConfig, build_optimizer, lr_at, moments_of, set_lr

CONFIG = OptimConfig(lr=2.0, warmup=0.1, final_lr=0.25)


def test_the_rate_rises_in_a_line_falls_in_half_a_cosine_and_ends_at_its_floor():
    points = {0.0: 0.0, 0.05: 1.0, 0.1: 2.0, 0.55: 1.25, 1.0: 0.5, 1.3: 0.5}
    for progress, rate in points.items():
        assert lr_at(progress, CONFIG) == pytest.approx(rate)


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_rate_stays_in_bounds_and_only_falls_behind_the_warm_up(first, second):
    low, high = sorted([first, second])
    assert 0 <= lr_at(low, CONFIG) <= CONFIG.lr
    if low >= CONFIG.warmup:
        assert lr_at(high, CONFIG) <= lr_at(low, CONFIG)
    if high < CONFIG.warmup:
        assert lr_at(high, CONFIG) >= lr_at(low, CONFIG)


def test_without_warm_up_the_first_rate_is_the_peak():
    assert lr_at(0.0, OptimConfig(lr=2.0, warmup=0.0)) == 2.0
    assert lr_at(1.0, OptimConfig(lr=2.0)) == 0.0


def test_only_matrices_are_decayed():
    drafter = Drafter(drafter_config(attention_bias=True))
    optimizer = build_optimizer(drafter, OptimConfig(weight_decay=0.3))
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(drafter.parameters()))
    for name, parameter in drafter.named_parameters():
        matrix = name.endswith("weight") and "norm" not in name
        assert decay[parameter] == (0.3 if matrix else 0.0), name


def test_frozen_parameters_are_left_out():
    drafter = Drafter(drafter_config())
    drafter.norm.weight.requires_grad_(False)
    groups = build_optimizer(drafter, OptimConfig()).param_groups
    assert all(p is not drafter.norm.weight for group in groups for p in group["params"])


def test_the_rate_of_a_step_is_the_one_that_was_set():
    module = torch.nn.Linear(2, 1, bias=False)
    before = module.weight.detach().clone()
    optimizer = build_optimizer(module, OptimConfig(lr=1.0, weight_decay=0.0))
    for lr in (0.0, 0.5):
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        # Adam's first steps along a constant gradient are as long as the rate
        torch.testing.assert_close(module.weight.detach(), before - lr)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": 0.0}, "--lr 0.0 must be positive"),
        ({"lr": float("nan")}, "--lr nan must be positive"),
        ({"warmup": 1.0}, "--warmup 1.0 is a share of the run"),
        ({"warmup": -0.1}, "--warmup -0.1 is a share"),
        ({"clip": 0.0}, "--clip 0.0 must be positive"),
    ],
)
def test_settings_that_cannot_train_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        OptimConfig(**settings)


def test_muon_takes_the_matrices_and_adamw_the_rest():
    drafter = Drafter(drafter_config(attention_bias=True))
    optimizer = build_optimizer(drafter, OptimConfig("muon", lr=1e-2))
    set_lr(optimizer, 3e-3)
    assert all(group["lr"] == 3e-3 for group in optimizer.param_groups)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    optimizer.step()
    for name, parameter in drafter.named_parameters():
        assert set(optimizer.state[parameter]) == set(moments_of(optimizer, parameter)), name
        assert not torch.equal(parameter, before[name]), name
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_muon_steps_are_as_large_as_those_of_adamw():
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64)
    before = module.weight.detach().clone()
    optimizer = build_optimizer(module, OptimConfig("muon", lr=1e-2, weight_decay=0.0))
    module.weight.grad, module.bias.grad = torch.randn(64, 64), torch.ones(64)
    optimizer.step()
    step = (module.weight.detach() - before).square().mean().sqrt()
    assert 0.1e-2 < step < 0.3e-2  # 0.2 of the rate, as AdamW's updates measure in training


def test_wsd_stays_at_the_peak_and_falls_in_a_line_at_the_end():
    config = OptimConfig(lr=2.0, warmup=0.1, schedule="wsd", decay=0.4, final_lr=0.5)
    points = {0.05: 1.0, 0.1: 2.0, 0.6: 2.0, 0.8: 1.5, 1.0: 1.0, 1.2: 1.0}
    for progress, rate in points.items():
        assert lr_at(progress, config) == pytest.approx(rate)


def test_a_constant_rate_is_constant_behind_its_warm_up():
    config = OptimConfig(lr=2.0, warmup=0.1, schedule="constant")
    assert lr_at(0.05, config) == pytest.approx(1.0)
    assert {lr_at(progress, config) for progress in (0.1, 0.5, 1.0, 1.5)} == {2.0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schedule": "linear"}, "--schedule 'linear' is not one of cosine, wsd, constant"),
        ({"schedule": "wsd", "decay": 0.0}, "--decay 0.0 is a share of the run"),
        ({"schedule": "wsd", "decay": 0.97}, "leave room for --warmup 0.04"),
    ],
)
def test_schedules_without_sense_are_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        OptimConfig(**change)
