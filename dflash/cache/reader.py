"""Reading a cache: samples in any order, straight into one buffer, each checked against its crc32c always."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import crc32c
import numpy as np
import torch

from dflash.cache.codec import RawCodec, codec_of, decoded
from dflash.cache.index import CacheIndex, check_complete, committed_ids, load_index
from dflash.cache.io import (
    ALONE_S,
    MAX_OPEN_FILES,
    SMALL_BYTES,
    OpenFile,
    OpenFiles,
    Portion,
    Transfer,
    Workers,
    portions,
)
from dflash.cache.manifest import REPAIR, load_manifest
from dflash.cache.mirror import mirror_of
from dflash.cache.quantised import CodedStates
from dflash.cache.shard import DATA_START, Sample, ShardLayout
from dflash.errors import CacheCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

__all__ = ["CacheIndex", "CacheReader", "Sample", "committed_ids"]

MAX_TAIL_BYTES = 64 << 20
"""Ids, masks and offsets of open shards that are held in memory at most; a sample that is kept keeps its
shard's as well."""


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
            One sample a row; `hidden_states` [T, K, H] in the cache's dtype, or else `coded`. Its `input_ids`
            and `loss_mask` are views that cannot be written to.

        Raises:
            CacheCorrupt: a shard is missing, cut short or changed, or a sample's checksum does not fit.
            IndexError: a row is outside the index.
        """
        wanted = np.asarray(rows, np.int64)
        if not len(wanted):
            return []
        if wanted.view(np.uint64).max() >= len(self.index):  # what is negative is huge without its sign
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self.index)} samples")
        samples = self._read(wanted, buffer)
        if self.manifest.identity.codec != "raw":
            self._interpret(samples, keep_coded=keep_coded)
        return samples

    def read_stored(self, rows: NDArray[np.int64]) -> list[Sample]:
        """Read samples with their extents as they are stored, uint8 `[bytes]`, in `hidden_states`.

        Raises:
            CacheCorrupt: as `read`.
        """
        samples = self._read(rows, None)
        for sample in samples:
            sample.hidden_states = sample.hidden_states.reshape(-1).view(torch.uint8)
        return samples

    def _read(self, wanted: NDArray[np.int64], buffer: torch.Tensor | None) -> list[Sample]:
        batch = _Batch(self.index, wanted, buffer)
        self.fetch(sorted(set(batch.shards)))
        states: list[torch.Tensor] = []
        work: list[Callable[[], None]] = [
            partial(self._read_part, batch, portion)
            for portion in portions(batch.shards, batch.extents.starts, batch.nbytes)
        ]
        # Last: the thread that has nothing left to read makes the views while others finish.
        work.append(lambda: states.extend(self._split(batch)))
        self._workers.run(_call, work, ALONE_S if len(batch.flat) < SMALL_BYTES * len(wanted) else 0.0)
        return list(map(Sample, batch.ids.tolist(), batch.input_ids, batch.loss_masks, states))

    def _read_part(self, batch: _Batch, portion: Portion) -> None:
        shard = batch.shards[portion[0][0]]
        try:
            self._shards.get(shard).read(batch, portion, checked=self._checked)
        except CacheCorrupt:
            if self._mirror is None:
                raise
            # The local copy has gone bad, or another process took it away: once more from the store.
            self._mirror.copies.forget(self.index.layouts[shard].name)
            self._shards.forget(shard)
            self.fetch([shard])
            self._shards.get(shard).read(batch, portion, checked=self._checked)

    def _split(self, batch: _Batch) -> Sequence[torch.Tensor]:
        """Views of the buffer, one a sample: extents, or states [T, K, H] with codec raw.

        "Unsafe" are views that autograd does not know to share memory; it cannot know of our reads either.
        """
        if not isinstance(self._codec, RawCodec):
            return torch.unsafe_split_with_sizes(batch.flat, batch.sizes.tolist())
        tokens = batch.sizes // self.manifest.identity.bytes_per_token
        states = self._codec.parse(batch.flat, int(tokens.sum()))
        return torch.unsafe_split_with_sizes(states, tokens.tolist())

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
            self._mirror.copies.fetch((self.index.layouts[n], self.index.digests[n]) for n in shards)

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
            work, stop = self._mirror.copies.fetch_ahead, self._closing
            threading.Thread(target=work, args=(shards, stop), name="fetch-ahead", daemon=True).start()

    def _open(self, number: int) -> _Shard:
        return _Shard(self.cache, self.index.layouts[number])


_NO_IDS, _NO_MASK = np.zeros(0, np.int32), np.zeros(0, np.uint8)


class _Batch:
    """Samples to be read. They are sought in file order: neighbours together, each shard opened once.

    Lists, for numbers come out of them faster than out of arrays one at a time.

    Args:
        index: Of the cache.
        wanted: Rows of it [N].
        buffer: Where their extents go, in the order asked for; by default new memory.
    """

    def __init__(self, index: CacheIndex, wanted: NDArray[np.int64], buffer: torch.Tensor | None) -> None:
        order, found = index.locate_in_order(wanted)
        self.sizes = np.empty_like(found.nbytes)
        """[N] bytes of the extents in the order asked for."""
        self.sizes[order] = found.nbytes
        ends = np.cumsum(self.sizes)
        total = ends.item(-1)
        ends = ends[order]
        self.flat = torch.empty(total, dtype=torch.uint8) if buffer is None else buffer[:total]
        self.ids = index.ids[wanted]
        """[N] in the order asked for."""
        self.shards: list[int] = found.shards.tolist()
        self.nbytes: list[int] = found.nbytes.tolist()
        starts, begins = found.offsets.tolist(), (ends - found.nbytes).tolist()
        self.extents = Transfer(self.flat.numpy().data, starts, begins, ends.tolist())
        columns = (order, found.shard_rows, index.lengths[wanted[order]], found.crcs)
        self.columns = (*(column.tolist() for column in columns), starts, self.nbytes)
        """Place in the order asked for, row in the shard, tokens, checksum, extent's first byte and size."""
        self.input_ids = [_NO_IDS] * len(wanted)
        self.loss_masks = [_NO_MASK] * len(wanted)
        """In the order asked for, put there by whoever reads."""


def _call(work: Callable[[], None]) -> None:
    work()


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
        offsets = np.frombuffer(tail, "<i8", layout.samples + 1)
        extents = offsets * layout.manifest.identity.bytes_per_token  # of the codec raw
        if not layout.is_raw:
            extents_start = layout.extents_start - layout.offsets_start
            extents = np.frombuffer(tail, "<i8", layout.samples + 1, extents_start)
        # Single numbers come out of a memoryview faster than out of an array.
        self._offsets, self._starts = offsets.data, (extents + DATA_START).data
        self._input_ids = np.frombuffer(tail, "<i4", layout.tokens, ids_start)
        self._loss_mask = np.frombuffer(tail, np.uint8, layout.tokens, ids_start + 4 * layout.tokens)
        self._input_ids.flags.writeable = self._loss_mask.flags.writeable = False

    def weight(self) -> int:
        """Bytes held in memory."""
        return self.layout.file_size - self.layout.offsets_start

    def read(self, batch: _Batch, portion: Portion, *, checked: bool) -> None:
        """Read these samples of the batch, which lie in this shard."""
        crcs = self._file.load(batch.extents, portion, checked=checked)
        columns = [column[portion[0][0] : portion[-1][1]] for column in batch.columns]
        offsets, starts, tokens, crc32 = self._offsets, self._starts, self.layout.tokens, crc32c.crc32c
        for crc, place, row, length, expected, start, size in zip(crcs, *columns, strict=True):
            first, last = offsets[row], offsets[row + 1]
            fits = last - first == length and 0 <= first <= last <= tokens
            if not fits or starts[row] != start or starts[row + 1] != start + size:
                where = self._where(batch, place, row)
                raise CacheCorrupt(f"{where}: its offsets differ from the index; {REPAIR}")
            ids = batch.input_ids[place] = self._input_ids[first:last]
            mask = batch.loss_masks[place] = self._loss_mask[first:last]
            if checked and crc32(mask, crc32(ids, crc)) != expected:
                where = self._where(batch, place, row)
                raise CacheCorrupt(f"{where}: its bytes have changed, they do not fit its checksum; {REPAIR}")

    def _where(self, batch: _Batch, place: int, row: int) -> str:
        return f"{self._file.path}: row {row} (sample {batch.ids.item(place)})"
