"""Stage 2: fit a drafter to a cache. One loop, read from top to bottom in `train`.

1. Open the cache (index only), its head and its target's configuration; the target itself is never loaded.
2. Build the drafter in float32, the sampler and the optimizer; or put them back from the newest checkpoint.
3. For every step: sum the loss over this rank's micro-batches, divide by the weights of the whole step over
   all ranks, clip, update, record.
4. Walk over the held-out samples where asked, and at the end.
5. Save where asked, at the end, and when a signal asks the run to stop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dflash.dist import process_group
from dflash.stopping import stop_signals
from dflash.train.config import TrainConfig, TrainResult
from dflash.train.loader import StepLoader
from dflash.train.run import Run
from dflash.train.sampler import check_world

if TYPE_CHECKING:
    from dflash.world import World


def train(config: TrainConfig, world: World) -> TrainResult:
    """Run stage 2 on this rank; every rank calls it.

    Raises:
        ConfigError: settings that do not suit each other, the cache or the ranks; or `out` holds another run.
        CacheError: the cache is missing, incomplete or damaged.
        CheckpointError: a resumed run has no whole checkpoint, or none that fits.
        TrainingError: the loss is no longer finite.
    """
    check_world(config.sampler, world)
    with process_group(world), stop_signals() as stop:
        run = Run.open(config, world)
        with (
            StepLoader(run.reader, run.sampler, run.blocks, world, run.device) as loader,
            run.progress() as bar,
        ):
            started, stopped = time.perf_counter(), None
            for loaded in run.remaining(loader):
                run.step(loaded)
                bar.advance(run.log.last_tokens, run.log.summary(loader.waited))
                if run.agree(stop.name is not None):
                    stopped = stop.name or "a signal to another rank"
                    break
                if run.evaluation_due:
                    run.evaluate()
                if run.done % config.save_every == 0:
                    run.save()
            seconds = time.perf_counter() - started
            if stopped is None:
                run.evaluate()
        return TrainResult(
            steps=run.done,
            tokens=run.consumed,
            seconds=seconds,
            loss=run.log.final_loss(),
            checkpoint=run.save(),
            stopped=stopped,
            mix=run.log.mix(),
        )
