"""One run of stage 2 on one rank: its parts, its position, and what one optimizer step does."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dflash.board import Board
from dflash.cache.parts import check_part
from dflash.cache.reader import CacheReader
from dflash.cache.subset import subset
from dflash.dist import barrier, device_of, max_over_ranks, sum_over_ranks
from dflash.errors import CheckpointError, ConfigError, SourceStarved
from dflash.head import HEAD_NAME, TargetHead
from dflash.lifeline import Lifeline
from dflash.progress import warn
from dflash.provenance import write_run_record
from dflash.train.batches import BlockShape
from dflash.train.checkpoint import (
    Snapshot,
    TrainState,
    checkpoint_path,
    latest_checkpoint,
    load_state,
    mark_best,
    restore,
    save_checkpoint,
    snapshot,
)
from dflash.train.compiled import shape_layers
from dflash.train.config import TrainConfig, check_same
from dflash.train.dashboard import Dashboard
from dflash.train.evaluation import Best, Evaluator
from dflash.train.faults import BadSteps, CorruptSample, record_corrupt
from dflash.train.following import FollowSampler
from dflash.train.holdout import split
from dflash.train.initial import initial_drafter
from dflash.train.loader import BlockPlan, DeviceFeed, LoadedStep, StepLoader
from dflash.train.loggers import open_loggers
from dflash.train.network import drafter_config
from dflash.train.objective import DraftingLoss, LossSums
from dflash.train.optim import build_optimizer, clipped_mean, lr_at, set_lr
from dflash.train.parallel import exchanging, gathered, over_ranks
from dflash.train.ready import ready_limits
from dflash.train.record import RunLog, step_figures
from dflash.train.sampler import Corpus, Sampler
from dflash.train.teacher import drafter_taps
from dflash.train.window import window_level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dflash.train.follower import Follower
    from dflash.world import World


class Run:
    """The parts of a run and its position."""

    def __init__(
        self,
        config: TrainConfig,
        line: Lifeline,
        reader: CacheReader,
        head: TargetHead,
        follower: Follower | None = None,
    ) -> None:
        world = line.board.world
        self.config, self.world, self.follower = config, world, follower
        self.device = device_of(world)
        rows, held_out = split(reader.index.ids, config.holdout)
        complete = config.holdout.share == 0 or follower is not None  # which leaves them out by itself
        self.reader = reader if complete else subset(reader, rows)
        reader, held_out_reader = self.reader, subset(reader, held_out)
        identity = reader.manifest.identity
        self.limits = ready_limits(config.sampler, world, identity.bytes_per_token, config.window_bytes)
        if follower is not None:  # which has a gate of its own
            self.limits = replace(self.limits, gate=1)
        taps = drafter_taps(identity, config.objective.loss)
        network = drafter_config(config.network, reader.cache, reader.manifest, taps)
        shape = BlockShape(network.block_size, network.mask_token_id)
        sampled, kd = config.objective.sampled_softmax, config.objective.loss == "kd"
        self.blocks = BlockPlan(config.anchors, shape, sampled, config.skip_corrupt, kd)
        self.drafter = initial_drafter(network, head.facts, config.seed, config.init_from).to(self.device)
        shape_layers(self.drafter, config)
        self.head = head = head.to(self.device, config.compute_dtype(self.device))
        loss = DraftingLoss(self.drafter, head, config.objective, len(identity.bucket_edges))
        self.evaluator = self._evaluator(held_out_reader)
        self.best = Best()
        self.module = over_ranks(loss, world, config.parallel)
        self.optimizer = build_optimizer(self.drafter, config.optim)
        self.edges = identity.bucket_edges
        self.sampler = self._sampler()
        self.sampler_state: Any = self.sampler.state()
        self.done = self.consumed = 0  # steps, tokens
        self.saved: int | None = None  # step of the newest checkpoint
        self.mix_before: Any = None  # what earlier starts consumed
        self.line, self.bad, self.feed = line, BadSteps(config.max_bad_steps), DeviceFeed(self.device)
        self.log = RunLog(config.out, identity.bucket_edges, self.sampler.quota, enabled=world.is_main)

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        world: World,
        line: Lifeline | None = None,
        follower: Follower | None = None,
    ) -> Run:
        """Open the cache, build everything, and resume where asked.

        Args:
            config: What decides the run.
            world: This process.
            line: What tells it of the others; without one it does not learn that they have failed.
            follower: What follows the cache, if it may be incomplete.

        Raises:
            ConfigError: `out` holds a run and `resume` is false, or the resumed run had other settings.
        """
        reader = CacheReader(config.cache) if follower is None else follower.reader
        line = line or Lifeline(Board(world, "run"))
        # one rank looks, so that all see the same, and each file is read once
        found = line.board.shared("newest", lambda: _name_of(latest_checkpoint(config.out)))
        newest = found and config.out / found
        if newest is not None and not config.resume:
            raise ConfigError(
                f"--out {config.out} holds a run already; go on with --resume, or give another folder"
            )
        head = TargetHead.load(check_part(config.cache, reader.manifest, HEAD_NAME))
        run = cls(config, line, reader, head, follower)
        if newest is not None:
            run._restore(newest)
        barrier()  # nobody writes before all have looked
        if world.is_main:
            config.out.mkdir(parents=True, exist_ok=True)
            if follower is not None:
                follower.begin()
            record = config.settings() | {"cache": str(config.cache), "world_size": world.size}
            record |= {"cache_digest": reader.manifest.digest(), "drafter": asdict(run.drafter.config)}
            record |= {"bucket_edges": reader.manifest.identity.bucket_edges}
            record |= {"epoch": {"tokens": run.sampler.epoch_tokens, "passes_by_bucket": run.sampler.passes}}
            write_run_record(config.out, "train", record)
            run.log.attach(open_loggers(config.log, config.out, record, run.done))
            if newest is not None:
                mark_best(config.out, run.best.step if config.keep_best else None)
        run.log.start(run.done, run.mix_before)
        return run

    def _restore(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        check_same(state.settings, self.config.settings())
        self.sampler = self._sampler(state.sampler)
        restore(checkpoint, self.drafter, self.optimizer)
        self.done = self.saved = state.step
        self.sampler_state, self.mix_before = state.sampler, state.mix
        self.best = Best(**(state.best or {}))
        self.consumed = self.sampler.tokens

    def _evaluator(self, held_out: CacheReader) -> Evaluator:
        skip = self.config.skip_corrupt
        return Evaluator(held_out, self.head, self.world, self.device, skip_corrupt=skip)

    def _sampler(self, state: Any = None) -> Sampler | FollowSampler:
        """The steps of the run, from the beginning or from a saved position."""
        if self.follower is not None:
            return self.follower.sampler(state)
        return Sampler(self.corpus, self.config.sampler, epochs=self.config.epochs, state=state)

    @cached_property
    def corpus(self) -> Corpus:
        """What the sampler knows of a complete cache."""
        index = self.reader.index
        return Corpus(index.lengths, index.buckets, self.edges, index.digest())

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Around the loop: a cache that no longer delivers leaves a checkpoint; behind it nobody waits."""
        try:
            yield
        except SourceStarved:
            if self.done:
                self.save(last=True)
            raise
        finally:
            if self.follower is not None:
                self.follower.close()

    @property
    def ended_by(self) -> str | None:
        """What ended a wait for the cache, and the run with it, if anything did."""
        return self.sampler.ended_by if isinstance(self.sampler, FollowSampler) else None

    @property
    def finished(self) -> bool:
        """Whether the last step that was asked for is done."""
        return self.config.max_steps is not None and self.done >= self.config.max_steps

    def loader(self) -> StepLoader:
        """Makes the steps ready ahead of their use."""
        return StepLoader(self.reader, self.sampler, self.blocks, self.world, self.device, self.limits)

    def remaining(self, loader: StepLoader) -> Iterator[LoadedStep]:
        """The steps that are left, none for a run that was over before it was resumed."""
        for loaded in () if self.finished else loader:
            yield loaded
            if self.finished:
                return

    def progress(self) -> Dashboard:
        """A bar over the tokens of the run; without epochs over its estimated tokens."""
        per_step = self.config.sampler.tokens_per_batch * self.config.sampler.batches_per_step
        ends = ((self.config.epochs, self.sampler.epoch_tokens), (self.config.max_steps, per_step))
        total = min(count * tokens for count, tokens in ends if count is not None)
        return Dashboard(self.log, total, done=self.consumed, enabled=self.world.is_main)

    def through(self, tokens: int) -> float:
        """How far the run is in the middle of a step of so many tokens, in (0, 1).

        By steps or by tokens, whichever end comes first. The middle, so that the first step already learns.
        """
        steps, epochs = self.config.max_steps, self.config.epochs
        by_steps = (self.done + 0.5) / steps if steps else 0.0
        by_tokens = (self.consumed + tokens / 2) / (epochs * self.sampler.epoch_tokens) if epochs else 0.0
        return max(by_steps, by_tokens)

    def step(self, loaded: LoadedStep) -> None:
        """One optimizer step."""
        started = time.perf_counter()
        tokens = int(loaded.draws.sum())
        lr = lr_at(self.through(tokens), self.config.optim)
        sums, losses = self._backward(loaded)
        totals, grad_norm = self._update(sums, lr)
        self.done += 1
        self.consumed += tokens
        self.sampler_state = loaded.state
        figures = {"step": self.done, "epoch": self._epoch()} | self._without(loaded)
        if grad_norm is None:
            self._skipped(loaded, losses, figures)
            return
        self.bad.good()
        figures |= step_figures(totals, self.config.network.block_size, len(self.edges))
        figures |= {"lr": lr, "grad_norm": grad_norm}
        figures |= {"waited": loaded.waited, "ready_steps": loaded.ready, "window": self._window(loaded)}
        held = self.sampler.tokens_by_bucket
        if (follow := loaded.state.get("follow")) is not None:
            figures["follow"] = follow
        self.log.add(figures, loaded.draws, time.perf_counter() - started, held)

    def _without(self, loaded: LoadedStep) -> dict[str, Any]:
        """Record the damaged samples that the step lacks on any rank; their ids, for the log."""
        found = self.config.skip_corrupt and max_over_ranks(len(loaded.corrupt), self.device)
        if not found:
            return {}
        everywhere = self.line.board.exchange(f"corrupt{self.done}", list(loaded.corrupt))
        corrupt = [CorruptSample(*sample) for rank in everywhere for sample in rank]
        if self.world.is_main:
            record_corrupt(self.config.out, self.done, corrupt)
        return {"corrupt_samples": [sample.id for sample in corrupt]}

    def _skipped(self, loaded: LoadedStep, losses: list[Tensor], figures: dict[str, Any]) -> None:
        """Record a step that changed nothing, and end the run with the last one that is allowed."""
        suspects = [
            sample
            for batch, loss in zip(loaded.batches, losses, strict=True)
            if not loss.isfinite()
            for sample in batch.samples
        ]
        everyone = [sample for batch in loaded.batches for sample in batch.samples]
        gathered = self.line.board.exchange(f"skipped{self.done}", [suspects, everyone])
        samples = [i for first, _ in gathered for i in first] or [i for _, rank in gathered for i in rank]
        self.log.skip(figures | {"samples": samples}, loaded.draws)
        saved = None if self.saved is None else checkpoint_path(self.config.out, self.saved)
        self.bad.bad(self.done, samples, saved)

    def _window(self, loaded: LoadedStep) -> float:
        """Micro-batches in the simulated queue; without one, those that were ready to draw."""
        stream, slots = loaded.state["stream"], self.config.sampler.batches_per_step
        level = window_level(stream, self.sampler.lengths, self.config.sampler.tokens_per_batch)
        return float(loaded.ready * slots) if level is None else level

    def _epoch(self) -> float:
        return self.consumed / self.sampler.epoch_tokens

    def _backward(self, loaded: LoadedStep) -> tuple[Tensor, list[Tensor]]:
        """Sum loss gradients over this rank's micro-batches.

        Returns:
            The sums of `LossSums` over all ranks, and the loss of each of this rank's micro-batches; both are
            on the device, and not yet read.
        """
        parts, losses, last = [], [], len(loaded.batches) - 1
        for number, batch in enumerate(self.feed.batches(loaded)):
            # Ranks exchange gradients once a step, beside the last backward pass.
            with exchanging(self.module, number == last):
                sums: LossSums = self.module(batch)
                sums.loss.backward()  # type: ignore[no-untyped-call]
            parts.append(sums.metrics())
            losses.append(sums.loss.detach())
        # every rank has at least one micro-batch: check_world
        return sum_over_ranks(torch.stack(parts).sum(dim=0)), losses

    def _update(self, sums: Tensor, lr: float) -> tuple[Tensor, float | None]:
        """Turn summed gradients into those of sum(w CE) / sum(w) over the step, clip, and apply them.

        Loss and norm are those of all ranks together, so that all skip a step or none. They are read at once,
        since the host waits for the device to read them.

        Returns:
            The sums, on the host, and the norm of the gradient: None when it or the loss is not finite, and
            nothing was changed.
        """
        clipped = clipped_mean(self.drafter, sums[1], self.world.size, self.config.optim.clip)
        read = torch.cat([sums, clipped.double().reshape(1)]).cpu()
        totals, norm = read[:-1], float(read[-1])
        finite = math.isfinite(norm) and math.isfinite(float(totals[0]))
        if finite:
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return totals, norm if finite else None

    @property
    def evaluation_due(self) -> bool:
        """Whether a step at which the held-out samples are walked has been passed since they last were."""
        every = self.config.eval_every or self.config.save_every
        return self.best.evaluated < self.done // every * every

    def evaluate(self) -> None:
        """Walk over the held-out samples, unless there are none or this step did so already.

        Those of a cache that is followed are the same as in any other run: known once it is complete.
        """
        if self.follower is not None and not len(self.evaluator) and "follow" not in self.sampler_state:
            self.evaluator = self._evaluator(self.follower.held_out())
        if not len(self.evaluator) or self.best.evaluated == self.done:
            return
        with gathered(self.module):
            figures = self.evaluator.walk(self.drafter)
        before = self.best.walk_tau, self.best.step
        improved = self.best.see(self.done, figures["walk_tau"])
        self.log.add_evaluation({"kind": "evaluation", "step": self.done, "epoch": self._epoch()} | figures)
        if improved and self.config.keep_best:
            self.save()
            if self.saved != self.done:  # the disk is full: the best that there is stays the best
                self.best.walk_tau, self.best.step = before

    def agree(self, wish: int) -> int:
        """The largest of all ranks' wishes: a signal's number, or 0 to go on; all get the same answer."""
        return int(max_over_ranks(wish, self.device))

    def save(self, *, last: bool = False) -> Path:
        """Write a checkpoint on the first rank, while the others wait, unless this step has one already.

        A disk that is full does not end the run: the next time tries again.

        Args:
            last: There is no next time.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        if self.saved != self.done:
            settings, mix, best = self.config.settings(), self.log.mix_state(), self.best.state()
            state = TrainState(self.done, self.sampler_state, settings, mix, best)
            taken = snapshot(self.drafter, self.optimizer, wanted=self.world.is_main)
            failure = self._write(taken, state) if self.world.is_main else None
            failure = self.line.board.shared(f"saved{self.done}", lambda: failure)
            if failure is None:
                self.saved = self.done
            elif last:
                raise CheckpointError(self._unsaved(failure))
        return checkpoint_path(self.config.out, self.done)

    def _write(self, taken: Snapshot, state: TrainState) -> str | None:
        try:
            with self.line.writing:
                spared = self.best.step if self.config.keep_best else None
                save_checkpoint(self.config.out, taken, state, keep=self.config.keep, spared=spared)
                mark_best(self.config.out, spared)
        except (OSError, SafetensorError) as error:
            warn(f"{self._unsaved(str(error))}; the next save tries again")
            return str(error)
        return None

    def _unsaved(self, reason: str) -> str:
        good = "none" if self.saved is None else checkpoint_path(self.config.out, self.saved)
        return f"the checkpoint of step {self.done} could not be written ({reason}); the newest one is {good}"


def _name_of(checkpoint: Path | None) -> str | None:
    return None if checkpoint is None else f"{checkpoint.parent.name}/{checkpoint.name}"
