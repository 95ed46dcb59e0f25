"""One run of stage 2 on one rank: its parts, its position, and what one optimizer step does."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dflash.cache.reader import CacheReader
from dflash.cache.subset import subset
from dflash.dist import barrier, device_of, sum_over_ranks
from dflash.drafter import Drafter, init_weights
from dflash.errors import ConfigError, TrainingError
from dflash.head import HEAD_NAME, TargetHead
from dflash.progress import Progress
from dflash.provenance import write_run_record
from dflash.train.batches import BlockShape, PackedBatch
from dflash.train.checkpoint import (
    TrainState,
    checkpoint_path,
    latest_checkpoint,
    load_state,
    mark_best,
    restore,
    save_checkpoint,
)
from dflash.train.config import PRECISIONS, TrainConfig
from dflash.train.evaluation import Best, Evaluator
from dflash.train.holdout import split
from dflash.train.loader import BlockPlan, LoadedStep, StepLoader, on_device
from dflash.train.network import drafter_config
from dflash.train.objective import DraftingLoss, LossSums
from dflash.train.optim import build_optimizer, lr_at, set_lr
from dflash.train.record import RunLog, step_figures
from dflash.train.sampler import Corpus, Sampler
from dflash.train.window import window_level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dflash.world import World


class Run:
    """The parts of a run and its position."""

    def __init__(self, config: TrainConfig, world: World, reader: CacheReader, head: TargetHead) -> None:
        self.config, self.world = config, world
        self.device = device_of(world)
        rows, held_out = split(reader.index.ids, config.holdout)
        self.reader = reader if config.holdout.share == 0 else subset(reader, rows)
        reader, held_out_reader = self.reader, subset(reader, held_out)
        identity = reader.manifest.identity
        network = drafter_config(config.network, reader.cache, reader.manifest)
        shape = BlockShape(network.block_size, network.mask_token_id)
        self.blocks = BlockPlan(config.anchors, shape, config.objective.sampled_softmax)
        network = replace(
            network,
            input_embedding_scale=head.facts.embed_scale,
            final_logit_softcapping=head.facts.logit_softcap,
        )
        self.drafter = Drafter(network)
        init_weights(self.drafter, config.seed)
        self.drafter.to(self.device)
        head = head.to(self.device, PRECISIONS[config.precision])
        loss = DraftingLoss(self.drafter, head, config.objective, len(identity.bucket_edges))
        self.evaluator = Evaluator(held_out_reader, head, world, self.device)
        self.best = Best()
        self.module: nn.Module = loss
        if world.size > 1:
            self.module = DistributedDataParallel(loss, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(self.drafter, config.optim)
        self.corpus = Corpus(
            reader.index.lengths, reader.index.buckets, identity.bucket_edges, reader.index.digest()
        )
        self.sampler = Sampler(self.corpus, config.sampler, epochs=config.epochs)
        self.sampler_state: Any = self.sampler.state()
        self.done = self.consumed = 0  # steps, tokens
        self.saved: int | None = None  # step of the newest checkpoint
        self.mix_before: Any = None  # what earlier starts consumed
        self.log = RunLog(config.out, identity.bucket_edges, self.sampler.quota, enabled=world.is_main)

    @classmethod
    def open(cls, config: TrainConfig, world: World) -> Run:
        """Open the cache, build everything, and resume where asked.

        Raises:
            ConfigError: `out` holds a run and `resume` is false, or the resumed run had other settings.
        """
        reader = CacheReader(config.cache)
        newest = latest_checkpoint(config.out)
        if newest is not None and not config.resume:
            raise ConfigError(
                f"--out {config.out} holds a run already; go on with --resume, or give another folder"
            )
        run = cls(config, world, reader, TargetHead.load(config.cache / HEAD_NAME))
        if newest is not None:
            run._restore(newest)
        barrier()  # nobody writes before all have looked
        if world.is_main:
            config.out.mkdir(parents=True, exist_ok=True)
            record = config.settings() | {"cache": str(config.cache), "world_size": world.size}
            record |= {"cache_digest": reader.manifest.digest(), "drafter": asdict(run.drafter.config)}
            record |= {"bucket_edges": reader.manifest.identity.bucket_edges}
            write_run_record(config.out, "train", record)
            if newest is not None:
                mark_best(config.out, run.best.step if config.keep_best else None)
        run.log.start(run.done, run.mix_before)
        return run

    def _restore(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        _check_same(state.settings, self.config.settings())
        self.sampler = Sampler(
            self.corpus,
            self.config.sampler,
            epochs=self.config.epochs,
            state=state.sampler,  # type: ignore[arg-type]
        )
        restore(checkpoint, self.drafter, self.optimizer)
        self.done = self.saved = state.step
        self.sampler_state, self.mix_before = state.sampler, state.mix
        self.best = Best(**(state.best or {}))
        self.consumed = self.sampler.tokens

    @property
    def finished(self) -> bool:
        """Whether the last step that was asked for is done."""
        return self.config.max_steps is not None and self.done >= self.config.max_steps

    def remaining(self, loader: StepLoader) -> Iterator[LoadedStep]:
        """The steps that are left, none for a run that was over before it was resumed."""
        for loaded in () if self.finished else loader:
            yield loaded
            if self.finished:
                return

    def progress(self) -> Progress:
        """A bar over the tokens of the run; without epochs over its estimated tokens."""
        if self.config.epochs is not None and self.config.max_steps is None:
            total = self.config.epochs * self.sampler.epoch_tokens
        else:
            per_step = self.config.sampler.tokens_per_batch * self.config.sampler.batches_per_step
            total = (self.config.max_steps or 0) * per_step
            if self.config.epochs is not None:
                total = min(total, self.config.epochs * self.sampler.epoch_tokens)
        return Progress("train", total, done=self.consumed, enabled=self.world.is_main)

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
        totals = self._backward(loaded.batches)
        weight = float(totals[1])
        grad_norm = self._update(weight, lr)
        self.done += 1
        self.consumed += tokens
        self.sampler_state = loaded.state
        figures = step_figures(totals, self.config.network.block_size, len(self.corpus.bucket_edges))
        if not torch.isfinite(torch.tensor([figures["loss"], grad_norm])).all():
            ids = ", ".join(str(i) for batch in loaded.batches for i in batch.samples[:2])
            raise TrainingError(
                f"step {self.done}: loss {figures['loss']}, gradient norm {grad_norm} (samples {ids}, ...); "
                "lower --lr, or resume from the last checkpoint"
            )
        figures |= {"step": self.done, "lr": lr, "grad_norm": grad_norm, "epoch": self._epoch()}
        figures |= {"waited": loaded.waited, "ready_steps": loaded.ready, "window": self._window(loaded)}
        self.log.add(figures, loaded.draws, time.perf_counter() - started)

    def _window(self, loaded: LoadedStep) -> float | None:
        stream = loaded.state["stream"]
        return window_level(stream, self.corpus.lengths, self.config.sampler.tokens_per_batch)

    def _epoch(self) -> float:
        return self.consumed / self.sampler.epoch_tokens

    def _backward(self, batches: list[PackedBatch]) -> Tensor:
        """Sum loss gradients over this rank's micro-batches; gives the sums of `LossSums` over all ranks."""
        totals: Tensor | None = None
        last = len(batches) - 1
        for number, batch in enumerate(on_device(batches, self.device)):
            # Ranks exchange gradients once a step, beside the last backward pass.
            with self._without_exchange() if number < last else nullcontext():
                sums: LossSums = self.module(batch)
                sums.loss.backward()  # type: ignore[no-untyped-call]
            metrics = sums.metrics()
            totals = metrics if totals is None else totals + metrics
        assert totals is not None  # every rank has at least one micro-batch: check_world
        return sum_over_ranks(totals).cpu()

    def _without_exchange(self) -> AbstractContextManager[None]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def _update(self, weight: float, lr: float) -> float:
        """Turn summed gradients into those of sum(w CE) / sum(w) over the step, clip, and apply them."""
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        # DDP has averaged over ranks; the loss is a sum over them.
        scale = self.world.size / weight if weight > 0 else 0.0
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        norm = nn.utils.clip_grad_norm_(parameters, self.config.optim.clip)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    @property
    def evaluation_due(self) -> bool:
        """Whether a step at which the held-out samples are walked has been passed since they last were."""
        every = self.config.eval_every or self.config.save_every
        return self.best.evaluated < self.done // every * every

    def evaluate(self) -> None:
        """Walk over the held-out samples, unless there are none or this step did so already."""
        if not len(self.evaluator) or self.best.evaluated == self.done:
            return
        figures = self.evaluator.walk(self.drafter)
        improved = self.best.see(self.done, figures["walk_tau"])
        self.log.add_evaluation({"kind": "evaluation", "step": self.done, "epoch": self._epoch()} | figures)
        if improved and self.config.keep_best:
            self.save()

    def agree(self, wish: bool) -> bool:
        """Whether any rank wishes to stop; all ranks get the same answer."""
        if self.world.size == 1:
            return wish
        return bool(sum_over_ranks(torch.tensor([float(wish)], device=self.device)).item() > 0)

    def save(self) -> Path:
        """Write a checkpoint on the first rank, while the others wait, unless this step has one already."""
        if self.saved != self.done:
            settings, mix = self.config.settings(), self.log.mix_state()
            best = self.best.state()
            state = TrainState(self.done, self.sampler_state, settings, mix, best)
            spared = best["step"] if self.config.keep_best else None
            if self.world.is_main:
                save_checkpoint(
                    self.config.out, self.drafter, self.optimizer, state, keep=self.config.keep, spared=spared
                )
                mark_best(self.config.out, spared)
            barrier()
            self.saved = self.done
        return checkpoint_path(self.config.out, self.done)


def _check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    flat_saved, flat_now = _flat(saved), _flat(now)
    changed = [
        key for key in sorted(flat_saved.keys() | flat_now.keys()) if flat_saved.get(key) != flat_now.get(key)
    ]
    if changed:
        both = "; ".join(f"{key}: was {flat_saved.get(key)!r}, now {flat_now.get(key)!r}" for key in changed)
        raise ConfigError(f"--resume with other settings: {both}; use the first values or another --out")


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{part}.{key}" if isinstance(values, dict) else part: value
        for part, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [(part, values)])
    }
