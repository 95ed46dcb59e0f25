"""Reading a cache: samples in any order, straight into one buffer, each checked against its crc32c always.

No mmap: a file that is truncated while mapped kills the process, and mapping is slow on network file systems.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash.cache.index import CacheIndex, check_complete, committed_ids, load_index
from dflash.cache.manifest import load_manifest
from dflash.cache.shard import DATA_START, TORCH_DTYPES, Sample, ShardLayout, sample_crc
from dflash.errors import CacheCorrupt, CacheError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

__all__ = ["CacheIndex", "CacheReader", "Sample", "committed_ids"]

MAX_OPEN_SHARDS = 64
_REPAIR = "run `dflash cache verify` to list what is bad, and `dflash extract` again to restore it"


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
        self, cache: Path, *, allow_incomplete: bool = False, max_open: int = MAX_OPEN_SHARDS
    ) -> None:
        self.cache = cache
        self.manifest = load_manifest(cache)
        self.index = load_index(cache, self.manifest)
        if self.manifest.complete or not allow_incomplete:
            check_complete(cache, self.manifest, self.index)
        self._bytes_per_token = self.manifest.identity.bytes_per_token
        self._max_open = max(1, max_open)
        self._shards: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the open shards. The reader stays usable and opens them again at need."""
        with self._lock:
            self._shards.clear()

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
        parts = torch.split(flat, (self.index.lengths[wanted] * np.int64(self._bytes_per_token)).tolist())
        extents = self.index.locate(wanted)
        samples: dict[int, Sample] = {}
        # In file order, so that neighbours are read one after another and each shard is opened once.
        for place in np.lexsort((extents.offsets, extents.shards)).tolist():
            shard, row, offset, crc = (int(column[place]) for column in extents)
            sample_id = int(self.index.ids[wanted[place]])
            samples[place] = self._shard(shard).read(row, offset, parts[place], sample_id, crc)
        return [samples[place] for place in range(len(wanted))]

    def _shard(self, number: int) -> _OpenShard:
        with self._lock:
            shard = self._shards.pop(number, None)
            if shard is None:
                while len(self._shards) >= self._max_open:
                    self._shards.popitem(last=False)
                shard = _OpenShard(self.cache, self.index.layouts[number])
            self._shards[number] = shard
            return shard


class _OpenShard:
    """A shard's file descriptor and its offsets, checked when it is opened.

    The descriptor is closed with the object, so a thread that still reads an evicted shard keeps it alive.
    """

    def __init__(self, cache: Path, layout: ShardLayout) -> None:
        self.path, self.layout = cache / layout.name, layout
        try:
            # Non-blocking, so that a named pipe in its place is refused instead of waited for.
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheCorrupt(
                f"{self.path} is missing though its samples were committed; {_REPAIR}"
            ) from error
        except OSError as error:
            raise CacheError(f"cannot open {self.path}: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != layout.file_size:
            raise CacheCorrupt(
                f"{self.path}: {found.st_size} bytes, committed with {layout.file_size}; {_REPAIR}"
            )
        header = np.empty(DATA_START, np.uint8)
        self.read_into(header, 0)
        if header.tobytes() != layout.header():
            raise CacheCorrupt(f"{self.path}: its header is not that of the committed shard; {_REPAIR}")
        self.offsets: NDArray[np.int64] = np.empty(layout.samples + 1, "<i8")
        self.read_into(self.offsets, layout.offsets_start)

    def read(self, row: int, offset: int, hidden: torch.Tensor, sample_id: int, crc: int) -> Sample:
        """Read the sample of one row, its hidden states from byte `offset` into the buffer `hidden`."""
        identity = self.layout.manifest.identity
        token = (offset - DATA_START) // identity.bytes_per_token  # tokens of the shard before this sample
        length = hidden.numel() // identity.bytes_per_token
        where = f"{self.path}: row {row} (sample {sample_id})"
        if self.offsets[row] != token or self.offsets[row + 1] != token + length:
            raise CacheCorrupt(f"{where}: its offsets differ from the index; {_REPAIR}")
        data, input_ids, loss_mask = hidden.numpy(), np.empty(length, "<i4"), np.empty(length, np.uint8)
        self.read_into(data, offset)
        self.read_into(input_ids, self.layout.input_ids_start + 4 * token)
        self.read_into(loss_mask, self.layout.loss_mask_start + token)
        if sample_crc(data, input_ids, loss_mask) != crc:
            raise CacheCorrupt(f"{where}: its bytes have changed, they do not fit its checksum; {_REPAIR}")
        shape = (length, len(identity.taps), identity.hidden_size)
        states = hidden.view(TORCH_DTYPES[identity.dtype]).view(shape)
        return Sample(sample_id, input_ids.astype(np.int32, copy=False), loss_mask, states)

    def read_into(self, array: NDArray[Any], start: int) -> None:
        """Fill an array with the file's bytes from `start`."""
        view = array.data.cast("B")
        done = 0
        while done < len(view):  # one call may return less, and never more than 2 GiB
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise CacheCorrupt(
                    f"{self.path}: cannot be read at byte {start + done} ({error}); {_REPAIR}"
                ) from error
            if not count:
                raise CacheCorrupt(f"{self.path}: ends at byte {start + done}, it was cut short; {_REPAIR}")
            done += count
