"""From samples of the cache to a packed micro-batch: contexts one after another, blocks at anchors, labels.

Anchors are dealt per sample, not per packed row, so that short documents get their share; they depend on
(seed, epoch, sample id) alone, so that batching, ranks and workers change nothing.

Dimensions: T context rows, A blocks, B slots a block, P counted slots of all blocks, K taps, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.attention import BlockLayout
from dflash.cache.quantised import join
from dflash.errors import ConfigError
from dflash.train.padding import with_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dflash.cache.quantised import CodedStates
    from dflash.cache.writer import Sample
    from dflash.train.candidates import Candidates


ANCHOR_SAMPLINGS = ("uniform", "stratified")


@dataclass(frozen=True)
class AnchorConfig:
    """How many anchors a sample gets."""

    anchors: int = 512
    """Most anchors of one sample in one epoch."""
    density: float = 0.25
    """Anchors per supervised token."""
    seed: int = 0
    sampling: str = "uniform"
    """`uniform`, or `stratified`: one at random in each of as many equal stretches."""

    def __post_init__(self) -> None:
        """Refuse settings that would train nothing.

        Raises:
            ConfigError: names the value and its range.
        """
        if self.anchors < 1:
            raise ConfigError(f"--anchors {self.anchors} leaves samples without a block; use 1 or more")
        if not 0 < self.density <= 1:
            raise ConfigError(f"--anchor-density {self.density} must be in (0, 1]")
        if self.sampling not in ANCHOR_SAMPLINGS:
            raise ConfigError(
                f"--anchor-sampling {self.sampling!r} is not one of {', '.join(ANCHOR_SAMPLINGS)}"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed} must not be negative")


def choose_anchors(loss_mask: np.ndarray, sample_id: int, epoch: int, config: AnchorConfig) -> np.ndarray:
    """Anchor positions of one sample in one epoch, ascending int64, drawn without replacement.

    A position is valid when it and the next one are supervised (contract, section 3). The count is `density`
    times the supervised tokens, at least one, at most `anchors` and at most the valid positions; a sample
    without a valid position gets none.
    """
    supervised = loss_mask.astype(bool)
    valid = np.flatnonzero(supervised[:-1] & supervised[1:])
    wanted = max(1, round(config.density * int(supervised.sum())))
    count = min(wanted, config.anchors, len(valid))
    if not count:
        return valid[:0]
    generator = np.random.default_rng((config.seed, epoch, sample_id))
    if config.sampling == "stratified":
        return np.sort(valid[_jittered(len(valid), count, generator)])
    return np.sort(generator.choice(valid, size=count, replace=False))


def _jittered(places: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """`count` different places out of `range(places)`, one in each of `count` neighbouring stretches.

    The stretches, of two lengths in random order, lie on a ring that is turned at random: every place is
    drawn with the same probability, and every run of places is hit alike.
    """
    lengths = np.full(count, places // count)
    lengths[: places % count] += 1
    generator.shuffle(lengths)
    picks = np.cumsum(lengths) - lengths + generator.integers(lengths)
    return (picks + generator.integers(places)) % places  # type: ignore[no-any-return]


class BlockShape(NamedTuple):
    """What every block looks like; it comes from the drafter."""

    size: int
    """B, the anchor included."""
    mask_token_id: int


@dataclass(frozen=True)
class Document:
    """A sample as one epoch trains on it."""

    sample: Sample
    anchors: np.ndarray
    bucket: int


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch of packed documents.

    What depends on labels and masks (places, candidates) is found where it is packed, in host memory: a
    device that looked for it would make the host wait for the number of places.
    """

    features: Tensor
    """Tapped hidden states of the context `[T, K*H]`, in the cache's dtype; empty where they are `coded`."""
    context_positions: Tensor
    """Position of each context row in its document, int64 `[T]`."""
    block_ids: Tensor
    """`[anchor token, MASK x (B-1)]` of each block, int64 `[A, B]`."""
    block_positions: Tensor
    """Positions in the document, int64 `[A, B]`."""
    labels: Tensor
    """Token at position anchor + k for k = 1..B-1, int64 `[A, B-1]`; 0 where `counted` is false."""
    counted: Tensor
    """Whether that token is inside the document and supervised, bool `[A, B-1]`."""
    places: Tensor
    """Where `counted` is true, ascending, in `[A, B-1]` laid flat: int64 `[P]`."""
    layout: BlockLayout
    """Context rows that each block sees, `[A]`."""
    buckets: Tensor
    """Length bucket of each block's sample, int64 `[A]`."""
    samples: tuple[int, ...]
    """Ids of the samples, for error messages and the record."""
    tokens: int
    """Tokens of the samples, as the sampler counts them."""
    candidates: Candidates | None = None
    """What competes with the counted slots' labels in a sampled softmax; None for the whole vocabulary."""
    teacher: Tensor | None = None
    """In distillation, the target's last hidden states `[R, H]`."""
    teacher_rows: Tensor | None = None
    """Which of them stands behind the prediction of each counted slot, int64 `[P]`."""
    coded: CodedStates | None = None
    """Hidden states of the codecs int8 and fp8 until they are on the device, which decodes them."""

    @property
    def blocks(self) -> int:
        """A."""
        return self.block_ids.shape[0]

    @property
    def distinct_ids(self) -> Tensor:
        """The anchor tokens of at least one block and, behind them, MASK: int64 `[A + 1]`."""
        return torch.cat([self.block_ids[:, 0], self.block_ids[0, 1:2]])

    @property
    def targets(self) -> Tensor:
        """Labels of the counted slots, int64 `[P]`."""
        return self.labels.flatten().index_select(0, self.places)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on a device, its features decoded there; copies from pinned memory do not block."""
        moved = (
            self if device.type == "cpu" else self._map(lambda tensor: tensor.to(device, non_blocking=True))
        )
        if moved.coded is None:
            return moved
        features = moved.coded.decode().flatten(1)
        return replace(moved, features=with_rows(features, len(moved.context_positions)), coded=None)

    def pin(self) -> PackedBatch:
        """The same batch in page-locked memory, from which CUDA copies run beside the computation."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PackedBatch:
        return _changed(self, change)  # type: ignore[no-any-return]


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor in it changed: itself, or in named tuples and dataclasses, however deep."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(part, change) for part in value))
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            part.name: _changed(getattr(value, part.name), change) for part in fields(value) if part.init
        }
        return replace(value, **parts)
    return value


def documents(
    samples: Iterable[Sample], epochs: Sequence[int], buckets: Sequence[int], config: AnchorConfig
) -> list[Document]:
    """Deal anchors to samples."""
    return [
        Document(sample, choose_anchors(sample.loss_mask, sample.id, epoch, config), bucket)
        for sample, epoch, bucket in zip(samples, epochs, buckets, strict=True)
    ]


def pack(
    docs: Sequence[Document], shape: BlockShape, *, pinned: bool = False, multiple: int = 1
) -> PackedBatch:
    """Pack documents into one micro-batch, which shares no memory with them.

    Context rows behind a document's last anchor are left out: no block sees them.

    Args:
        docs: The samples with their anchors.
        shape: Size and mask token of a block.
        pinned: Gather the features in page-locked memory.
        multiple: Rows of zeros follow the features, up to a multiple of this, unless they are coded.
    """
    # A document without anchors has no context that anything reads, so it packs to nothing.
    rows = [int(doc.anchors[-1]) if len(doc.anchors) else 0 for doc in docs]
    starts = np.concatenate([[0], np.cumsum(rows)])[:-1].astype(np.int64)
    parts = [_blocks_of(doc, shape) for doc in docs if len(doc.anchors)] or [_no_blocks(shape)]
    ids, positions, labels, counted = (
        torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True)
    )
    per_doc = [len(doc.anchors) for doc in docs]
    first_row = np.repeat(starts, per_doc)
    anchors = np.concatenate([doc.anchors for doc in docs]) if docs else np.zeros(0, np.int64)
    coded = [doc.sample.coded.first(n) for doc, n in zip(docs, rows, strict=True) if doc.sample.coded]
    return PackedBatch(
        features=torch.zeros(0, 0) if coded else _features(docs, rows, multiple, pinned=pinned),
        context_positions=torch.cat([torch.arange(0), *(torch.arange(count) for count in rows)]),
        block_ids=ids,
        block_positions=positions,
        labels=labels,
        counted=counted,
        places=counted.flatten().nonzero().flatten(),
        layout=BlockLayout.build(first_row.tolist(), (first_row + anchors).tolist()),
        buckets=torch.from_numpy(np.repeat(np.array([doc.bucket for doc in docs], np.int64), per_doc)),
        samples=tuple(doc.sample.id for doc in docs),
        tokens=sum(len(doc.sample.input_ids) for doc in docs),
        coded=join(coded) if coded else None,
    )


def _features(docs: Sequence[Document], rows: Sequence[int], multiple: int, *, pinned: bool) -> Tensor:
    # [rows, K, H] of each document, one after another, then zeros -> [T, K*H]
    parts = [doc.sample.hidden_states[:count] for doc, count in zip(docs, rows, strict=True)]
    if not parts:
        return torch.zeros(0, 0)
    count = sum(rows)
    shape = (count + -count % multiple, *parts[0].shape[1:])
    # PyTorch gives a pinned block out again only when the copy from it to the device is done.
    together = torch.empty(shape, dtype=parts[0].dtype, pin_memory=pinned)
    torch.cat(parts, out=together[:count])
    together[count:] = 0.0
    return together.flatten(1)


def _blocks_of(doc: Document, shape: BlockShape) -> tuple[np.ndarray, ...]:
    ids = doc.sample.input_ids.astype(np.int64)
    length = len(ids)
    positions = doc.anchors[:, None] + np.arange(shape.size)  # [A, B]
    block_ids = np.full_like(positions, shape.mask_token_id)
    block_ids[:, 0] = ids[doc.anchors]
    ahead = positions[:, 1:]
    inside = ahead < length
    clipped = np.minimum(ahead, length - 1)
    counted = inside & doc.sample.loss_mask.astype(bool)[clipped]
    return block_ids, positions, np.where(counted, ids[clipped], 0), counted


def _no_blocks(shape: BlockShape) -> tuple[np.ndarray, ...]:
    whole = np.zeros((0, shape.size), np.int64)
    return whole, whole, whole[:, 1:], whole[:, 1:].astype(bool)
