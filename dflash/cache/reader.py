"""Reading a cache: samples in any order, straight into one buffer, each checked against its crc32c always."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import crc32c
import numpy as np
import torch

from dflash.cache.codec import RawCodec, codec_of, decoded
from dflash.cache.index import CacheIndex, Extents, check_complete, committed_ids, load_index
from dflash.cache.io import (
    ALONE_S,
    MAX_OPEN_FILES,
    SMALL_BYTES,
    OpenFile,
    OpenFiles,
    Workers,
    neighbours,
    portions,
)
from dflash.cache.manifest import REPAIR, load_manifest
from dflash.cache.mirror import mirror_of
from dflash.cache.quantised import CodedStates
from dflash.cache.shard import DATA_START, Sample, ShardLayout
from dflash.errors import CacheCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

__all__ = ["CacheIndex", "CacheReader", "Sample", "committed_ids"]

MAX_TAIL_BYTES = 64 << 20
"""Ids, masks and offsets of open shards that are held in memory at most."""


class CacheReader:
    """Random access to the samples of a cache. One reader may serve several threads.

    Args:
        cache: The cache's folder.
        allow_incomplete: Open a cache whose extraction has not finished, with what is committed now.
        max_open: Shards held open at most, the least recently used being closed first.

    Raises:
        CacheIncomplete: extraction has not finished and `allow_incomplete` is false.
        CacheCorrupt: the manifest or the index is damaged or lacks samples.
        CacheError: `cache` is not a cache.
    """

    def __init__(
        self, cache: Path, *, allow_incomplete: bool = False, max_open: int = MAX_OPEN_FILES
    ) -> None:
        self.cache = cache
        self.manifest = load_manifest(cache)
        self.index = load_index(cache, self.manifest)
        if self.manifest.complete or not allow_incomplete:
            check_complete(cache, self.manifest, self.index)
        self._codec = codec_of(self.manifest)
        self._shards = OpenFiles(self._open, _Shard.weight, max_open, MAX_TAIL_BYTES)
        self._workers = Workers()
        self._mirror = mirror_of(cache)
        self._closing = threading.Event()
        self._checked = True  # the benchmark alone turns it off, to measure what the checksums cost

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the open shards. The reader stays usable and opens them again at need."""
        self._closing.set()
        self._workers.close()
        self._shards.drop()

    def buffer_bytes(self, rows: Sequence[int] | NDArray[np.int64]) -> int:
        """Bytes of the extents of these rows together."""
        return int(self.index.locate(np.asarray(rows, np.int64)).nbytes.sum())

    def read(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        buffer: torch.Tensor | None = None,
        *,
        keep_coded: bool = False,
    ) -> list[Sample]:
        """Read samples, in the order of `rows`.

        Args:
            rows: Rows of `index`; they may repeat.
            buffer: uint8 vector on the CPU (pinned, say) of at least `buffer_bytes(rows)`; what
                comes back may be views into it, which change when it is used again. By default a new one.
            keep_coded: Leave states of the codecs int8 and fp8 for the device that uses them to decode.

        Returns:
            One sample a row; `hidden_states` [T, K, H] in the cache's dtype, or else `coded`.

        Raises:
            CacheCorrupt: a shard is missing, cut short or changed, or a sample's checksum does not fit.
            IndexError: a row is outside the index.
        """
        wanted = np.asarray(rows, np.int64)
        if not len(wanted):
            return []
        if not 0 <= wanted.min() <= wanted.max() < len(self.index):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self.index)} samples")
        extents = self.index.locate(wanted)
        total = int(extents.nbytes.sum())
        flat = torch.empty(total, dtype=torch.uint8) if buffer is None else buffer[:total]
        samples = self._read(wanted, extents, flat)
        if self.manifest.identity.codec != "raw":
            self._interpret(samples, keep_coded=keep_coded)
        return samples

    def read_stored(self, rows: NDArray[np.int64]) -> list[Sample]:
        """Read samples with their extents as they are stored, uint8 `[bytes]`, in `hidden_states`.

        Raises:
            CacheCorrupt: as `read`.
        """
        extents = self.index.locate(rows)
        flat = torch.empty(int(extents.nbytes.sum()), dtype=torch.uint8)
        samples = self._read(rows, extents, flat)
        for sample in samples:
            sample.hidden_states = sample.hidden_states.reshape(-1).view(torch.uint8)
        return samples

    def _read(self, wanted: NDArray[np.int64], extents: Extents, flat: torch.Tensor) -> list[Sample]:
        lengths, sizes = self.index.lengths[wanted].astype(np.int64), extents.nbytes
        # In file order, so that neighbours are read together and each shard is opened once.
        order = np.lexsort((extents.offsets, extents.shards))
        shards, token_ends = extents.shards[order], np.cumsum(lengths[order])
        batch = _Batch(
            ids=self.index.ids[wanted[order]],
            rows=extents.shard_rows[order],
            offsets=extents.offsets[order],
            sizes=sizes[order],
            crcs=extents.crcs[order],
            starts=(np.cumsum(sizes) - sizes)[order],
            token_starts=token_ends - lengths[order],
            token_ends=token_ends,
            memory=flat.numpy().data,
            input_ids=np.empty(token_ends[-1], "<i4"),
            loss_mask=np.empty(token_ends[-1], np.uint8),
        )

        def read(part: slice) -> None:
            self._read_part(shards.item(part.start), batch, part)

        self.fetch(np.unique(shards).tolist())
        alone_s = ALONE_S if batch.sizes.mean() < SMALL_BYTES else 0.0
        self._workers.run(read, portions(shards, batch.sizes), alone_s)
        return self._samples(batch, order, flat)

    def _read_part(self, shard: int, batch: _Batch, part: slice) -> None:
        try:
            self._shards.get(shard).read(batch, part, checked=self._checked)
        except CacheCorrupt:
            if self._mirror is None:
                raise
            # The local copy has gone bad, or another process took it away: once more from the store.
            self._mirror.forget(self.index.layouts[shard].name)
            self._shards.forget(shard)
            self.fetch([shard])
            self._shards.get(shard).read(batch, part, checked=self._checked)

    def _samples(self, batch: _Batch, order: NDArray[np.int64], flat: torch.Tensor) -> list[Sample]:
        """The samples of a batch that has been read, number i of it at place `order[i]`."""
        extents = self._split(flat, batch.sizes[np.argsort(order)])
        input_ids = batch.input_ids.astype(np.int32, copy=False)
        samples: list[Sample | None] = [None] * len(order)
        columns = (order, batch.ids, batch.token_starts, batch.token_ends)
        for place, name, start, end in zip(*(column.tolist() for column in columns), strict=True):
            samples[place] = Sample(name, input_ids[start:end], batch.loss_mask[start:end], extents[place])
        return cast("list[Sample]", samples)

    def _split(self, flat: torch.Tensor, sizes: NDArray[np.int64]) -> Sequence[torch.Tensor]:
        """Views of the buffer, one a sample: extents of these sizes, or states [T, K, H] with codec raw."""
        if not isinstance(self._codec, RawCodec):
            return torch.split(flat, sizes.tolist())
        tokens = sizes // self.manifest.identity.bytes_per_token
        return torch.split(self._codec.parse(flat, int(tokens.sum())), tokens.tolist())

    def _interpret(self, samples: list[Sample], *, keep_coded: bool) -> None:
        """Put states in the place of extents."""

        def parse(sample: Sample) -> None:
            try:
                states = self._codec.parse(sample.hidden_states, len(sample.input_ids))
            except ValueError as error:
                raise CacheCorrupt(
                    f"{self.cache}: sample {sample.id} fits its checksum, but not its codec: {error}"
                ) from error
            if keep_coded and isinstance(states, CodedStates):
                sample.hidden_states, sample.coded = torch.empty(0, dtype=torch.bfloat16), states
            else:
                sample.hidden_states = decoded(states)

        self._workers.run(parse, samples)

    def fetch(self, shards: Iterable[int]) -> None:
        """Make sure that these shards lie in the folder: those of a cache in an object store may not yet.

        Raises:
            CacheCorrupt: a shard is missing or damaged in the store.
            StoreError: the store does not answer, or refuses.
        """
        if self._mirror is not None:
            self._mirror.fetch((self.index.layouts[n], self.index.digests[n]) for n in shards)

    def refresh(self) -> None:
        """Bring the folder of a cache in an object store up to date, where others may have committed since.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        if self._mirror is not None:
            self._mirror.pull()

    def fetch_ahead(self) -> None:
        """Begin to fetch shards of a cache in an object store in a thread, as many as may be kept."""
        if self._mirror is not None:
            self._closing.clear()
            shards = zip(self.index.layouts, self.index.digests, strict=True)
            work, stop = self._mirror.fetch_ahead, self._closing
            threading.Thread(target=work, args=(shards, stop), name="fetch-ahead", daemon=True).start()

    def _open(self, number: int) -> _Shard:
        return _Shard(self.cache, self.index.layouts[number])


@dataclass(frozen=True, eq=False)
class _Batch:
    """Samples to be read, in file order [N]; T is the sum of their lengths."""

    ids: NDArray[np.uint64]
    rows: NDArray[np.int64]
    """0-based, in their shards."""
    offsets: NDArray[np.int64]
    """First byte of their extents in their shards."""
    sizes: NDArray[np.int64]
    """Bytes of their extents."""
    crcs: NDArray[np.uint32]
    starts: NDArray[np.int64]
    """First byte of their extents in `memory`."""
    token_starts: NDArray[np.int64]
    token_ends: NDArray[np.int64]
    """First token of each in `input_ids` and `loss_mask`, and the first behind."""
    memory: memoryview
    """Where extents go."""
    input_ids: NDArray[np.int32]
    """[T], where token ids go."""
    loss_mask: NDArray[np.uint8]
    """[T], where masks go."""


class _Shard:
    """An open shard, its header checked, with its offsets, token ids and masks in memory.

    These are five bytes a token where the hidden states have thousands; one read instead of three a sample.
    """

    def __init__(self, cache: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self._file = OpenFile(cache / layout.name, layout.file_size)
        if self._file.bytes_at(0, DATA_START) != layout.header():
            raise CacheCorrupt(f"{self._file.path}: its header is not that of the committed shard; {REPAIR}")
        tail = self._file.bytes_at(layout.offsets_start, self.weight())
        ids_start = layout.input_ids_start - layout.offsets_start
        self._offsets = np.frombuffer(tail, "<i8", layout.samples + 1)
        self._extents = self._offsets * layout.manifest.identity.bytes_per_token  # of the codec raw
        if not layout.is_raw:
            extents_start = layout.extents_start - layout.offsets_start
            self._extents = np.frombuffer(tail, "<i8", layout.samples + 1, extents_start)
        self._input_ids = np.frombuffer(tail, "<i4", layout.tokens, ids_start)
        self._loss_mask = np.frombuffer(tail, np.uint8, layout.tokens, ids_start + 4 * layout.tokens)

    def weight(self) -> int:
        """Bytes held in memory."""
        return self.layout.file_size - self.layout.offsets_start

    def read(self, batch: _Batch, part: slice, *, checked: bool) -> None:
        """Read these samples of the batch, which lie in this shard, into the batch's memory."""
        self._take_tokens(batch, part)
        offsets, sizes = batch.offsets[part], batch.sizes[part]
        memory, starts, ends = (
            batch.memory,
            batch.starts[part].tolist(),
            (batch.starts[part] + sizes).tolist(),
        )
        crcs: list[int] = []
        for run in neighbours(offsets, sizes):
            views = [memory[start:end] for start, end in zip(starts[run], ends[run], strict=True)]
            if checked:
                crcs += self._file.fill_checked(views, offsets.item(run.start))
            else:
                self._file.fill(views, offsets.item(run.start))
        if checked:
            self._check(batch, part, crcs)

    def _take_tokens(self, batch: _Batch, part: slice) -> None:
        """Copy ids and masks; the shard's offsets and the index must agree on where they are."""
        rows, lengths = batch.rows[part], batch.token_ends[part] - batch.token_starts[part]
        first, extents = self._offsets[rows], batch.offsets[part] - DATA_START
        wrong = (self._offsets[rows + 1] != first + lengths) | (first < 0)
        wrong |= first + lengths > self.layout.tokens
        wrong |= self._extents[rows] != extents
        wrong |= self._extents[rows + 1] != extents + batch.sizes[part]
        if wrong.any():
            where = self._where(batch, part, int(wrong.argmax()))
            raise CacheCorrupt(f"{where}: its offsets differ from the index; {REPAIR}")
        start, end = batch.token_starts.item(part.start), batch.token_ends.item(part.stop - 1)
        taken = np.repeat(first - batch.token_starts[part], lengths) + np.arange(start, end)
        np.take(self._input_ids, taken, out=batch.input_ids[start:end])
        np.take(self._loss_mask, taken, out=batch.loss_mask[start:end])

    def _check(self, batch: _Batch, part: slice, crcs: list[int]) -> None:
        """Hold the checksums of the hidden states, carried on over ids and masks, against the index."""
        input_ids, loss_mask = batch.input_ids.data.cast("B"), batch.loss_mask.data
        starts, ends = batch.token_starts[part].tolist(), batch.token_ends[part].tolist()
        expected = batch.crcs[part].tolist()
        for place, (start, end, crc) in enumerate(zip(starts, ends, crcs, strict=True)):
            with_ids = crc32c.crc32c(input_ids[4 * start : 4 * end], crc)
            if crc32c.crc32c(loss_mask[start:end], with_ids) != expected[place]:
                where = self._where(batch, part, place)
                raise CacheCorrupt(f"{where}: its bytes have changed, they do not fit its checksum; {REPAIR}")

    def _where(self, batch: _Batch, part: slice, place: int) -> str:
        row, sample_id = batch.rows.item(part.start + place), batch.ids.item(part.start + place)
        return f"{self._file.path}: row {row} (sample {sample_id})"
