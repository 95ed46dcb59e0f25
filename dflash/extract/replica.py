"""A target that is larger than one GPU: consecutive ranks hold a replica of it together.

Transformers splits the weights, so every forward pass takes all ranks of a replica, with the same batch. The
first of them does what a rank does alone: it takes units, keeps the states and writes. The others run the
batches that it hands on, one by one, also one that is run again: whatever it decides, they follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.board import Board
from dflash.dist import process_group, replica_group
from dflash.errors import ConfigError, TargetError
from dflash.lifeline import Lifeline
from dflash.target import TruncatedTarget
from dflash.world import World


@dataclass(frozen=True)
class Replica:
    """The ranks that hold the target with this one: `size` consecutive ones."""

    world: World
    size: int = 1

    def __post_init__(self) -> None:
        """Refuse replicas that do not fill the world.

        Raises:
            ConfigError: the number of ranks is no multiple of the size.
        """
        if self.world.size % self.size:
            raise ConfigError(
                f"--tp {self.size} does not divide the number of processes, {self.world.size}; "
                f"start a multiple of {self.size}, one a GPU (--nproc, or torchrun)"
            )

    @property
    def is_first(self) -> bool:
        """Whether this rank takes work and writes."""
        return self.world.rank == self.first

    @property
    def first(self) -> int:
        """The rank that takes work and writes."""
        return self.world.rank - self.world.rank % self.size

    @property
    def others(self) -> range:
        """All its ranks but the first."""
        return range(self.first + 1, self.first + self.size)

    @contextmanager
    def joined(self, topic: str) -> Iterator[Board]:
        """Join the ranks of the replica, and the board of all ranks, for the length of the block."""
        if self.size == 1:
            with process_group(self.world):
                yield Board(self.world, topic)
        else:
            with replica_group(self.world, self.size) as store:
                yield Board(self.world, topic, store)


class ReplicaTarget(TruncatedTarget):
    """A truncated target that the ranks of a replica hold together.

    Args:
        name: Folder or hub name.
        taps: 0-based layers, ascending.
        replica: These ranks.
        line: To all ranks; batches are handed on through its board.
        options: As for one rank.

    Raises:
        TargetError: the target cannot be loaded, lacks weights, or its family has no plan of how to split it.
        ConfigError: a tap is not a layer of it, or its attention heads cannot be shared out.
    """

    def __init__(
        self, name: str, taps: tuple[int, ...], *, replica: Replica, line: Lifeline, **options: Any
    ) -> None:
        super().__init__(name, taps, tp=replica.size, **options)
        self._replica, self._line, self._board = replica, line, line.board
        self._handed = 0

    def capture(self, sequences: Sequence[np.ndarray], out: Tensor) -> None:
        """Run one batch on all ranks of the replica; only the first one may call this.

        Args:
            sequences: Token ids, one int array `[T_i]` a sample.
            out: `[sum of T_i, K, H]`, filled with whole streams, not with this rank's part of them.

        Raises:
            TargetError: a rank has too little memory, or is gone.
            RankFailed: another rank failed, and has said why.
        """
        self._hand_on([ids.tolist() for ids in sequences])
        self._run(sequences, out)

    def dismiss(self) -> None:
        """Let the other ranks go; for the first one, when no batch follows."""
        self._hand_on([])

    def follow(self, meanwhile: Callable[[], object]) -> None:
        """Run what the first rank runs until it is done, calling `meanwhile` between and while waiting.

        Raises:
            TargetError: a rank has too little memory, or is gone.
            RankFailed: another rank failed, and has said why.
        """
        while batch := self._taken(meanwhile):
            self._line.at(f"batch {self._handed} of its replica", part=True)
            sequences = [np.asarray(ids, dtype=np.int32) for ids in batch]
            shape = (sum(map(len, sequences)), len(self.taps), self.hidden_size)
            self._run(sequences, torch.empty(shape, dtype=self.model.dtype, device=self.device))

    def _hand_on(self, batch: list[list[int]]) -> None:
        for rank in self._replica.others:
            self._board.hand(f"batch{self._handed}", rank, batch)
        self._handed += 1

    def _taken(self, meanwhile: Callable[[], object]) -> list[list[int]]:
        self._line.at(f"waiting for what rank {self._replica.first} hands on", part=True)
        batch: list[list[int]] = self._board.taken(f"batch{self._handed}", meanwhile)
        self._handed += 1
        return batch

    def _run(self, sequences: Sequence[np.ndarray], out: Tensor) -> None:
        try:
            super().capture(sequences, out)
        except torch.OutOfMemoryError as error:  # others may have had enough, so the batch cannot be halved
            raise TargetError(
                f"the memory of {self.device} does not suffice for a batch of {len(out)} tokens; set a lower "
                f"--tokens-per-batch, or a larger --tp than {self._replica.size}"
            ) from error
        except RuntimeError as error:
            # a rank that is gone is found behind it by the lifeline
            reason = str(error).strip().split("\n")[0]
            raise TargetError(
                f"the ranks that hold the target with rank {self._replica.world.rank} (--tp "
                f"{self._replica.size}) cannot go on: {reason}; run the same command again to go on"
            ) from error
