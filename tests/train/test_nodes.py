"""The command as users start it on one and on two machines: ranks and nodes that die, and come back."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from support import write_cache
from tiny_runs import LENGTHS, Delivery

from dflash.train.checkpoint import checkpoints, latest_checkpoint
from dflash.train.record import METRICS_NAME

pytestmark = pytest.mark.long
STEPS = 600
FEWER = 300  # still far from its end a second behind step 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("nodes") / "cache", LENGTHS)


def flags(cache, out, steps: int = STEPS) -> list[str]:
    given = {"cache": cache, "out": out, "layers": 2, "block-size": 4, "tokens-per-batch": 64}
    given |= {"batches-per-step": 2, "min-ready": 1, "max-ready": 4, "max-steps": steps, "save-every": 20}
    return ["train", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


COMING_BACK = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""What docs/training.md asks for where a machine may die and come back."""


def start(command: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )


def children(process: subprocess.Popen) -> list[int]:
    found = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def wait_for_step(process: subprocess.Popen, run, step: int) -> None:
    while True:
        assert process.poll() is None, process.communicate()[0]
        found = checkpoints(run)
        if found and int(found[0].name[5:]) >= step:
            return
        time.sleep(0.1)


def steps_of(run) -> list[int]:
    lines = [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]
    return [line["step"] for line in lines if "kind" not in line]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_rank_killed_at_random_ends_the_command_with_its_name_and_resume_goes_on(
    cache, tmp_path, mode, seed
):
    chance = random.Random(seed)
    command = ["dflash", *flags(cache, tmp_path / "run", FEWER), "--nproc", "2", "--parallel", mode]
    process = start(command)
    wait_for_step(process, tmp_path / "run", 40)
    time.sleep(chance.random())
    victim = chance.randrange(2)
    os.kill(sorted(children(process))[victim], signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    assert re.search(r"Error: rank \d was ended by SIGKILL, perhaps for lack of memory", output)
    assert "Traceback" not in output
    newest = latest_checkpoint(tmp_path / "run")
    assert newest is not None
    done = subprocess.run(
        [sys.executable, "-m", *command, "--resume"], capture_output=True, text=True, check=True
    )
    assert f"{FEWER:,} steps" in done.stdout
    assert steps_of(tmp_path / "run") == list(range(1, FEWER + 1))


def test_two_ranks_follow_a_cache_stop_while_they_wait_die_and_go_on_to_the_end(tmp_path):
    """Started before there is a cache; what has arrived is drawn, and nothing behind it until more has."""
    run, delivery = tmp_path / "run", Delivery(tmp_path / "cache", LENGTHS * 12)
    command = ["dflash", *flags(delivery.cache, run, 100), "--follow", "--nproc", "2", "--resume"]
    process = start(command)
    delivery.bring(*range(60))
    while not (run / METRICS_NAME).exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    last = -1
    while last != (last := len(steps_of(run))):
        time.sleep(3)
    assert last < 100
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert f"{last} steps" in output
    assert process.returncode == 128 + signal.SIGTERM
    delivery.bring(*range(60, 90))
    process = start(command)
    while len(steps_of(run)) < last + 5:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.kill(sorted(children(process))[1], signal.SIGKILL)
    assert "Error: rank 1 was ended by SIGKILL" in process.communicate(timeout=60)[0]
    delivery.finish()
    process = start(command)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert steps_of(run) == list(range(1, 101))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_ends_the_command_within_half_a_minute(cache, tmp_path, victim):
    process = start(["dflash", *flags(cache, tmp_path / "run"), "--nproc", "2"])
    wait_for_step(process, tmp_path / "run", 40)
    os.kill(sorted(children(process))[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - stopped < 35
    assert process.returncode != 0
    # the folder of a checkpoint is there before the rank goes on to the next step
    where = r"(step|the checkpoint of step) \d+"
    assert re.search(
        rf"Error: rank {victim} is stopped or its machine is frozen: .* it was at {where}", output
    )
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_leaves_a_checkpoint_of_the_last_step(cache, tmp_path, number):
    process = start(["dflash", *flags(cache, tmp_path / "run"), "--nproc", "2"])
    wait_for_step(process, tmp_path / "run", 40)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}; go on with --resume" in output
    assert checkpoints(tmp_path / "run")[0].name == f"step-{steps_of(tmp_path / 'run')[-1]:06d}"


def test_a_users_error_ends_the_command_with_its_text_alone(cache, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dflash", *flags(cache, tmp_path / "run"), "--nproc", "2", "--lr", "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Error: --lr -1.0 must be positive" in done.stderr
    assert "Traceback" not in done.stderr


def test_torchrun_starts_the_ranks_of_a_machine_again_as_often_as_one_dies(cache, tmp_path):
    """Without any variable; each death takes one restart, so two are enough for two of them."""
    run, launcher = tmp_path / "run", ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    restarts = ["--max-restarts", "2", "--monitor-interval", "0.2"]
    process = start([*launcher, *restarts, "-m", "dflash", *flags(cache, run), "--resume"])
    for victim, step in ((1, 40), (0, 160)):
        wait_for_step(process, run, step)
        os.kill(sorted(children(process))[victim], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert steps_of(run) == list(range(1, STEPS + 1))


def node(cache, out, port: int, nodes: str = "2", *, host: bool = False) -> list[str]:
    conf = f"is_host={host},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    launcher = ["torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "5"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    launcher += ["--rdzv-conf", conf, "--local-addr", "127.0.0.1", "--monitor-interval", "0.2"]
    return [*launcher, "-m", "dflash", *flags(cache, out), "--resume"]


def kill_node(process: subprocess.Popen) -> None:
    """As when a machine loses its power: the launcher and its processes at once."""
    for pid in (process.pid, *children(process)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("given", [COMING_BACK, {}], ids=["variable", "none"])
def test_two_nodes_train_together_from_a_folder_with_nothing_to_resume(cache, tmp_path, given):
    port = free_port()
    nodes = [start(node(cache, tmp_path / "run", port, host=host), **given) for host in (True, False)]
    outputs = [process.communicate(timeout=240)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], outputs
    warnings = [line for output in outputs for line in output.splitlines() if "Warning: a machine" in line]
    assert len(warnings) == (0 if given else 1)  # the first rank's
    assert sum(f"{STEPS:,} steps" in output for output in outputs) == 1  # the first rank's
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["world_size"] == 2


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_node_that_dies_and_comes_back_goes_on_from_the_last_checkpoint(cache, tmp_path, nodes):
    port, run = free_port(), tmp_path / "run"
    first = start(node(cache, run, port, nodes, host=True), **COMING_BACK)
    time.sleep(1)
    second = start(node(cache, run, port, nodes), **COMING_BACK)
    wait_for_step(first, run, 40)
    kill_node(second)
    died = int(checkpoints(run)[0].name[5:])
    again = start(node(cache, run, port, nodes), **COMING_BACK)
    outputs = [process.communicate(timeout=240)[0] for process in (first, again)]
    assert [first.returncode, again.returncode] == [0, 0], outputs
    assert steps_of(run) == list(range(1, STEPS + 1))
    assert int(checkpoints(run)[0].name[5:]) == STEPS > died
