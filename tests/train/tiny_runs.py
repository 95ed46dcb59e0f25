"""Training runs that take a second, and several ranks of one on this machine."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support import write_cache
from torch import Tensor
from torch import distributed as torch_dist

from dflash.cache.manifest import TARGET_CONFIG_NAME, create_cache
from dflash.cache.planned import Planned, save_planned
from dflash.cache.reader import CacheReader
from dflash.cache.writer import CacheWriter, finalize
from dflash.head import HEAD_NAME
from dflash.train.batches import AnchorConfig
from dflash.train.checkpoint import TENSORS_NAME
from dflash.train.config import TrainConfig
from dflash.train.holdout import HoldoutConfig
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.sampler import SamplerConfig

LENGTHS = [20, 40, 60, 10, 30, 12, 50, 8, 33, 21]


def tiny_config(cache: Path, out: Path, **changes: Any) -> TrainConfig:
    """Blocks of 4, 2 layers, micro-batches of 64 tokens, 2 a step, nothing held out; 8 steps by default."""
    parts: dict[str, Any] = {
        "network": NetworkConfig(2, 4),
        "anchors": AnchorConfig(64, 0.5),
        "objective": ObjectiveConfig(4),
        "sampler": SamplerConfig(tokens_per_batch=64, batches_per_step=2, min_ready=1, max_ready=4),
        "optim": OptimConfig(lr=1e-3),
        "holdout": HoldoutConfig(0.0),
        "epochs": None,
        "max_steps": 8,
    }
    return TrainConfig(cache, out, **(parts | changes))


class Delivery:
    """Fills a cache part by part, as a running extraction does.

    Args:
        cache: A new folder.
        lengths: Tokens of all samples; ids count from 1.
    """

    def __init__(self, cache: Path, lengths: list[int]) -> None:
        self.cache = cache
        whole = write_cache(cache.with_name(f"{cache.name}-whole"), lengths)
        with CacheReader(whole) as reader:
            self._samples = reader.read(range(len(lengths)))
            manifest, edges = reader.manifest, reader.manifest.identity.bucket_edges
        self._manifest = create_cache(cache, replace(manifest, content_digest=None))
        for name in (HEAD_NAME, TARGET_CONFIG_NAME):
            shutil.copy(whole / name, cache)
        save_planned(cache, Planned.of(np.array(lengths), edges))
        self._left, self._lock = set(range(len(lengths))), threading.Lock()

    def bring(self, *rows: int) -> None:
        """Commit those of these samples that are not there yet."""
        with self._lock, CacheWriter(self.cache, self._manifest, "w0") as writer:
            for row in self._left.intersection(rows):
                writer.write(self._samples[row])
            self._left.difference_update(rows)

    def finish(self) -> None:
        """Commit what is left and mark the cache complete."""
        self.bring(*self._left)
        finalize(self.cache)


def trained(checkpoint: Path) -> dict[str, Tensor]:
    """Master weights and optimizer state of a checkpoint."""
    return load_file(checkpoint / TENSORS_NAME)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _rank(rank: int, size: int, folder: Path, work: Callable[..., dict[str, Tensor]], arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch_dist.FileStore(str(folder / "store"), size)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    save_file(work(rank, size, *arguments), folder / f"rank-{rank}.safetensors")
    torch_dist.destroy_process_group()


def run_ranks(
    folder: Path,
    size: int,
    work: Callable[..., dict[str, Tensor]],
    *arguments: Any,
    ends: dict[int, int] | None = None,
) -> list[dict[str, Tensor]]:
    """What `work(rank, size, *arguments)` returns on each of `size` forked processes joined by gloo.

    A rank that hangs is ended and fails the test. Those in `ends` return nothing and end with that exit code.
    """
    expected = [(ends or {}).get(rank, 0) for rank in range(size)]
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, size, folder, work, arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
    alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
    assert not alive, f"ranks {alive} hang"
    assert [process.exitcode for process in ranks] == expected
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(size) if expected[rank] == 0]
