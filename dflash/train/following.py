"""The sampler of a run that follows a cache while it is being written.

1. Before each step the first rank decides what the step may draw from: everything that is committed by then.
   A step is attempted; what it lacks is waited for, and the attempt made again.
2. The decision is recorded, then told to the other ranks, which make the same attempt with the same outcome:
   a step is a function of the position behind the last one and of the decisions so far, of nothing else.
3. With the decision that the cache is complete, deciding ends. The rest of the epoch is drawn from all there
   is, and later epochs are those of any other run.

Who decides, and how it is told, is a `Decider`'s business; this part knows no disk and no process group.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dflash.errors import CheckpointError, ConfigError
from dflash.train.arrived import Arrived, Chunk, Source
from dflash.train.batch_streams import BucketedSteps
from dflash.train.followed import FollowedBatches, FollowedSamples
from dflash.train.mix import bucket_weights, epoch_passes
from dflash.train.position import STATE_VERSION, check_position
from dflash.train.sampler import SamplerConfig, SamplerState, Step
from dflash.train.streams import MixedSteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from dflash.cache.planned import Planned
    from dflash.train.follow_log import Decision
    from dflash.train.pools import Draw, IntArray
    from dflash.train.window import StreamState

ON_STARVED = ("error", "reweight")


@dataclass(frozen=True)
class FollowConfig:
    """How long a bucket that is due but empty is waited for, and what then."""

    max_wait: float | None = None
    """Seconds; None waits for ever."""
    on_starved: str = "error"
    """`error` ends the run behind a checkpoint; `reweight` goes on without the bucket for as long as it is
    empty."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of range.
        """
        if self.max_wait is not None and self.max_wait <= 0:
            raise ConfigError(f"--max-wait is {self.max_wait:g} seconds; it must be above 0")
        if self.on_starved not in ON_STARVED:
            raise ConfigError(f"--on-starved {self.on_starved} is not one of {', '.join(ON_STARVED)}")
        if self.on_starved == "reweight" and self.max_wait is None:
            raise ConfigError("--on-starved reweight needs --max-wait: when to go on without an empty bucket")


class FollowState(SamplerState, total=False):
    """A position; while the cache is incomplete, also how far it has got, for the record."""

    follow: dict[str, Any]


class Attempts(Protocol):
    """What a decider needs of the sampler."""

    index: int
    """Step that is to be decided on, from 0."""

    def arrive(self, parts: Sequence[Sequence[str]], digest: str | None) -> None:
        """Take parts of the cache in, and the finished cache's digest."""

    def attempt(self, aside: Sequence[int], *, gated: bool) -> list[list[int]]:
        """Plan the step without some buckets; gives the chunks that it began."""

    def refilled(self, aside: Sequence[int]) -> list[int]:
        """Which of these buckets have something to draw again."""

    def committed(self) -> float:
        """Share of the planned tokens that has arrived."""


class Decider(Protocol):
    """Decides what steps may draw from, the same on every rank."""

    def history(self, steps: int) -> list[Decision]:
        """The decisions for the first `steps` steps."""

    def rows(self, parts: Sequence[Sequence[str]]) -> tuple[np.ndarray, IntArray, IntArray]:
        """Make parts of the cache readable; gives ids, buckets and lengths of their samples, `[n]` each."""

    def decide(self, attempts: Attempts) -> Decision:
        """The decision for a step; all of it is taken in, and the step is planned."""


class FollowSampler:
    """The steps of a run that follows a cache, in order; see `Sampler`, whose place it takes.

    Args:
        decider: Decides what is visible to each step.
        source: What is followed.
        config: The settings.
        epochs: Passes after which the stream ends; None for never.
        state: What `state()` returned; the stream goes on behind the last step taken from it.

    Raises:
        ConfigError: settings that do not suit a cache that is being written, or other ones than the state's.
        CheckpointError: the state or the record of what was drawn cannot be read.
    """

    def __init__(
        self,
        decider: Decider,
        source: Source,
        config: SamplerConfig,
        *,
        epochs: int | None = None,
        state: SamplerState | None = None,
    ) -> None:
        planned = source.planned
        _check_fit(planned, config)
        self.config, self._decider, self._epochs = config, decider, epochs
        self._mix = partial(bucket_weights, config.mix, planned.edges)
        self._mix(planned.tokens)  # refuses a mix that does not fit
        natural = config.mix == "natural"
        self._arrived = Arrived(source, config.seed, repeats=not natural)
        self._fingerprint: dict[str, Any] = {
            "corpus": source.identity,
            "samples": sum(planned.samples),
            **asdict(config),
        }
        if state is not None:
            check_position(state, self._fingerprint)
        self.index = 0 if state is None else state["steps"]
        self._tokens = 0 if state is None else state["tokens"]
        self._aside: list[int] = []
        self._replay()
        self._before: StreamState = {} if state is None else state["stream"]
        self._marks = self._arrived.marks()
        self._planned: tuple[list[list[Draw]], int] | None = None
        self.ended_by: str | None = None
        """The signal that ended the stream while it waited, if one did."""
        self._restore()
        self._before = self._steps.state()

    @property
    def lengths(self) -> IntArray:
        """Tokens of every sample that has arrived, by row."""
        return self._arrived.lengths

    @property
    def epoch_tokens(self) -> int:
        """Tokens of one pass: as planned, until the cache is complete."""
        targets = self._arrived.targets
        return sum(target for target, weight in zip(targets, self._mix(targets), strict=True) if weight)

    @property
    def tokens(self) -> int:
        """Tokens of the steps taken so far; over `epoch_tokens`, how far training has got."""
        return self._tokens

    @property
    def quota(self) -> tuple[float, ...]:
        """Share of the tokens that each bucket is owed, `[buckets]`, summing to 1."""
        weights = self._mix(self._arrived.targets)
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def tokens_by_bucket(self) -> list[int]:
        """Tokens that each bucket will hold, as planned, until the cache is complete."""
        return list(self._arrived.targets)

    @property
    def passes(self) -> list[float]:
        """How often each bucket's samples are drawn in one epoch, as planned, `[buckets]`."""
        targets = self._arrived.targets
        return epoch_passes(self._mix(targets), targets, None)

    def next_step(self) -> Step | None:
        """The next step, waiting for what it needs; None when all epochs are consumed or a signal came.

        Raises:
            SourceStarved: what it needs was waited for too long.
        """
        if self._arrived.digest is not None:
            self._planned = self._plan()
        else:
            decision = self._decider.decide(self)
            self._aside, self.ended_by = decision.aside, decision.end
        if self._planned is None or self.ended_by is not None:
            return None
        batches, tokens = self._planned
        step = Step(self.index, tuple(map(tuple, batches)), tokens)
        self.index += 1
        self._tokens += tokens
        self._before, self._marks = self._steps.state(), self._arrived.marks()
        return step

    def __iter__(self) -> Iterator[Step]:
        """The remaining steps; without end when `epochs` is None."""
        while (step := self.next_step()) is not None:
            yield step

    def state(self) -> FollowState:
        """The position behind the last step taken, and how far the cache has got."""
        state: FollowState = {
            "version": STATE_VERSION,
            "fingerprint": dict(self._fingerprint),
            "steps": self.index,
            "tokens": self._tokens,
            "stream": self._before,
        }
        if self._arrived.digest is None:
            edges = self._arrived.planned.edges
            state["follow"] = {
                "committed": self.committed(),
                "ready": self._stream.ready_tokens / self.config.tokens_per_batch,
                "aside": [edges[bucket] for bucket in self._aside],
            }
        return state

    def arrive(self, parts: Sequence[Sequence[str]], digest: str | None) -> None:
        """Take parts of the cache in, and the finished cache's digest."""
        if any(parts):
            self._arrived.extend(*self._decider.rows(parts))
        if digest is not None:
            self._arrived.digest = digest

    def attempt(self, aside: Sequence[int], *, gated: bool) -> list[list[int]]:
        """Plan the step without some buckets; gives the chunks that it began.

        Raises:
            Starved: more must arrive first. Nothing has changed then.
        """
        self._arrived.go_back(self._marks)
        self._restore()
        self._stream.adjust(aside)
        if gated:
            self._stream.check_gate(self.config.min_ready * self.config.tokens_per_batch)
        self._planned = self._plan()
        return self._arrived.begun_since(self._marks)

    def refilled(self, aside: Sequence[int]) -> list[int]:
        """Which of these buckets have something to draw again."""
        drawn = self._before["positions"]
        return [bucket for bucket in aside if len(self._arrived.rows[bucket]) > drawn[bucket]]

    def committed(self) -> float:
        """Share of the planned tokens that has arrived."""
        return min(sum(self._arrived.tokens) / max(sum(self._arrived.targets), 1), 1.0)

    def _plan(self) -> tuple[list[list[Draw]], int] | None:
        left = None if self._epochs is None else self._epochs * self.epoch_tokens - self._tokens
        if left is not None and not self._arrived.exhausted and left < self.config.packing.capacity:
            left = None  # the end is known for certain only when all has arrived
        return None if left is not None and left <= 0 else self._steps.next_batches(left)

    def _replay(self) -> None:
        history = self._decider.history(self.index)
        if len(history) < self.index and (not history or history[-1].digest is None):
            raise CheckpointError(
                f"the record of what was drawn ends with step {len(history)}, the checkpoint is behind step "
                f"{self.index}; resume from an older checkpoint, or start afresh"
            )
        self.arrive([part for decision in history for part in decision.parts], None)
        for decision in history:
            for bucket, *chunk in decision.chunks:
                self._arrived.chunks[bucket].append(Chunk(*chunk))
            self._aside, self._arrived.digest = decision.aside, decision.digest

    def _restore(self) -> None:
        """Put the stream where it stood behind the last step, over all that has arrived since."""
        mix = None if self.config.mix == "natural" else self._mix
        state, packing = self._before, self.config.packing
        try:
            if self.config.compose == "bucketed":
                batches = FollowedBatches(self._arrived, mix, packing, state)
                self._stream: FollowedBatches | FollowedSamples = batches
                self._steps: BucketedSteps | MixedSteps = BucketedSteps(batches, packing.slots)
            else:
                self._stream = samples = FollowedSamples(self._arrived, mix, state)
                pending = state["pending"] if state else []
                self._steps = MixedSteps(samples, self._arrived.lengths, packing, pending)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the sampler's saved position cannot be read ({error!r}); start afresh"
            ) from error


def _check_fit(planned: Planned, config: SamplerConfig) -> None:
    if config.policy != "stratified":
        raise ConfigError(
            f"--follow needs --sampler stratified: --sampler {config.policy} draws in the order of a "
            "finished cache's rows"
        )
    if config.supply is not None:
        raise ConfigError("a modelled supply does not go with --follow, where it is real")
    if config.epoch_size is not None:
        raise ConfigError("--epoch-size does not go with --follow, whose first epoch is what arrives")
    if planned.longest > config.tokens_per_batch:
        raise ConfigError(
            f"the longest sample will have {planned.longest:,} tokens, more than the "
            f"{config.tokens_per_batch:,} of a micro-batch; use --tokens-per-batch {planned.longest} or more"
        )
