"""Feeding the trainer: a thread plans, reads, verifies and packs ahead of the step that is being computed."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash.train.batches import AnchorConfig, BlockShape, PackedBatch, documents, pack
from dflash.train.candidates import draw_negatives
from dflash.train.faults import CorruptSample, read_sound
from dflash.train.sampler import Sampler, SamplerState, Step, batches_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from dflash.cache.reader import CacheReader, Sample
    from dflash.train.pools import Draw
    from dflash.world import World

STEPS_AHEAD = 2
"""Steps that are packed before they are needed; the rest of the sampler's window stays on the disk."""


@dataclass(frozen=True)
class LoadedStep:
    """One optimizer step as this rank computes it."""

    batches: list[PackedBatch]
    """This rank's micro-batches, the same number on every rank."""
    draws: np.ndarray
    """Tokens by micro-batch and bucket over all ranks, int64 `[batches_per_step, buckets]`."""
    state: SamplerState
    """The sampler's position behind this step."""
    ready: int = 0
    """Steps, this one included, that were packed when the trainer asked for it; 0: it had to wait."""
    waited: float = 0.0
    """Seconds that it waited."""
    corrupt: tuple[CorruptSample, ...] = ()
    """Damaged samples that this rank's micro-batches lack."""


class BlockPlan(NamedTuple):
    """How samples become blocks."""

    anchors: AnchorConfig
    shape: BlockShape
    negatives: int | None = None
    """Tokens drawn for each micro-batch's softmax; None for the whole vocabulary."""
    skip_corrupt: bool = False
    """Go without damaged samples, instead of ending with the first one."""


class StepLoader:
    """Iterates over the steps of a sampler; a context manager, because it owns a thread.

    Args:
        reader: The cache; every read is verified.
        sampler: Decides what is read. The loader advances it.
        blocks: How many blocks samples get, and of which shape.
        world: Which micro-batches are this rank's.
        device: Where batches end up; for CUDA they are pinned here and copied beside the computation.
    """

    def __init__(
        self, reader: CacheReader, sampler: Sampler, blocks: BlockPlan, world: World, device: torch.device
    ) -> None:
        self._reader, self._sampler, self._blocks = reader, sampler, blocks
        self._world, self._device = world, device
        self._ready: queue.Queue[LoadedStep | BaseException | None] = queue.Queue(maxsize=STEPS_AHEAD)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="step-loader", daemon=True)
        self.waited = 0.0
        """Seconds that the trainer has waited for data."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get(timeout=0.05)  # makes room, so that a waiting producer sees the event
        self._thread.join()

    def __iter__(self) -> Iterator[LoadedStep]:
        while True:
            started, ready = time.perf_counter(), self._ready.qsize()
            item = self._ready.get()
            waited = time.perf_counter() - started
            self.waited += waited
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield replace(item, ready=ready, waited=waited)

    def _produce(self) -> None:
        try:
            while not self._stop.is_set():
                step = self._sampler.next_step()
                if step is None:
                    break
                self._put(self._load(step))
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
            self._put(error)

    def _put(self, item: LoadedStep | BaseException | None) -> None:
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return

    def _load(self, step: Step) -> LoadedStep:
        state = self._sampler.state()
        corrupt: list[CorruptSample] = []
        batches = [self._batch(slot.draws, corrupt) for slot in batches_for(step, self._world)]
        return LoadedStep(batches, self._draws(step), state, corrupt=tuple(corrupt))

    def _batch(self, slot: Sequence[Draw], corrupt: list[CorruptSample]) -> PackedBatch:
        slot, samples = self._read(slot, corrupt)
        rows = [draw.row for draw in slot]
        buckets = self._reader.index.buckets[rows].tolist()
        docs = documents(samples, [draw.epoch for draw in slot], buckets, self._blocks.anchors)
        batch = pack(docs, self._blocks.shape, pinned=self._device.type == "cuda")
        if self._blocks.negatives is not None:
            vocab_size, seed = self._reader.manifest.identity.vocab_size, self._blocks.anchors.seed
            drawn = draw_negatives(self._blocks.negatives, vocab_size, seed, batch.samples)
            batch = replace(batch, negatives=torch.from_numpy(drawn))
        return batch.pin() if self._device.type == "cuda" else batch

    def _read(
        self, slot: Sequence[Draw], corrupt: list[CorruptSample]
    ) -> tuple[Sequence[Draw], list[Sample]]:
        rows = [draw.row for draw in slot]
        if not self._blocks.skip_corrupt:
            return slot, self._reader.read(rows, self._room(rows))
        samples, damaged = read_sound(self._reader, rows)
        corrupt.extend(damaged)
        lost = {sample.row for sample in damaged}
        return [draw for draw in slot if draw.row not in lost], samples

    def _room(self, rows: Sequence[int]) -> torch.Tensor:
        """Memory to read these samples into, the same for every batch: fresh pages cost as much as reading.

        `pack` copies out of it before the next batch is read.
        """
        needed = self._reader.buffer_bytes(rows)
        if len(self._buffer) < needed:
            self._buffer = torch.empty(needed + needed // 4, dtype=torch.uint8)
        return self._buffer

    def _draws(self, step: Step) -> np.ndarray:
        index = self._reader.index
        buckets = len(self._reader.manifest.identity.bucket_edges)
        draws = np.zeros((len(step.batches), buckets), np.int64)
        for slot, batch in enumerate(step.batches):
            rows = [draw.row for draw in batch]
            np.add.at(draws[slot], index.buckets[rows], index.lengths[rows])
        return draws


def on_device(batches: Sequence[PackedBatch], device: torch.device) -> Iterator[PackedBatch]:
    """Move batches to the device one ahead of their use, on a stream of its own where the device has them."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: PackedBatch | None = None
    for batch in [*batches, None]:
        ready = waiting
        if batch is not None:
            with torch.cuda.stream(side):
                waiting = batch.to(device)
        if ready is not None:
            yield ready
        # what was copied beside the last batch's computation may be used from here on
        torch.cuda.current_stream(device).wait_stream(side)
        if waiting is not None:
            waiting.record_stream(torch.cuda.current_stream(device))
