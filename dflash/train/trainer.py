"""Stage 2: fit a drafter to a cache. One loop, read from top to bottom in `train`.

1. Open the cache (index only), its head and its target's configuration; the target itself is never loaded.
2. Build the drafter in float32, the sampler and the optimizer; or put them back from the newest checkpoint.
3. For every step: sum the loss over this rank's micro-batches, divide by the weights of the whole step over
   all ranks, clip, update, record.
4. Save where asked, at the end, and when a signal asks the run to stop.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dflash.cache.reader import CacheReader
from dflash.dist import barrier, device_of, process_group, sum_over_ranks
from dflash.drafter import Drafter, init_weights
from dflash.errors import ConfigError, TrainingError
from dflash.head import HEAD_NAME, TargetHead
from dflash.progress import Progress
from dflash.provenance import write_run_record
from dflash.stopping import stop_signals
from dflash.train.batches import AnchorConfig, BlockShape, PackedBatch
from dflash.train.checkpoint import (
    TrainState,
    checkpoint_path,
    latest_checkpoint,
    load_state,
    restore,
    save_checkpoint,
)
from dflash.train.loader import BlockPlan, LoadedStep, StepLoader, on_device
from dflash.train.network import NetworkConfig, drafter_config
from dflash.train.objective import DraftingLoss, LossSums, ObjectiveConfig
from dflash.train.optim import OptimConfig, build_optimizer, lr_at, set_lr
from dflash.train.record import RunLog, step_figures
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, check_world
from dflash.train.window import window_level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dflash.world import World


_PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run."""

    cache: Path
    out: Path
    network: NetworkConfig = field(default_factory=NetworkConfig)
    anchors: AnchorConfig = field(default_factory=AnchorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    epochs: int | None = 6
    """Passes over the cache; None means until `max_steps`."""
    max_steps: int | None = None
    """Stop behind this many optimizer steps; the schedule ends there too."""
    seed: int = 0
    precision: str = "bfloat16"
    """Compute dtype, `bfloat16` or `float32`; weights and moments are float32 either way."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept."""
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse a run without an end, and parts that do not belong together.

        Raises:
            ConfigError: neither epochs nor steps, a number below one, an unknown precision, or a loss for
                another block size than the network's.
        """
        if self.epochs is None and self.max_steps is None:
            raise ConfigError("a run needs an end: give --epochs or --max-steps")
        for flag in ("epochs", "max_steps", "save_every", "keep"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ConfigError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
        if self.precision not in _PRECISIONS:
            raise ConfigError(f"precision {self.precision!r} is not one of {', '.join(_PRECISIONS)}")
        if self.objective.block_size != self.network.block_size:
            raise ConfigError(
                f"the loss is for blocks of {self.objective.block_size}, the network has blocks of "
                f"{self.network.block_size}; --block-size sets both"
            )

    def settings(self) -> dict[str, Any]:
        """What must not change when a run is resumed, JSON-ready."""
        parts = ("network", "anchors", "objective", "sampler", "optim")
        own = ("epochs", "max_steps", "seed", "precision")
        tree = {part: asdict(getattr(self, part)) for part in parts} | {
            key: getattr(self, key) for key in own
        }
        return json.loads(json.dumps(tree))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TrainResult:
    """What a run did."""

    steps: int
    tokens: int
    """Tokens of the samples consumed, all ranks together."""
    seconds: float
    """From the first step of this start to the last."""
    loss: float
    """Mean loss of the last tenth of the steps of this start."""
    checkpoint: Path
    stopped: str | None
    """The signal that ended the run early, if one did."""
    mix: dict[str, Any]
    """Length mix of what was consumed, against its quota."""

    def text(self) -> str:
        """One line for the terminal, and how to go on where the run was stopped."""
        line = f"{self.steps:,} steps, {self.tokens:,} tokens, loss {self.loss:.3f}: {self.checkpoint}"
        return line if self.stopped is None else f"{line}\nstopped by {self.stopped}; go on with --resume"


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
        run = _Run.open(config, world)
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
                if run.done % config.save_every == 0:
                    run.save()
        return TrainResult(
            steps=run.done,
            tokens=run.consumed,
            seconds=time.perf_counter() - started,
            loss=run.log.final_loss(),
            checkpoint=run.save(),
            stopped=stopped,
            mix=run.log.mix(),
        )


class _Run:
    """The parts of a run and its position."""

    def __init__(self, config: TrainConfig, world: World, reader: CacheReader, head: TargetHead) -> None:
        self.config, self.world, self.reader = config, world, reader
        self.device = device_of(world)
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
        head = head.to(self.device, _PRECISIONS[config.precision])
        loss = DraftingLoss(self.drafter, head, config.objective, len(identity.bucket_edges))
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
    def open(cls, config: TrainConfig, world: World) -> _Run:
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

    def agree(self, wish: bool) -> bool:
        """Whether any rank wishes to stop; all ranks get the same answer."""
        if self.world.size == 1:
            return wish
        return bool(sum_over_ranks(torch.tensor([float(wish)], device=self.device)).item() > 0)

    def save(self) -> Path:
        """Write a checkpoint on the first rank, while the others wait, unless this step has one already."""
        if self.saved != self.done:
            settings, mix = self.config.settings(), self.log.mix_state()
            state = TrainState(self.done, self.sampler_state, settings, mix)
            if self.world.is_main:
                save_checkpoint(self.config.out, self.drafter, self.optimizer, state, keep=self.config.keep)
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
