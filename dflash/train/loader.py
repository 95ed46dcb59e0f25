"""Feeding the trainer: a thread plans, reads, verifies and packs ahead of the step that is being computed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
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
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from dflash.cache.reader import CacheReader, Sample
    from dflash.train.following import FollowSampler
    from dflash.train.pools import Draw
    from dflash.train.sampler import Sampler
    from dflash.world import World

TWO_STEPS = ReadyLimits(gate=1, steps=2, limit_bytes=DEFAULT_BYTES)


def _nothing() -> None:
    pass


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
    following: Callable[[], PackedBatch | None] = _nothing
    """This rank's first micro-batch of the next step, if that is ready."""


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
            yield replace(drawn.item, ready=drawn.ready, waited=drawn.waited, following=self._following)

    def _following(self) -> PackedBatch | None:
        step = self.window.peek()
        return None if step is None else step.batches[0]

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


class DeviceFeed:
    """Brings the micro-batches of steps to a device, each beside the computation of the one before it.

    On CUDA they are copied on a stream of their own, to which their memory goes back. It must not be written
    to before the device has computed what it was used for. So a copy waits, on the device, for what was asked
    of it before; it is asked for before the computation that it runs beside. Three batches have memory at
    most. `Tensor.record_stream` would have the host look whether that memory is free: one that runs ahead
    finds that it is not, and takes more for every micro-batch of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ahead: tuple[PackedBatch, PackedBatch] | None = None  # in host memory, on the device

    def batches(self, step: LoadedStep) -> Iterator[PackedBatch]:
        """Those of a step on the device; behind its last one the next step's first, if that is ready."""
        if self._copying is None:
            yield from (batch.to(self._device) for batch in step.batches)
            return
        for number, batch in enumerate(step.batches, 1):
            here = self._take(batch, self._copying)
            following = step.batches[number] if number < len(step.batches) else step.following()
            if following is not None:
                self._begin(following, self._copying)
            yield here

    def _begin(self, batch: PackedBatch, copying: torch.cuda.Stream) -> None:
        copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(copying):
            self._ahead = batch, batch.to(self._device)

    def _take(self, batch: PackedBatch, copying: torch.cuda.Stream) -> PackedBatch:
        if self._ahead is None or self._ahead[0] is not batch:
            self._begin(batch, copying)
        assert self._ahead is not None
        (_, here), self._ahead = self._ahead, None
        torch.cuda.current_stream(self._device).wait_stream(copying)
        return here
