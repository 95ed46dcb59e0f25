"""Processes of a run: starting them, joining them, sums over them. Everything works with one process too."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as torch_dist
from torch.distributed import (  # type: ignore[attr-defined] # re-exported silently
    PrefixStore,
    Store,
    distributed_c10d,
)
from torch.distributed.rendezvous import rendezvous

from dflash.errors import EXIT_RANK_FAILED, ConfigError, RankFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from dflash.world import World

TIMEOUT = timedelta(minutes=10)
_POLL_S = 0.01
_FAREWELL_S = 5.0
"""How long leaving the others may take after a failure."""


def default_nproc() -> int:
    """One process a GPU; one on a machine without."""
    return max(torch.cuda.device_count(), 1)


def device_of(world: World) -> torch.device:
    """The GPU of this process, or the CPU.

    Raises:
        ConfigError: there are GPUs, but none for this process.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= (gpus := torch.cuda.device_count()):
        raise ConfigError(
            f"LOCAL_RANK is {world.local_rank}, but this process sees {gpus} GPU(s); start at most one "
            "process a GPU, and let each see all GPUs of its machine (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", world.local_rank)


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Join the other processes for the length of the block: NCCL between GPUs, gloo between CPUs.

    Does nothing for a world of one, or when the caller has joined already.

    Raises:
        RankFailed: the others cannot be found.
    """
    device = _own_device(world)
    if world.size == 1 or torch_dist.is_initialized():
        yield
        return
    with _joined(device, _met(world), world.rank, world.size):
        yield


@contextmanager
def replica_group(world: World, size: int) -> Iterator[Store]:
    """Join no more than the `size` consecutive ranks that hold a model together, for the length of the block.

    To torch they are a world of their own, as Transformers' tensor parallelism wants it: its mesh must cover
    the whole process group.

    Args:
        world: This process; it must have been started by a launcher.
        size: Ranks of a replica; divides the world.

    Returns:
        The store that all ranks of all replicas share.

    Raises:
        RankFailed: the others cannot be found.
    """
    device, store = _own_device(world), _met(world)
    own = PrefixStore(f"replica{world.rank // size}", store)
    with _joined(device, own, world.rank % size, size):
        yield store


def _own_device(world: World) -> torch.device:
    """The device of this process, which CUDA uses where none is named."""
    device = device_of(world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextmanager
def _joined(device: torch.device, store: Store, rank: int, size: int) -> Iterator[None]:
    """In a process group whose ranks share this store, for the length of the block."""
    bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch_dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, **bound)
    try:
        yield
    except BaseException:
        if backend == "nccl":
            _abandon()
        else:
            torch_dist.destroy_process_group()
        raise
    torch_dist.destroy_process_group()


def _abandon() -> None:
    """Leave an NCCL group after a failure.

    Destroying it waits for collectives in flight and for ranks that may be gone, aborting it for less, but at
    times for ever too (NCCL issue 1777). The error of this rank shall be read all the same.
    """

    def leave() -> None:
        with suppress(RuntimeError):
            distributed_c10d._abort_process_group()  # noqa: SLF001 - torch has no public name for it

    thread = threading.Thread(target=leave, name="abandon", daemon=True)
    thread.start()
    thread.join(_FAREWELL_S)


def _met(world: World) -> Store:
    """A store that all ranks of this start share, and no others."""
    try:
        store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=TIMEOUT)))
        return fresh_store(store, world)
    except torch_dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().split("\n")[0]
        raise RankFailed(f"rank {world.rank} has not met the others at {where} ({reason})") from error


def fresh_store(store: Store, world: World) -> Store:
    """A part of the store that holds nothing from earlier starts.

    torchrun keeps its store when it starts the ranks again, with the addresses of processes that are gone and
    the counters of the board. So the first rank chooses a name for each start, and tells it to whoever asks
    with a word that nobody used before; it goes on until all ranks of its own start have come.

    Raises:
        RankFailed: one has not come in time, though it was there a moment ago.
    """
    word = secrets.token_hex(8)
    if not world.is_main:
        store.set(f"dflash/asks/{world.rank}", word)
        start = PrefixStore(store.get(f"dflash/start-for/{word}").decode(), store)
        start.set(f"dflash/came/{world.rank}", "")
        return start
    start, deadline = PrefixStore(word, store), time.monotonic() + TIMEOUT.total_seconds()
    for rank in range(1, world.size):
        while not start.check([f"dflash/came/{rank}"]):
            if time.monotonic() > deadline:
                raise RankFailed(f"nothing was heard from rank {rank} since it met the others")
            if store.check([f"dflash/asks/{rank}"]):  # perhaps one of an earlier start
                store.set(f"dflash/start-for/{store.get(f'dflash/asks/{rank}').decode()}", word)
            time.sleep(_POLL_S)
    return start


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place; alone, it is returned as it is."""
    if torch_dist.is_initialized():
        torch_dist.all_reduce(values)
    return values


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    if not torch_dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
    return float(tensor.item())


def barrier() -> None:
    """Wait until every rank is here."""
    if torch_dist.is_initialized():
        torch_dist.barrier()


def launch(arguments: Sequence[str], nproc: int) -> None:
    """Start this command `nproc` times on this machine through torch.distributed's elastic launcher.

    A process that fails ends the others, and its own error is what is shown.

    Args:
        arguments: The command line behind `python -m dflash`.
        nproc: Number of processes.

    Raises:
        ConfigError: more processes than GPUs.
        SystemExit: a process failed, or a signal came; carries the exit code.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    gpus = torch.cuda.device_count()
    if gpus and nproc > gpus:
        raise ConfigError(
            f"--nproc {nproc} is more than the {gpus} visible GPUs; use at most one process a GPU"
        )
    # As torchrun does it: without this every process would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # or the machine's name would be looked up, which in a container may fail
        run_id=f"dflash-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "dflash", *arguments)
    except SignalException as error:  # the launcher has passed the signal on and waited for the processes
        raise SystemExit(128 + int(error.sigval)) from None
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: _blame(item[1]))
        if first.exitcode == EXIT_RANK_FAILED:  # the one it names was stopped, and said nothing
            raise SystemExit(1) from None
        if first.exitcode > 0:  # it has said why itself
            raise SystemExit(first.exitcode) from None
        name = signal.Signals(-first.exitcode).name
        hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        sys.stderr.write(f"Error: rank {rank} was ended by {name}{hint}; the other ranks were stopped\n")
        raise SystemExit(1) from None


def _blame(failure: ProcessFailure) -> tuple[int, float]:
    """Sorts first what ended the others: an own failure, then one because of another, then the launcher's."""
    echoes = (EXIT_RANK_FAILED, -signal.SIGTERM)
    place = 1 + echoes.index(failure.exitcode) if failure.exitcode in echoes else 0
    return place, failure.timestamp
