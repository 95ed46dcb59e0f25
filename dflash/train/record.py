"""What a run says about itself: a JSON line a step in `metrics.jsonl`, and a short line for the terminal."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.files import publish_bytes
from dflash.train.faults import append_line
from dflash.train.loggers import Logger, scalars
from dflash.train.mixmeter import MeterState, MixMeter
from dflash.train.runs import METRICS_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

_LEVELS = " ▁▂▃▄▅▆▇█"


def step_figures(totals: Tensor, block_size: int, buckets: int) -> dict[str, Any]:
    """Means from the sums of `LossSums.metrics` over a step.

    Returns:
        `loss` (sum(w CE)/sum(w)), `accuracy` by slot 1..B-1, `anchor_tau` (1 + leading correct slots,
        averaged over all anchors: not what a serving walk sees), the same by bucket, and `blocks`.
    """
    loss, weight, rest = float(totals[0]), float(totals[1]), totals[2:]
    slots = block_size - 1
    correct, counted, accepted, blocks, bucket_loss, bucket_weight = rest.split(  # type: ignore[no-untyped-call]
        [slots, slots, buckets, buckets, buckets, buckets]
    )
    return {
        "loss": loss / weight if weight > 0 else 0.0,
        "accuracy": _ratios(correct, counted),
        "anchor_tau": _ratio(float(accepted.sum()), float(blocks.sum())),
        "anchor_tau_by_bucket": _ratios(accepted, blocks),
        "loss_by_bucket": _ratios(bucket_loss, bucket_weight),
        "blocks": int(blocks.sum()),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _ratios(parts: Tensor, wholes: Tensor) -> list[float | None]:
    return [_ratio(part, whole) for part, whole in zip(parts.tolist(), wholes.tolist(), strict=True)]


class RunLog:
    """Collects the figures of each step.

    Args:
        run: The run's folder.
        edges: Bucket edges, for names.
        quota: Share of the tokens that each bucket is owed.
        enabled: Only the first rank writes.
    """

    def __init__(self, run: Path, edges: tuple[int, ...], quota: tuple[float, ...], *, enabled: bool) -> None:
        self._quota = quota
        self._path, self._edges, self._enabled = run / METRICS_NAME, edges, enabled
        self._meter = MixMeter(quota)
        self._losses: list[float] = []
        self._taus: list[float] = []
        self._started = time.perf_counter()
        self._step = 0
        self.last_tokens = 0
        self._walk: float | None = None
        self._waited = 0.0
        self._loggers: list[Logger] = []

    def start(self, done: int, mix: MeterState | None = None) -> None:
        """Begin behind `done` steps: lines of steps that are repeated after a crash are cut off.

        Args:
            done: Steps that the run has done.
            mix: What `mix_state` returned behind them; without it, the mix is counted from here.

        Raises:
            CheckpointError: `mix` belongs to other buckets.
        """
        self._meter = MixMeter(self._quota, state=mix)
        if not self._enabled or not self._path.exists():
            return
        kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= done]
        publish_bytes(self._path, "".join(f"{line}\n" for line in kept).encode())

    def add(self, figures: dict[str, Any], draws: np.ndarray, seconds: float, held: Sequence[int]) -> None:
        """Record one step.

        Args:
            figures: Of its computation.
            draws: Tokens that it drew, `[micro-batches, buckets]`.
            seconds: Its wall time.
            held: Tokens that each bucket of the cache holds, `[buckets]`.
        """
        for draw in draws:
            self._meter.record(draw)
        self.last_tokens = int(draws.sum())
        self._step = figures["step"]
        self._losses.append(figures["loss"])
        self._taus.append(figures["anchor_tau"] or 1.0)
        line = figures | {
            "tokens": self.last_tokens,
            "tokens_by_bucket": draws.sum(axis=0).tolist(),
            "seconds": seconds,
            "passes_by_bucket": self._passes(held),
            "mix": self.mix(),
        }
        self._write(line)

    def add_evaluation(self, figures: dict[str, Any]) -> None:
        """Record a walk over the held-out samples; its line says `"kind": "evaluation"`."""
        self._walk = figures["walk_tau"]
        self._write(figures)

    def skip(self, figures: dict[str, Any], draws: np.ndarray) -> None:
        """Record a step that was skipped; its line says `"kind": "skipped"`."""
        for draw in draws:
            self._meter.record(draw)
        self.last_tokens = int(draws.sum())
        self._step = figures["step"]
        self._write(figures | {"kind": "skipped", "tokens": self.last_tokens})

    def _write(self, line: dict[str, Any]) -> None:
        if self._enabled:
            append_line(self._path, line)
            self._tell(lambda logger: logger.log(line["step"], scalars(line, self._edges)))

    def attach(self, loggers: Sequence[Logger]) -> None:
        """Send all figures from now on to these as well."""
        self._loggers = list(loggers)

    def close(self) -> None:
        """Let the loggers write out what they hold back."""
        self._tell(lambda logger: logger.close())
        self._loggers = []

    def _tell(self, message: Callable[[Logger], object]) -> None:
        """A logger that fails is left out from then on: a run of days does not end for a curve."""
        self._loggers = [logger for logger in self._loggers if _takes(logger, message)]

    def summary(self, waited: float) -> str:
        """A few words for the progress line; the trainer has waited so many seconds for data."""
        self._waited = waited
        return f"{self.headline()}, {self._mix_bar()}"

    def headline(self) -> str:
        """How it learns: step, loss, acceptance, and the share of the time spent waiting for data."""
        recent = slice(-10, None)
        loss, tau = np.mean(self._losses[recent] or np.nan), np.mean(self._taus[recent] or np.nan)
        share = self._waited / max(time.perf_counter() - self._started, 1e-9)
        walk = "" if self._walk is None else f", walk tau {self._walk:.2f}"
        return f"step {self._step}, loss {loss:.3f}, anchor tau {tau:.2f}{walk}, waiting for data {share:.1%}"

    def recent_mix(self) -> list[tuple[int, float, float]]:
        """Upper edge of each bucket, its share of the last draws' tokens, and what it is owed."""
        return list(zip(self._edges, self._meter.recent_shares(), self._quota, strict=True))

    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps, NaN without any."""
        count = max(len(self._losses) // 10, 1)
        return float(np.mean(self._losses[-count:])) if self._losses else float("nan")

    def mix(self) -> dict[str, Any]:
        """Share of each bucket against its quota, and how far recent draws were from it."""
        return self._meter.report().to_json()

    def mix_state(self) -> MeterState:
        """What has been counted of the mix, for a checkpoint."""
        return self._meter.state()

    def _passes(self, held: Sequence[int]) -> list[float | None]:
        """How often each bucket's samples have been drawn so far, on average; None for an empty one."""
        consumed = self._meter.tokens_by_bucket().tolist()
        return [_ratio(taken, whole) for taken, whole in zip(consumed, held, strict=True)]

    def _mix_bar(self) -> str:
        """A block a bucket, short to long, for the last 30 draws: half high is on quota, full is twice it."""
        shares = self._meter.recent_shares()
        ratios = [share / owed for share, owed in zip(shares, self._quota, strict=True) if owed]
        bar = "".join(_LEVELS[min(round(4 * ratio), len(_LEVELS) - 1)] for ratio in ratios)
        return f"mix {bar} {self._meter.report().variation[0].last:.1%} off"


def _takes(logger: Logger, message: Callable[[Logger], object]) -> bool:
    try:
        message(logger)
    except Exception as error:  # noqa: BLE001 - whatever a third party's package raises
        sys.stderr.write(f"Warning: {logger} takes no more figures ({error}); training goes on\n")
        return False
    return True


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62  # a half-written last line is dropped
