"""Reading a cache: samples in any order, straight into one buffer, each checked against its crc32c always."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import crc32c
import numpy as np
import torch

from dflash.cache.index import CacheIndex, check_complete, committed_ids, load_index
from dflash.cache.io import MAX_OPEN_FILES, REPAIR, OpenFile, OpenFiles, Workers, neighbours
from dflash.cache.manifest import load_manifest
from dflash.cache.shard import DATA_START, TORCH_DTYPES, Sample, ShardLayout
from dflash.errors import CacheCorrupt

if TYPE_CHECKING:
    from collections.abc import Sequence
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
        self._bytes_per_token = self.manifest.identity.bytes_per_token
        self._shards = OpenFiles(self._open, _Shard.weight, max_open, MAX_TAIL_BYTES)
        self._workers = Workers()
        self._checked = True  # the benchmark alone turns it off, to measure what the checksums cost

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the open shards. The reader stays usable and opens them again at need."""
        self._workers.close()
        self._shards.drop()

    def buffer_bytes(self, rows: Sequence[int] | NDArray[np.int64]) -> int:
        """Bytes of the hidden states of these rows together."""
        tokens = int(self.index.lengths[np.asarray(rows, np.int64)].sum(dtype=np.int64))
        return tokens * self._bytes_per_token

    def read(
        self, rows: Sequence[int] | NDArray[np.int64], buffer: torch.Tensor | None = None
    ) -> list[Sample]:
        """Read samples, in the order of `rows`.

        Args:
            rows: Rows of `index`; they may repeat.
            buffer: uint8 vector on the CPU (pinned, say) of at least `buffer_bytes(rows)`; the hidden states
                are views into it, so they change when it is used again. By default a new one.

        Returns:
            One sample a row; `hidden_states` [T, K, H] in the cache's dtype.

        Raises:
            CacheCorrupt: a shard is missing, cut short or changed, or a sample's checksum does not fit.
            IndexError: a row is outside the index.
        """
        wanted = np.asarray(rows, np.int64)
        if not len(wanted):
            return []
        if not 0 <= wanted.min() <= wanted.max() < len(self.index):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self.index)} samples")
        total = self.buffer_bytes(wanted)
        flat = torch.empty(total, dtype=torch.uint8) if buffer is None else buffer[:total]
        return self._read(wanted, flat)

    def _read(self, wanted: NDArray[np.int64], flat: torch.Tensor) -> list[Sample]:
        lengths = self.index.lengths[wanted].astype(np.int64)
        sizes = lengths * self._bytes_per_token
        places = np.cumsum(sizes) - sizes  # first byte of each sample in the buffer
        extents = self.index.locate(wanted)
        # In file order, so that neighbours are read together and each shard is opened once.
        order = np.lexsort((extents.offsets, extents.shards))
        runs = neighbours(extents.shards[order], extents.offsets[order], sizes[order])
        memory = flat.numpy().data
        columns = (*extents, lengths, places, places + sizes, self.index.ids[wanted])
        wants = [
            _Want(*values) for values in zip(*(column[order].tolist() for column in columns), strict=True)
        ]
        tokens: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = [_NONE] * len(wanted)

        def read(run: slice) -> None:
            shard = self._shards.get(wants[run.start].shard)
            tokens[run] = shard.read(wants[run], memory, checked=self._checked)

        self._workers.run(read, runs)
        states = self._views(flat, lengths)
        samples: list[Sample | None] = [None] * len(wanted)
        for place, want, (input_ids, loss_mask) in zip(order.tolist(), wants, tokens, strict=True):
            samples[place] = Sample(want.id, input_ids, loss_mask, states[place])
        return cast("list[Sample]", samples)

    def _views(self, flat: torch.Tensor, lengths: NDArray[np.int64]) -> Sequence[torch.Tensor]:
        """The samples' hidden states [T, K, H] in the buffer."""
        identity = self.manifest.identity
        shape = (int(lengths.sum()), len(identity.taps), identity.hidden_size)
        return torch.split(flat.view(TORCH_DTYPES[identity.dtype]).view(shape), lengths.tolist())

    def _open(self, number: int) -> _Shard:
        return _Shard(self.cache, self.index.layouts[number])


class _Want(NamedTuple):
    """A sample that is to be read."""

    shard: int
    row: int
    """0-based, in its shard."""
    offset: int
    """First byte of its hidden states in the shard."""
    crc: int
    length: int
    """Tokens."""
    start: int
    """First byte of its hidden states in the buffer."""
    end: int
    id: int


class _Shard:
    """An open shard, its header checked, with its offsets, token ids and masks in memory.

    These are five bytes a token where the hidden states have thousands; one read instead of three a sample.
    """

    def __init__(self, cache: Path, layout: ShardLayout) -> None:
        self.layout = layout
        self._file = OpenFile(cache / layout.name, layout.file_size)
        if self._file.bytes_at(0, DATA_START) != layout.header():
            raise CacheCorrupt(f"{self._file.path}: its header is not that of the committed shard; {REPAIR}")
        tail = self._file.bytes_at(layout.offsets_start, layout.file_size - layout.offsets_start)
        self._offsets = np.frombuffer(tail, "<i8", layout.samples + 1)
        ids_start = layout.input_ids_start - layout.offsets_start
        self._input_ids = np.frombuffer(tail, "<i4", layout.tokens, ids_start)
        self._loss_mask = np.frombuffer(tail, np.uint8, layout.tokens, ids_start + 4 * layout.tokens)

    def weight(self) -> int:
        """Bytes held in memory."""
        return self.layout.file_size - self.layout.offsets_start

    def read(
        self, wants: Sequence[_Want], memory: memoryview, *, checked: bool
    ) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        """Read samples that lie side by side: their hidden states into `memory`; their ids and masks [T]."""
        parts = [memory[want.start : want.end] for want in wants]
        if len(wants) == 1 and checked:
            crcs = [self._file.fill_checked(parts[0], wants[0].offset)]
        else:
            self._file.fill(parts, wants[0].offset)
            crcs = [crc32c.crc32c(part) for part in parts] if checked else []
        tokens = [self._tokens(want) for want in wants]
        for want, (input_ids, loss_mask), crc in zip(wants, tokens, crcs, strict=checked):
            if crc32c.crc32c(loss_mask, crc32c.crc32c(input_ids, crc)) != want.crc:
                raise CacheCorrupt(
                    f"{self._where(want)}: its bytes have changed, they do not fit its checksum; {REPAIR}"
                )
        return tokens

    def _tokens(self, want: _Want) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Copies of a sample's ids and mask [T], whose place the shard and the index must agree on."""
        first = (want.offset - DATA_START) // self.layout.manifest.identity.bytes_per_token
        end = first + want.length
        if self._offsets.item(want.row) != first or self._offsets.item(want.row + 1) != end:
            raise CacheCorrupt(f"{self._where(want)}: its offsets differ from the index; {REPAIR}")
        return self._input_ids[first:end].astype(np.int32), self._loss_mask[first:end].copy()

    def _where(self, want: _Want) -> str:
        return f"{self._file.path}: row {want.row} (sample {want.id})"


_NONE = (np.empty(0, np.int32), np.empty(0, np.uint8))
