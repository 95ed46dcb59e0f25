"""The sampler: which samples each step of training consumes, decided by quota and never by arrival.

1. A `Corpus` says how long each sample is and which bucket it is in; a `SamplerConfig` says what is wanted.
2. A stream orders the samples without end: epoch after epoch, each bucket in a seeded permutation of its own,
   the buckets interleaved by quota (`stratified`), or as they leave a live queue (`shuffle`, `fifo`).
3. Each step takes what comes next and divides it into `batches_per_step` micro-batches, whatever the number
   of ranks; `batches_for` hands every rank its part.

The order is a function of the corpus digest, the settings, the seed and the position, of nothing else. The
position is a handful of integers; continuing from it replays nothing. See docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import numpy as np

from dflash.errors import CheckpointError, ConfigError
from dflash.train.batch_streams import BatchStream, BucketedSteps, QueueBatches, QuotaBatches
from dflash.train.mix import NAMED_MIXES, bucket_weights, check_epoch_size, epoch_passes, parse_shares
from dflash.train.packing import Packing
from dflash.train.permutation import derive_key
from dflash.train.pools import Arrivals, BucketPool, Draw, IntArray
from dflash.train.position import STATE_VERSION, check_position
from dflash.train.streams import ArrivalStream, MixedSteps, QuotaStream, SampleStream, ShuffleStream
from dflash.train.window import ReadyQueue, StreamState, Supply, WindowShape
from dflash.world import World

POLICIES = ("stratified", "shuffle", "fifo")
COMPOSITIONS = ("mixed", "bucketed")


@dataclass(frozen=True, eq=False)
class Corpus:
    """What the sampler knows of a cache."""

    lengths: IntArray
    """Tokens of each sample, `[N]`, each at least 1; the row order is the order of arrival."""
    buckets: IntArray
    """Bucket of each sample, `[N]`, in `range(len(bucket_edges))`."""
    bucket_edges: tuple[int, ...]
    """Upper edge of each bucket in tokens, ascending; the names of the buckets."""
    digest: str
    """Identity of the cache; another digest is another order."""

    def __post_init__(self) -> None:
        """Check the columns against each other.

        Raises:
            ConfigError: no samples, columns of different lengths, an empty sample, or an unknown bucket.
        """
        if len(self.lengths) != len(self.buckets):
            raise ConfigError(
                f"{len(self.lengths):,} lengths but {len(self.buckets):,} buckets: one of each per sample"
            )
        if not len(self.lengths):
            raise ConfigError("there are no samples to draw; extract some, or give a smaller --holdout")
        if (least := int(self.lengths.min())) < 1:
            raise ConfigError(f"row {int(self.lengths.argmin())} has {least} tokens; a sample has at least 1")
        low, high = int(self.buckets.min()), int(self.buckets.max())
        if low < 0 or high >= len(self.bucket_edges):
            wrong = low if low < 0 else high
            raise ConfigError(
                f"a sample is in bucket {wrong}, but there are only {len(self.bucket_edges)} buckets"
            )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    @cached_property
    def rows_by_bucket(self) -> list[IntArray]:
        """Rows of each bucket in ascending order: an array `[n_b]` for each bucket."""
        kind = np.int32 if len(self) < 1 << 31 else np.int64
        return [
            np.flatnonzero(self.buckets == bucket).astype(kind) for bucket in range(len(self.bucket_edges))
        ]

    @cached_property
    def tokens_by_bucket(self) -> list[int]:
        """Tokens that each bucket holds."""
        return [int(self.lengths[rows].sum(dtype=np.int64)) for rows in self.rows_by_bucket]

    @cached_property
    def longest_row(self) -> int:
        """The row of the longest sample, the first one among equals."""
        return int(self.lengths.argmax())


@dataclass(frozen=True)
class SamplerConfig:
    """Everything that decides the order, apart from the corpus."""

    policy: str = "stratified"
    """`stratified` (by quota), `shuffle` (uniform over a window), or `fifo` (order of arrival)."""
    compose: str = "mixed"
    """`mixed`: micro-batches of all lengths; `bucketed`: each of one bucket."""
    mix: str = "natural"
    """Share of the tokens that each bucket is owed: see `dflash.train.mix`."""
    tokens_per_batch: int = 16384
    """Most tokens of a micro-batch."""
    batches_per_step: int = 8
    """Micro-batches of an optimizer step, over all ranks."""
    min_ready: int = 30
    """Micro-batches that must be ready before one is drawn."""
    max_ready: int = 90
    """Micro-batches that may be ready at once."""
    supply: float | None = None
    """For `shuffle` and `fifo`: tokens a live source delivers for each token drawn; None: window full."""
    seed: int = 0
    """Another seed is another order."""
    cost_linear: float = 1.0
    """Work of one token by itself, in any unit."""
    cost_quadratic: float = 1 / 32768
    """Work of one token for each token of its sample, in the same unit: attention costs as much as all the
    rest at about 12 times the hidden size, which is this for a hidden size of 2,560 to 2,816."""
    epoch_size: int | None = None
    """Tokens of an epoch of a mix other than `natural`; None: as many as the buckets hold."""

    def __post_init__(self) -> None:
        """Check each setting, and those that depend on each other.

        Raises:
            ConfigError: a value out of range, with the flag and what is allowed.
        """
        _check_choice("--sampler", self.policy, POLICIES)
        _check_choice("--compose", self.compose, COMPOSITIONS)
        for name in ("tokens_per_batch", "batches_per_step", "min_ready", "max_ready"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.min_ready > self.max_ready:
            raise ConfigError(
                f"--min-ready {self.min_ready} is above --max-ready {self.max_ready}, so the gate would "
                "never open; lower the first or raise the second"
            )
        if self.supply is not None and not 0.001 <= self.supply < 1e6:
            raise ConfigError(
                f"supply is {self.supply:g} tokens per token drawn; it must be at least 0.001, or left out"
            )
        if self.cost_linear <= 0 or self.cost_quadratic < 0:
            raise ConfigError(
                f"a sample cannot cost {self.cost_linear:g} * tokens + {self.cost_quadratic:g} * tokens**2; "
                "the first factor must be above 0, the second at least 0"
            )
        self._check_mix()

    def _check_mix(self) -> None:
        if self.mix not in NAMED_MIXES:
            parse_shares(self.mix)
        check_epoch_size(self.mix, self.epoch_size)
        if self.mix != "natural" and self.policy != "stratified":
            raise ConfigError(
                f"--mix {self.mix} needs --sampler stratified: {self.policy} draws whatever arrives"
            )

    @property
    def packing(self) -> Packing:
        """How a step is divided."""
        return Packing(self.batches_per_step, self.tokens_per_batch, self.cost_linear, self.cost_quadratic)

    @property
    def window(self) -> WindowShape:
        """What may wait to be drawn."""
        return WindowShape(self.tokens_per_batch, self.min_ready, self.max_ready, self.supply)


class Slot(NamedTuple):
    """A micro-batch and its place in the step."""

    place: int
    """0-based place among the step's micro-batches."""
    draws: tuple[Draw, ...]
    """Its samples; none only at the very end of a finite stream."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step consumes, over all ranks."""

    index: int
    """Number of steps before this one."""
    batches: tuple[tuple[Draw, ...], ...]
    """Its micro-batches, always `batches_per_step`; some may be empty in a finite stream's last step."""
    tokens: int
    """Tokens of all its samples."""


class SamplerState(TypedDict):
    """A position in the stream, ready for JSON."""

    version: int
    fingerprint: dict[str, Any]
    steps: int
    tokens: int
    stream: StreamState


class Sampler:
    """The steps of a training run, in order.

    Args:
        corpus: The samples.
        config: The settings.
        epochs: Passes after which the stream ends; None for never. With a mix other than `natural` a pass is
            `epoch_size` tokens, or as many as the buckets that are drawn from hold.
        state: What `state()` returned; the stream goes on behind the last step taken from it.

    Raises:
        ConfigError: settings that do not suit the corpus, or other settings or another seed than the state's.
        CacheMismatch: the state belongs to another corpus.
        CheckpointError: the state cannot be read.
    """

    def __init__(
        self,
        corpus: Corpus,
        config: SamplerConfig,
        *,
        epochs: int | None = None,
        state: SamplerState | None = None,
    ) -> None:
        _check_fit(corpus, config, epochs)
        self.corpus, self.config = corpus, config
        self._weights = bucket_weights(config.mix, corpus.bucket_edges, corpus.tokens_by_bucket)
        self._fingerprint = {"corpus": corpus.digest, "samples": len(corpus), **asdict(config)}
        if state is not None:
            check_position(state, self._fingerprint)
        self._index = 0 if state is None else state["steps"]
        self._tokens = 0 if state is None else state["tokens"]
        self._limit = None if epochs is None else epochs * self.epoch_tokens
        self._steps = self._compose(None if state is None else state["stream"])

    @property
    def lengths(self) -> IntArray:
        """Tokens of every sample, by row."""
        return self.corpus.lengths

    @property
    def tokens_by_bucket(self) -> list[int]:
        """Tokens that each bucket holds."""
        return self.corpus.tokens_by_bucket

    @property
    def epoch_tokens(self) -> int:
        """Tokens of one pass: `epoch_size`, or all that is held by the buckets that are drawn from."""
        held = zip(self._weights, self.corpus.tokens_by_bucket, strict=True)
        return self.config.epoch_size or sum(tokens for weight, tokens in held if weight)

    @property
    def passes(self) -> list[float]:
        """How often each bucket's samples are drawn in one epoch, `[buckets]`: all 1 in the natural mix."""
        return epoch_passes(self._weights, self.corpus.tokens_by_bucket, self.config.epoch_size)

    @property
    def tokens(self) -> int:
        """Tokens of the steps taken so far; over `epoch_tokens`, how far training has got."""
        return self._tokens

    @property
    def quota(self) -> tuple[float, ...]:
        """Share of the tokens that each bucket is owed, `[buckets]`, summing to 1."""
        total = sum(self._weights)
        return tuple(weight / total for weight in self._weights)

    def next_step(self) -> Step | None:
        """The next step, or None when all epochs are consumed."""
        left = None if self._limit is None else self._limit - self._tokens
        if left is not None and left <= 0:
            return None
        batches, tokens = self._steps.next_batches(left)
        step = Step(self._index, tuple(map(tuple, batches)), tokens)
        self._index += 1
        self._tokens += tokens
        return step

    def __iter__(self) -> Iterator[Step]:
        """The remaining steps; without end when `epochs` is None."""
        return iter(self.next_step, None)

    def state(self) -> SamplerState:
        """The position behind the last step taken.

        Whoever plans steps ahead saves the state that belongs to the last step *trained on*.
        """
        return {
            "version": STATE_VERSION,
            "fingerprint": dict(self._fingerprint),
            "steps": self._index,
            "tokens": self._tokens,
            "stream": self._steps.state(),
        }

    def _compose(self, state: StreamState | None) -> MixedSteps | BucketedSteps:
        try:
            if self.config.compose == "bucketed":
                return BucketedSteps(self._batch_stream(state), self.config.batches_per_step)
            pending = [] if state is None else state["pending"]
            return MixedSteps(self._sample_stream(state), self.corpus.lengths, self.config.packing, pending)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the sampler's saved position cannot be read ({error!r}); start afresh"
            ) from error

    def _sample_stream(self, state: StreamState | None) -> SampleStream:
        if self.config.policy == "stratified":
            tokens = None if state is None else state["tokens"]
            return QuotaStream(self._pools(state), self._positive_weights(), tokens)
        arrivals = self._arrivals(state)
        if self.config.policy == "fifo":
            return ArrivalStream(arrivals)
        return ShuffleStream(arrivals, self.corpus.lengths, self.config.window, self._key("shuffle"), state)

    def _batch_stream(self, state: StreamState | None) -> BatchStream:
        corpus, config = self.corpus, self.config
        if config.policy == "stratified":
            held = [
                tokens
                for tokens, weight in zip(corpus.tokens_by_bucket, self._weights, strict=True)
                if weight
            ]
            shares = None if config.mix == "natural" else self._positive_weights()
            return QuotaBatches(self._pools(state), held, shares, config.packing, state)
        key = self._key("queue") if config.policy == "shuffle" else None
        queue = ReadyQueue(config.window, len(corpus.bucket_edges), key, state)
        supply = Supply(config.supply, 0 if state is None else state["credit"])
        return QueueBatches(self._arrivals(state), corpus.lengths, corpus.buckets, queue, supply)

    def _positive_weights(self) -> list[int]:
        return [weight for weight in self._weights if weight]

    def _pools(self, state: StreamState | None) -> list[BucketPool]:
        active = [bucket for bucket, weight in enumerate(self._weights) if weight]
        positions: Sequence[int] = [0] * len(active) if state is None else state["positions"]
        corpus, seed = self.corpus, self.config.seed
        return [
            BucketPool(corpus.rows_by_bucket[bucket], corpus.lengths, (corpus.digest, seed, bucket), position)
            for bucket, position in zip(active, positions, strict=True)
        ]

    def _arrivals(self, state: StreamState | None) -> Arrivals:
        return Arrivals(self.corpus.lengths, 0 if state is None else state["position"])

    def _key(self, purpose: str) -> bytes:
        return derive_key(purpose, self.corpus.digest, self.config.seed)


def check_world(config: SamplerConfig, world: World) -> None:
    """Check that a step divides evenly among the ranks.

    Raises:
        ConfigError: more ranks than micro-batches, or a remainder, with the nearest numbers that work.
    """
    slots, ranks = config.batches_per_step, world.size
    if slots % ranks:
        nearest = " or ".join(str(n * ranks) for n in (slots // ranks, slots // ranks + 1) if n)
        raise ConfigError(
            f"--batches-per-step {slots} does not divide among {ranks} ranks; use {nearest}, so that every "
            "rank runs the same number of micro-batches"
        )


def batches_for(step: Step, world: World) -> list[Slot]:
    """The micro-batches of a step that one rank runs: the same number for each rank, each slot exactly once.

    The slots move on by one rank with every step, since some of them tend to get the longest sample.

    Raises:
        ConfigError: the step does not divide evenly (`check_world` finds that before the first step).
    """
    slots, ranks = len(step.batches), world.size
    if slots % ranks:
        raise ConfigError(f"a step of {slots} micro-batches does not divide among {ranks} ranks")
    first = (world.rank - step.index) % ranks
    return [Slot(index, step.batches[index]) for index in range(first, slots, ranks)]


def _check_choice(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} {value} is not one of {', '.join(allowed)}")


def _check_fit(corpus: Corpus, config: SamplerConfig, epochs: int | None) -> None:
    if epochs is not None and epochs < 1:
        raise ConfigError(f"--epochs is {epochs}; it must be at least 1")
    row = corpus.longest_row
    longest = int(corpus.lengths[row])
    if longest > config.tokens_per_batch:
        too_long = int((corpus.lengths > config.tokens_per_batch).sum())
        raise ConfigError(
            f"row {row} has {longest:,} tokens, more than the {config.tokens_per_batch:,} of a micro-batch "
            f"({too_long:,} of {len(corpus):,} samples are longer); use --tokens-per-batch {longest} or more"
        )
