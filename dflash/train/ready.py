"""The look-ahead that is made ready: steps that are read, verified, packed and, for CUDA, in pinned memory.

It is bounded in steps and in bytes, never exceeds either, and is drawn from in order. The first draw waits
until the gate is open, but not for long: what is not yet loaded lies on the disk. Every draw waits for its
step. What is being loaded at the moment counts as held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from dflash.errors import ConfigError
from dflash.train.sampler import SamplerConfig
from dflash.world import World

DEFAULT_BYTES = 1 << 30
Item = TypeVar("Item")


@dataclass(frozen=True)
class ReadyLimits:
    """How far ahead one rank makes data ready."""

    gate: int
    """Steps that must be ready before the first is drawn."""
    steps: int
    """Steps that may be ready at once."""
    limit_bytes: int
    """Bytes of hidden states that may be."""
    patience: float = 1.0
    """Seconds that the gate may keep the first step back once that is ready."""


def ready_limits(
    config: SamplerConfig, world: World, bytes_per_token: int, window_bytes: int | None
) -> ReadyLimits:
    """The window of one rank: `min_ready` and `max_ready` in whole steps, and its bytes.

    Args:
        config: Counts the window in micro-batches over all ranks.
        world: How many ranks share a step.
        bytes_per_token: Of hidden states.
        window_bytes: Most bytes on one rank; None for 1 GiB, or two steps where that is more.

    Raises:
        ConfigError: the bytes do not hold a rank's part of one step.
    """
    slots = config.batches_per_step
    batch = config.tokens_per_batch * bytes_per_token
    part = slots // world.size * batch
    if window_bytes is not None and window_bytes < part:
        raise ConfigError(
            f"--window-bytes {window_bytes:,} cannot hold one micro-batch of {config.tokens_per_batch:,} "
            f"tokens at {bytes_per_token:,} bytes ({batch:,} bytes) for each of the {slots // world.size} "
            f"that a rank runs in a step; use {part:,}, or lower --batches-per-step or --tokens-per-batch"
        )
    steps = max(config.max_ready // slots, 1)
    held = max(DEFAULT_BYTES, 2 * part) if window_bytes is None else window_bytes
    return ReadyLimits(min(-(-config.min_ready // slots), steps), steps, held)


class Drawn(NamedTuple, Generic[Item]):
    """What came out of the window."""

    item: Item | None
    """None at the end."""
    ready: int
    """Steps, this one included, that were ready when it was asked for; 0: the trainer had to wait."""
    waited: float
    """Seconds that it waited."""


class ReadyWindow(Generic[Item]):
    """A queue between one thread that loads and one that trains."""

    def __init__(self, limits: ReadyLimits) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._items: deque[tuple[Item, int]] = deque()
        self._open = self._finished = self._closed = False
        self._error: BaseException | None = None
        self._held = self._loading = 0
        self.most_steps = self.most_bytes = 0
        """Most that was ever held at once, with what was being loaded."""

    def reserve(self, size: int) -> bool:
        """Wait for room for another step of so many bytes; False when the window was closed meanwhile.

        A step that exceeds the bytes by itself gets in when nothing else is held.
        """
        with self._changed:
            while not (self._closed or self._has_room(size)):
                self._open = True  # no more will fit: waiting for the gate would be for ever
                self._changed.notify_all()
                self._changed.wait()
            self._held += size
            self._loading = size
            self.most_steps = max(self.most_steps, len(self._items) + 1)
            self.most_bytes = max(self.most_bytes, self._held)
            return not self._closed

    def put(self, item: Item) -> None:
        """Add the step for which room was reserved."""
        with self._changed:
            self._items.append((item, self._loading))
            self._open = self._open or len(self._items) >= self._limits.gate
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing will follow; the trainer gets the error behind what is ready."""
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing will be drawn any more: whoever waits for room goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def draw(self) -> Drawn[Item]:
        """The next step; its room is free at once.

        Raises:
            BaseException: what the loading thread ended with.
        """
        started = time.perf_counter()
        with self._changed:
            ready = len(self._items) if self._open else 0
            self._changed.wait_for(lambda: self._finished or self._items)
            if not self._open:
                self._changed.wait_for(lambda: self._finished or self._open, self._limits.patience)
                self._open = True
            waited = time.perf_counter() - started
            if self._items:
                item, size = self._items.popleft()
                self._held -= size
                self._changed.notify_all()
                return Drawn(item, ready, waited)
            if self._error is not None:
                raise self._error
            return Drawn(None, ready, waited)

    def peek(self) -> Item | None:
        """The next step, if it is ready; it stays where it is."""
        with self._changed:
            return self._items[0][0] if self._items else None

    def _has_room(self, size: int) -> bool:
        if not self._items:
            return True
        return len(self._items) < self._limits.steps and self._held + size <= self._limits.limit_bytes
