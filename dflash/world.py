"""`World`: who this process is among the processes of a run. A value, without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class World:
    """Position of one process in a run of `size` processes."""

    rank: int = 0
    """0-based number of this process over all nodes."""
    size: int = 1
    """Number of processes over all nodes."""
    local_rank: int = 0
    """0-based number of this process on its node; the GPU it uses."""

    def __post_init__(self) -> None:
        """Refuse a rank outside the world.

        Raises:
            ConfigError: rank or size does not make sense.
        """
        if self.size < 1 or not 0 <= self.rank < self.size or self.local_rank < 0:
            raise ConfigError(
                f"rank {self.rank} of {self.size} (local {self.local_rank}) is not a process of a run; "
                "check RANK, WORLD_SIZE and LOCAL_RANK"
            )

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes what exists once."""
        return self.rank == 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; without them, the only process.

        Raises:
            ConfigError: a variable is not a number, or they contradict each other.
        """
        env = os.environ if environ is None else environ
        try:
            return cls(int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_RANK", 0)))
        except ValueError as error:
            raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be integers: {error}") from error


def launched_by_torchrun(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher has already started this process as one of many."""
    env = os.environ if environ is None else environ
    return "WORLD_SIZE" in env and "RANK" in env


def rejoin_warning(environ: Mapping[str, str] | None = None) -> str | None:
    """What torchrun should have been told so that a machine that dies can come back; None if all is well.

    The ranks cannot make up for it: the launchers themselves look for each other where they no longer are.
    """
    env = os.environ if environ is None else environ
    several = int(env.get("GROUP_WORLD_SIZE", 1)) > 1 and int(env.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if not several or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return (
        "a machine that dies cannot come back: torchrun was started without "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; set it on all machines before torchrun"
    )
