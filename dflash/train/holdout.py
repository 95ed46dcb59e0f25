"""Which samples are never trained on, so that there is something honest to measure with.

Membership is a function of the sample's id and the share alone, not of other samples, the seed or the ranks:
runs on one cache are compared on the same samples, and a cache that grows keeps its split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash.errors import ConfigError


@dataclass(frozen=True)
class HoldoutConfig:
    """How much is held out, and how much of it an evaluation walks through."""

    share: float = 0.02
    """Share of the samples; 0 trains on all and evaluates nothing."""
    samples: int = 512
    """Most held-out samples of one evaluation, always the same ones."""

    def __post_init__(self) -> None:
        """Refuse what is no share.

        Raises:
            ConfigError: names the value and its range.
        """
        if not 0 <= self.share < 1:
            raise ConfigError(
                f"--holdout {self.share} is a share of the samples; it must be in [0, 1), e.g. 0.02"
            )
        if self.samples < 1:
            raise ConfigError(f"--eval-samples is {self.samples}; it must be at least 1")


def sample_draws(ids: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each sample id, `[N]`: splitmix64 (Steele et al., 2014), its upper 53 bits."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    draws: NDArray[np.float64] = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def split(ids: NDArray[np.uint64], config: HoldoutConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on and rows to evaluate on, both ascending.

    Args:
        ids: Id of each sample, `[N]`.
        config: The share, and the most rows to evaluate on; held-out rows beyond that are left alone.
    """
    draws = sample_draws(ids)
    held = draws < config.share
    walked = np.flatnonzero(held)
    walked = np.sort(walked[np.argsort(draws[walked], kind="stable")[: config.samples]])
    return np.flatnonzero(~held), walked
