"""Figures reach every logger under the same names, and no logger can end a run."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
from support import write_cache
from tiny_runs import LENGTHS, tiny_config

from dflash.errors import ConfigError
from dflash.train import loggers
from dflash.train.holdout import HoldoutConfig
from dflash.train.loggers import LOGGERS, check_loggers, scalars
from dflash.train.record import METRICS_NAME
from dflash.train.trainer import train
from dflash.world import World


class FakeRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.logged, self.closed = settings, [], False

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((step, dict(figures)))

    def finish(self) -> None:
        self.closed = True


class FakeWriter(FakeRun):
    def __init__(self, folder: str, purge_step: int) -> None:
        super().__init__({"folder": folder, "purge_step": purge_step})
        WRITERS.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if not self.logged or self.logged[-1][0] != step:
            self.logged.append((step, {}))
        self.logged[-1][1][name] = value

    def close(self) -> None:
        self.closed = True


WRITERS: list[FakeWriter] = []


@pytest.fixture
def packages(monkeypatch) -> dict[str, list[FakeRun]]:
    """Stand-ins for the three packages; the runs that were started with each."""
    WRITERS.clear()
    runs: dict[str, list[FakeRun]] = {"wandb": [], "trackio": [], "tensorboard": WRITERS}
    for name in ("wandb", "trackio", "tensorboard", "torch.utils.tensorboard"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("wandb", "trackio"):

        def started(_package: str = name, **settings: Any) -> FakeRun:
            runs[_package].append(FakeRun(settings))
            return runs[_package][-1]

        sys.modules[name].init = started
    sys.modules["torch.utils.tensorboard"].SummaryWriter = FakeWriter
    return runs


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("loggers") / "cache", LENGTHS)


def test_all_loggers_get_what_metrics_jsonl_holds_under_the_same_names(cache, tmp_path, packages) -> None:
    config = tiny_config(
        cache, tmp_path / "run", holdout=HoldoutConfig(0.35), eval_every=2, max_steps=3, log=LOGGERS
    )
    train(config, World())
    lines = [json.loads(line) for line in (config.out / METRICS_NAME).read_text().splitlines()]
    expected = [(line["step"], scalars(line, (16, 32, 64))) for line in lines]
    for name in ("wandb", "trackio"):
        (run,) = packages[name]
        assert run.logged == expected
        assert run.closed
        assert run.settings["project"] == "dflash"
        assert run.settings["name"].startswith("run")
        assert run.settings["resume"] == "allow"
        assert run.settings["config"]["optim"]["lr"] == 1e-3
    (writer,) = packages["tensorboard"]
    for step, figures in writer.logged:
        assert figures == {k: v for s, part in expected if s == step for k, v in part.items()}
    assert writer.closed
    assert {"loss", "walk_tau", "lr", "accuracy/1"} <= {k for _, part in expected for k in part}


def test_a_resumed_run_goes_on_in_the_same_curves(cache, tmp_path, packages) -> None:
    config = tiny_config(cache, tmp_path / "run", max_steps=3, log=LOGGERS)
    train(config, World())
    train(replace(config, resume=True), World())
    for name, key in (("wandb", "id"), ("trackio", "name")):
        first, second = packages[name]
        assert first.settings[key] == second.settings[key]
    assert [writer.settings["purge_step"] for writer in packages["tensorboard"]] == [1, 4]


def test_runs_whose_folders_have_one_name_are_kept_apart(cache, tmp_path, packages) -> None:
    for parent in ("monday", "tuesday"):
        train(tiny_config(cache, tmp_path / parent / "run", max_steps=1, log=LOGGERS), World())
    for name, key in (("wandb", "id"), ("trackio", "name"), ("tensorboard", "folder")):
        first, second = packages[name]
        assert first.settings[key] != second.settings[key]


def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(cache, tmp_path, packages, capsys) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    sys.modules["trackio"].init = lambda **_: types.SimpleNamespace(log=fail, finish=fail)
    config = tiny_config(cache, tmp_path / "run", max_steps=3, log=("trackio", "wandb"))
    assert train(config, World()).steps == 3
    assert len(packages["wandb"][0].logged) == 3
    warnings = [line for line in capsys.readouterr().err.splitlines() if "no route to host" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("Warning: trackio takes no more figures")


def test_names_are_those_of_the_fields_with_slot_or_bucket() -> None:
    line = {
        "step": 3,
        "kind": "evaluation",
        "loss": 2.5,
        "window": None,
        "accuracy": [0.5, None],
        "loss_by_bucket": [1.0, None, 3.0],
        "mix": {"shares": [0.2, 0.3, 0.5], "longest_run": 2},
    }
    assert scalars(line, (16, 32, 64)) == {
        "loss": 2.5,
        "accuracy/1": 0.5,
        "loss_by_bucket/16": 1.0,
        "loss_by_bucket/64": 3.0,
        "mix_shares/16": 0.2,
        "mix_shares/32": 0.3,
        "mix_shares/64": 0.5,
        "mix_longest_run": 2.0,
    }


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_one_clear_line(name, monkeypatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"--log {name} needs the package {name}: pip install"):
        check_loggers([name])


def test_an_unknown_logger_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--log 'mlflow' is not one of tensorboard, wandb, trackio"):
        tiny_config(tmp_path, tmp_path, log=("mlflow",))
