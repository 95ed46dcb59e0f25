"""With one process nothing is exchanged; more are started through torch's own launcher."""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as torch_dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dflash import dist
from dflash.errors import ConfigError, RankFailed
from dflash.world import World


def test_alone_sums_and_barriers_do_nothing():
    values = torch.tensor([1.0, 2.0])
    with dist.process_group(World()):
        assert not torch_dist.is_initialized()
        assert dist.sum_over_ranks(values) is values
        dist.barrier()
    assert values.tolist() == [1.0, 2.0]


def test_a_group_that_the_caller_has_joined_is_left_open(tmp_path):
    store = torch_dist.FileStore(str(tmp_path / "store"), 1)
    torch_dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with dist.process_group(World(0, 2)):
            assert dist.sum_over_ranks(torch.ones(2)).tolist() == [1.0, 1.0]
            dist.barrier()
        assert torch_dist.is_initialized()
    finally:
        torch_dist.destroy_process_group()


def meeting(store, rank: int, size: int, delay: float):
    time.sleep(delay)
    return dist.fresh_store(store, World(rank, size))


@pytest.mark.parametrize("seed", range(4))
def test_each_start_of_the_ranks_has_a_store_to_itself(seed):
    """Every start is given the same store by torchrun, and some ranks may have been ended before they met."""
    shared, chance, size = torch_dist.HashStore(), random.Random(seed), 3
    for start in range(3):
        for rank in range(1, size):
            if chance.random() < 0.5:
                shared.set(f"dflash/asks/{rank}", f"rank {rank}, ended before start {start}")
        delays = [chance.random() / 10 for _ in range(size)]
        with ThreadPoolExecutor(size) as pool:
            stores = list(pool.map(meeting, [shared] * size, range(size), [size] * size, delays))
        assert not any(store.check(["note"]) for store in stores)
        stores[start].set("note", str(start))
        assert [store.get("note") for store in stores] == [str(start).encode()] * size


def test_ranks_that_cannot_meet_say_where(monkeypatch):
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(dist, "TIMEOUT", timedelta(seconds=0.5))
    expected = rf"^rank 1 has not met the others at 127\.0\.0\.1:{server.port} \(.*timeout"
    with pytest.raises(RankFailed, match=expected), dist.process_group(World(1, 2)):
        pass


@pytest.mark.parametrize(("gpus", "expected"), [(0, 1), (1, 1), (8, 8)])
def test_there_is_one_process_a_gpu_and_one_without(monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert dist.default_nproc() == expected


def test_a_process_uses_the_gpu_of_its_local_rank(monkeypatch):
    assert dist.device_of(World(5, 8, 1)).type == "cpu" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert dist.device_of(World(5, 8, 1)) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 4, but this process sees 4 GPU\(s\)"):
        dist.device_of(World(4, 8, 4))


@pytest.fixture
def nccl(monkeypatch):
    """GPUs and NCCL, as far as joining and leaving go: notes what was called; aborting hangs if told to."""
    note = SimpleNamespace(called=[], hangs=False)

    def abort():
        note.called.append("abort")
        time.sleep(60 if note.hangs else 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", note.called.append)
    monkeypatch.setattr(dist, "_met", lambda world: torch_dist.HashStore())
    monkeypatch.setattr(
        torch_dist,
        "init_process_group",
        lambda backend, device_id, **rest: note.called.append((backend, device_id)),
    )
    monkeypatch.setattr(torch_dist, "destroy_process_group", lambda: note.called.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(dist, "_FAREWELL_S", 0.05)
    return note


GROUPS = [lambda: dist.process_group(World(5, 8, 5)), lambda: dist.replica_group(World(5, 8, 5), 2)]


@pytest.mark.parametrize("group", GROUPS)
def test_with_nccl_the_gpu_is_chosen_before_the_group_is_joined_on_it(nccl, group):
    with group():
        pass
    gpu = torch.device("cuda", 5)
    assert nccl.called == [gpu, ("nccl", gpu), "destroy"]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("hangs", [False, True])
def test_after_a_failure_an_nccl_group_is_left_without_waiting_for_the_others(nccl, hangs, group):
    nccl.hangs = hangs
    started = time.monotonic()
    with pytest.raises(ConfigError, match="mine"), group():
        raise ConfigError("mine")
    assert nccl.called[2:] == ["abort"]
    assert time.monotonic() - started < 30


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--nproc 3 is more than the 2 visible GPUs"):
        dist.launch(["train"], 3)


@pytest.fixture
def launched(monkeypatch):
    """Instead of starting processes, note what would be started; set `fails` to let it fail."""
    note = SimpleNamespace(fails=None)

    def elastic_launch(config, entry):
        def run(*arguments):
            note.config, note.entry, note.arguments = config, entry, arguments
            if note.fails:
                raise ChildFailedError("dflash", note.fails)

        return run

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS")
    return note


def test_a_launch_starts_this_program_and_divides_the_cores(launched):
    dist.launch(["train", "--lr", "1"], 4)
    assert launched.entry == sys.executable
    assert launched.arguments == ("-m", "dflash", "train", "--lr", "1")
    assert launched.config.nproc_per_node == 4
    assert launched.config.max_restarts == 0
    assert launched.config.local_addr == "127.0.0.1"
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: (2, 5.0), 1: (1, 9.0)}, 2),
        ({0: (-9, 1.0)}, 1),
        ({0: (3, 1.0), 1: (2, 9.0)}, 2),  # rank 0 ended because of rank 1
        ({0: (-15, 1.0), 1: (3, 9.0)}, 1),  # rank 0 was stopped, and ended by the launcher
    ],
)
def test_the_failure_that_ended_the_others_decides_the_exit_code(launched, codes, expected, capsys):
    launched.fails = {}
    for rank, (code, when) in codes.items():
        launched.fails[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="none")
        launched.fails[rank].timestamp = when
    with pytest.raises(SystemExit) as caught:
        dist.launch(["train"], 2)
    assert caught.value.code == expected
    assert ("was ended by SIGKILL" in capsys.readouterr().err) == (codes == {0: (-9, 1.0)})
