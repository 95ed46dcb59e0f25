"""Feeding the trainer: a thread plans, reads, verifies and packs ahead of the step that is being computed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash.train.batches import AnchorConfig, BlockShape, PackedBatch, documents, pack
from dflash.train.candidates import Candidates, candidates, draw_negatives
from dflash.train.faults import CorruptSample, read_sound
from dflash.train.padding import multiples_for, padded
from dflash.train.ready import DEFAULT_BYTES, ReadyLimits, ReadyWindow
from dflash.train.sampler import SamplerState, Step, batches_for
from dflash.train.teacher import with_teacher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from dflash.cache.reader import CacheReader, Sample
    from dflash.train.following import FollowSampler
    from dflash.train.pools import Draw
    from dflash.train.sampler import Sampler
    from dflash.world import World

TWO_STEPS = ReadyLimits(gate=1, steps=2, limit_bytes=DEFAULT_BYTES)


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
    """Steps, this one included, that were ready when the trainer asked for it; 0: it had to wait."""
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
    teacher: bool = False
    """Whether the deepest tap is the teacher's of a distillation."""


class StepLoader:
    """Iterates over the steps of a sampler; a context manager, because it owns a thread.

    Args:
        reader: The cache; every read is verified.
        sampler: Decides what is read. The loader advances it.
        blocks: How many blocks samples get, and of which shape.
        world: Which micro-batches are this rank's.
        device: Where batches end up; for CUDA they are pinned here and copied beside the computation.
        limits: How far ahead is loaded.
    """

    def __init__(
        self,
        reader: CacheReader,
        sampler: Sampler | FollowSampler,
        blocks: BlockPlan,
        world: World,
        device: torch.device,
        limits: ReadyLimits = TWO_STEPS,
    ) -> None:
        self._reader, self._sampler, self._blocks = reader, sampler, blocks
        self._world, self._device = world, device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.window: ReadyWindow[LoadedStep] = ReadyWindow(limits)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="step-loader", daemon=True)
        self.waited = 0.0
        """Seconds that the trainer has waited for data."""

    def __enter__(self) -> Self:
        self._reader.fetch_ahead()
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self.window.close()
        self._thread.join()

    def __iter__(self) -> Iterator[LoadedStep]:
        while True:
            drawn = self.window.draw()
            self.waited += drawn.waited
            if drawn.item is None:
                return
            yield replace(drawn.item, ready=drawn.ready, waited=drawn.waited)

    def _produce(self) -> None:
        try:
            while not self._stop.is_set():
                step = self._sampler.next_step()
                if step is None or not self.window.reserve(self._bytes(step)):
                    break
                self.window.put(self._load(step))
            self.window.finish()
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
            self.window.finish(error)

    def _bytes(self, step: Step) -> int:
        """Hidden states of this rank's part of a step."""
        rows = [draw.row for slot in batches_for(step, self._world) for draw in slot.draws]
        return int(self._reader.index.lengths[rows].sum()) * self._reader.manifest.identity.bytes_per_token

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
        cuda, multiples = self._device.type == "cuda", multiples_for(self._device)
        batch = pack(docs, self._blocks.shape, pinned=cuda, multiple=multiples.rows)
        if self._blocks.teacher:
            batch = with_teacher(batch, docs)
        if self._blocks.negatives is not None:
            batch = replace(batch, candidates=self._candidates(batch, self._blocks.negatives))
        batch = padded(batch, multiples)
        return batch.pin() if cuda else batch

    def _candidates(self, batch: PackedBatch, negatives: int) -> Candidates:
        vocab_size = self._reader.manifest.identity.vocab_size
        drawn = draw_negatives(negatives, vocab_size, self._blocks.anchors.seed, batch.samples)
        return candidates(batch.targets, torch.from_numpy(drawn), vocab_size)

    def _read(
        self, slot: Sequence[Draw], corrupt: list[CorruptSample]
    ) -> tuple[Sequence[Draw], list[Sample]]:
        rows = [draw.row for draw in slot]
        coded = not self._blocks.teacher  # whose rows are picked out here
        if not self._blocks.skip_corrupt:
            return slot, self._reader.read(rows, self._room(rows), keep_coded=coded)
        samples, damaged = read_sound(self._reader, rows, keep_coded=coded)
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
    side = _copying(device)
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


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream on which batches are copied: always the same, since freed memory goes back to its stream.

    With a new one a step, each of PyTorch's 32 streams would come to keep room for two batches.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
