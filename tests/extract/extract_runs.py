"""Extractions to test with: samples of a cache, and ranks as forked processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash.cache.reader import CacheReader
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.world import World


def samples_of(out, **options):
    with CacheReader(out, **options) as reader:
        return {s.id: s for s in reader.read(range(len(reader.index)))}


def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(one[key].input_ids, other[key].input_ids)
        and np.array_equal(one[key].loss_mask, other[key].loss_mask)
        and torch.equal(one[key].hidden_states, other[key].hidden_states)
        for key in one
    )


def run_rank(config: ExtractConfig, world: World) -> None:
    """What a rank does; its exit code is 0 when it ends well, and 1 with any error."""
    extract(config, world)


def start_ranks(
    config: ExtractConfig, size: int, run: Callable[[ExtractConfig, World], object] = run_rank
) -> list[Any]:
    """Fork so many ranks. Importing torch anew in each of them would take seconds."""
    context, port = multiprocessing.get_context("fork"), _free_port()
    ranks = [
        context.Process(target=_rank, args=(run, config, World(rank, size, rank), port))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


def exit_codes(ranks: list[Any], seconds: float = 60) -> list[int | None]:
    """Wait for ranks; None for one that is still running after so many seconds."""
    for process in ranks:
        process.join(seconds)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


def _rank(run: Any, config: ExtractConfig, world: World, port: int) -> None:
    if world.size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    torch.set_num_threads(1)
    run(config, world)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
