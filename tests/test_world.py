"""`World` is read from the environment, and a rank that cannot be is refused."""

from __future__ import annotations

import pytest

from dflash.errors import ConfigError
from dflash.world import World, launched_by_torchrun, rejoin_warning


def test_without_a_launcher_there_is_one_process():
    assert World.from_env({}) == World(0, 1, 0)
    assert World.from_env({}).is_main
    assert not launched_by_torchrun({})


def test_the_variables_of_torchrun_are_read():
    environ = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    assert World.from_env(environ) == World(9, 16, 1)
    assert not World.from_env(environ).is_main
    assert launched_by_torchrun(environ)


def test_the_process_environment_is_the_default(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert World.from_env() == World(1, 2, 1)
    assert launched_by_torchrun()


@pytest.mark.parametrize("position", [(2, 2, 0), (-1, 2, 0), (0, 0, 0), (0, 1, -1)])
def test_a_rank_outside_the_world_is_refused(position):
    with pytest.raises(ConfigError, match="is not a process of a run; check RANK"):
        World(*position)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_is_no_number_is_refused(name):
    with pytest.raises(ConfigError, match=r"must be integers.*'two'"):
        World.from_env({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | {name: "two"})


REJOIN = {
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"GROUP_WORLD_SIZE": "1"}, False),  # one machine
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),  # nothing is to be started again
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),  # the variable was set
    ],
)
def test_several_machines_of_which_none_could_come_back_are_warned(changes, warned):
    text = rejoin_warning(REJOIN | changes)
    assert (text is not None and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text) == warned


def test_without_a_launcher_there_is_nothing_to_warn_of():
    assert rejoin_warning({}) is None
