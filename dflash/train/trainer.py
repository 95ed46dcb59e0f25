"""Stage 2: fit a drafter to a cache. One loop, read from top to bottom in `train`.

1. Open the cache (index only), its head and its target's configuration; the target itself is never loaded.
2. Build the drafter in float32, the sampler and the optimizer; or put them back from the newest checkpoint.
3. For every step: sum the loss over this rank's micro-batches, divide by the weights of the whole step over
   all ranks, clip, update, record.
4. Walk over the held-out samples where asked, and at the end.
5. Save where asked, at the end, and when a signal asks the run to stop.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from dflash.board import Board
from dflash.dist import device_of, process_group
from dflash.lifeline import Lifeline, lifeline
from dflash.stopping import StopFlag, stop_signals
from dflash.train.config import TrainConfig, TrainResult
from dflash.train.follower import Follower
from dflash.train.memory import keep_memory
from dflash.train.run import Run
from dflash.train.sampler import check_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dflash.world import World

_TIME_IS_UP = 1000
"""Above the numbers of all signals."""


def train(config: TrainConfig, world: World) -> TrainResult:
    """Run stage 2 on this rank; every rank calls it.

    Raises:
        ConfigError: settings that do not suit each other, the cache or the ranks; or `out` holds another run.
        CacheError: the cache is missing, incomplete or damaged.
        CheckpointError: a resumed run has no whole checkpoint, or none that fits.
        TrainingError: the loss is no longer finite.
        SourceStarved: the cache that is followed has not delivered; a checkpoint is left.
        RankFailed: another rank has failed, or is gone.
    """
    check_world(config.sampler, world)
    started = time.perf_counter()
    if device_of(world).type == "cpu":
        keep_memory()
    with ranks(world) as line, stop_signals() as stop:

        def wish() -> int:
            return _wish(stop, started, config)

        follower = Follower(config, line.board, lambda: _name(wish())) if config.follow else None
        run = Run.open(config, world, line, follower)
        with (
            closing(run.log),
            run.loader() as loader,
            run.progress() as bar,
            run.feeding(),
        ):
            first, stopped = time.perf_counter(), None
            line.at(f"reading for step {run.done + 1}")
            for loaded in run.remaining(loader):
                line.at(f"step {run.done + 1}")
                run.step(loaded)
                bar.advance(run.log.last_tokens, run.log.summary(loader.waited))
                if (stopped := _name(run.agree(wish()))) is not None:
                    break
                if run.evaluation_due:
                    line.at(f"the walk behind step {run.done}")
                    run.evaluate()
                if run.done % config.save_every == 0:
                    line.at(f"the checkpoint of step {run.done}")
                    run.save()
                line.at(f"reading for step {run.done + 1}")
            seconds, stopped = time.perf_counter() - first, stopped or run.ended_by
            if stopped is None:
                line.at("the last walk")
                run.evaluate()
        line.at("the last checkpoint")
        checkpoint = run.save(last=True)
        return TrainResult(
            steps=run.done,
            tokens=run.consumed,
            seconds=seconds,
            loss=run.log.final_loss(),
            checkpoint=checkpoint,
            stopped=stopped,
            mix=run.log.mix(),
        )


@contextmanager
def ranks(world: World) -> Iterator[Lifeline]:
    """Join the other ranks for the length of the block; the failure of one ends all at once."""
    with process_group(world):
        board = Board(world, "train")
        with board.telling_failure(), lifeline(board) as line:
            yield line


def _name(wish: int) -> str | None:
    """What asks for a stop, for people."""
    return "--max-minutes" if wish == _TIME_IS_UP else signal.Signals(wish).name if wish else None


def _wish(stop: StopFlag, started: float, config: TrainConfig) -> int:
    """The signal that asks this rank to stop, or that its time is up; 0 to go on."""
    if stop.name is not None:
        return signal.Signals[stop.name].value
    minutes = (time.perf_counter() - started) / 60
    return _TIME_IS_UP if config.max_minutes is not None and minutes >= config.max_minutes else 0
