"""Getting bytes of files into memory fast; what they mean is the reader's business.

Files are held open, but only so many. Neighbours are read by one call, several threads share the work, and
`preadv` fills the caller's memory directly. No mmap: a file that is truncated while mapped kills the process,
and mapping is slow on network file systems.
"""

from __future__ import annotations

import math
import os
import stat
import threading
import time
import weakref
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import crc32c

from dflash.cache.manifest import REPAIR
from dflash.errors import CacheCorrupt, CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


MAX_OPEN_FILES = 64
CHUNK_BYTES = 256 << 10
"""Neighbours are joined up to this size, and longer extents are read in such pieces: a piece is still in the
processor's cache when its checksum is computed."""
PORTION_BYTES = 4 << 20
"""What a thread takes at a time: little, so that all end together."""
SMALL_BYTES = 256 << 10
"""Extents that are smaller on average are first read by one thread alone."""
ALONE_S = 0.02
READ_THREADS = 4
"""Threads that share one read, at most; fewer where there are fewer processors."""
_MAX_PARTS = 512
"""Below the 1,024 that one `preadv` may fill."""
T = TypeVar("T")
Portion: TypeAlias = "list[tuple[int, int]]"
"""Extents of one file in runs that one call can read: numbers of the first, and of the first behind."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """Extents on their way from files into memory; every list has one entry an extent."""

    memory: memoryview
    starts: list[int]
    """First bytes in their files."""
    begins: list[int]
    """First bytes in `memory`."""
    ends: list[int]
    """Bytes behind them in `memory`."""


class OpenFile:
    """A regular file of a known size, open for reading; closed with the object.

    A thread that still reads an evicted file keeps it alive.

    Raises:
        CacheCorrupt: the file is missing, no regular file, or of another size.
        CacheError: it cannot be opened.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        try:
            # Non-blocking, so that a named pipe in its place is refused instead of waited for.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheCorrupt(f"{path} is missing though its samples were committed; {REPAIR}") from error
        except OSError as error:
            raise CacheError(f"cannot open {path}: {error}") from error
        weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise CacheCorrupt(f"{path}: {found.st_size} bytes, committed with {size}; {REPAIR}")

    def fill(self, parts: Sequence[memoryview], start: int) -> None:
        """Fill the parts, one after another, with the file's bytes from `start`.

        Raises:
            CacheCorrupt: the file ends before, or cannot be read.
        """
        while parts:  # one call may return less, and never more than 2 GiB
            try:
                count = os.preadv(self._descriptor, parts[:_MAX_PARTS], start)
            except OSError as error:
                raise CacheCorrupt(
                    f"{self.path}: cannot be read at byte {start} ({error}); {REPAIR}"
                ) from error
            start += count
            if not count and any(map(len, parts)):
                raise CacheCorrupt(f"{self.path}: ends at byte {start}, it was cut short; {REPAIR}")
            parts = _behind(parts, count)

    def load(self, extents: Transfer, portion: Portion, *, checked: bool) -> list[int]:
        """Fill the memory of a portion's extents, each run by one call.

        Args:
            extents: Where they are and where they go.
            portion: Which of them.
            checked: Whether checksums are wanted.

        Returns:
            The crc32c of each, computed while its bytes are at hand; 0 if not `checked`.

        Raises:
            CacheCorrupt: as `fill`.
        """
        memory, starts, begins, ends = extents.memory, extents.starts, extents.begins, extents.ends
        crcs: list[int] = []
        for low, high in portion:
            part = memory[begins[low] : ends[low]]
            if high - low > 1:
                parts = [memory[begins[number] : ends[number]] for number in range(low, high)]
                self.fill(parts, starts[low])
                crcs += map(crc32c.crc32c, parts) if checked else [0] * len(parts)
            elif checked and len(part) > CHUNK_BYTES:
                crcs.append(self._load_in_pieces(part, starts[low]))
            else:
                self._fill_one(part, starts[low])
                crcs.append(crc32c.crc32c(part) if checked else 0)
        return crcs

    def _load_in_pieces(self, part: memoryview, start: int) -> int:
        crc = 0
        for at in range(0, len(part), CHUNK_BYTES):
            piece = part[at : at + CHUNK_BYTES]
            self._fill_one(piece, start + at)
            crc = crc32c.crc32c(piece, crc)
        return crc

    def _fill_one(self, part: memoryview, start: int) -> None:
        """`fill` of one part, which one call nearly always does: the samples of a batch are many."""
        try:
            if os.preadv(self._descriptor, (part,), start) == len(part):
                return
        except OSError:
            pass
        self.fill((part,), start)  # goes on, or says what is wrong

    def bytes_at(self, start: int, count: int) -> bytearray:
        """These bytes of the file."""
        data = bytearray(count)
        self.fill([memoryview(data)], start)
        return data


def _behind(parts: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of the parts when their first `count` bytes are filled."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []


class OpenFiles(Generic[T]):
    """The most recently used files, at most `limit` and of at most `weight_limit` together.

    Args:
        load: Opens file number n.
        weigh: Bytes of memory that an open file holds.
        limit: Files at most; one at least is always held.
        weight_limit: Bytes at most.
    """

    def __init__(
        self, load: Callable[[int], T], weigh: Callable[[T], int], limit: int, weight_limit: int
    ) -> None:
        self._load, self._weigh, self._limit, self._weight_limit = load, weigh, max(1, limit), weight_limit
        self._held: OrderedDict[int, T] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> T:
        """File number `number`, opened if it is not."""
        with self._lock:
            held = self._held.get(number)
            if held is not None:
                self._held.move_to_end(number)
                return held
            while len(self._held) >= self._limit:
                self._evict()
            opened = self._load(number)
            self._held[number] = opened
            self._weight += self._weigh(opened)
            while self._weight > self._weight_limit and len(self._held) > 1:
                self._evict()
            return opened

    def forget(self, number: int) -> None:
        """Let go of one file: the next `get` opens it anew."""
        with self._lock:
            held = self._held.pop(number, None)
            if held is not None:
                self._weight -= self._weigh(held)

    def drop(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._held.clear()
            self._weight = 0

    def _evict(self) -> None:
        _, oldest = self._held.popitem(last=False)
        self._weight -= self._weigh(oldest)


class Workers:
    """A few threads that share the items of one call; the calling thread is one of them.

    The pool is made at the first use, and again in a process that was forked from one that had it.
    """

    def __init__(self, threads: int = READ_THREADS) -> None:
        self._extra = min(threads, os.cpu_count() or 1) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._owner = 0

    def run(self, work: Callable[[T], None], items: Iterable[T], alone_s: float = 0.0) -> None:
        """Call `work` on each item. When this returns or raises, no thread works on them any more.

        Args:
            work: What is to be done.
            items: What it is done to.
            alone_s: Seconds for which the calling thread works alone: small reads that the page cache answers
                are done before, and threads that pass the interpreter's lock around would only slow them.

        Raises:
            BaseException: the first that `work` raised; items not begun by then are left out.
        """
        todo = deque(items)
        if alone_s and (error := _drain(work, todo, time.monotonic() + alone_s)) is not None:
            raise error
        helpers = [self._started().submit(_drain, work, todo) for _ in range(min(self._extra, len(todo) - 1))]
        # One that has not started by now finds nothing to do: not waited for on a busy machine.
        errors = [_drain(work, todo), *(helper.result() for helper in helpers if not helper.cancel())]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Let the threads go; the next `run` makes new ones."""
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == os.getpid():
            pool.shutdown(wait=False)

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None or self._owner != os.getpid():
            self._pool, self._owner = ThreadPoolExecutor(self._extra, "read"), os.getpid()
        return self._pool


def _drain(work: Callable[[T], None], todo: deque[T], until: float = math.inf) -> BaseException | None:
    """Work on items until none is left, the time is over, or one fails; then nobody takes another."""
    while time.monotonic() < until:
        try:
            item = todo.popleft()
        except IndexError:
            return None
        try:
            work(item)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller of `run`
            todo.clear()
            return error
    return None


def portions(files: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> list[Portion]:
    """Split extents into portions of about `PORTION_BYTES` of one file, and these into runs.

    Extents join to a run where they follow each other inside one piece of `CHUNK_BYTES` of the file, so that
    no run of several is longer than that; an extent across a piece's edge is a run of its own.

    Args:
        files: Number of the file in which each extent lies; extents are sorted by file, then start.
        starts: Their first bytes in it.
        sizes: Their bytes.
    """
    found: list[Portion] = []
    file = end = piece = -1
    filled = 0
    for number, (this, start, size) in enumerate(zip(files, starts, sizes, strict=True)):
        if this != file or filled >= PORTION_BYTES:
            portion: Portion = []
            found.append(portion)
            file, filled, end = this, 0, -1
        if start == end and (start + size - 1) // CHUNK_BYTES == piece:
            portion[-1] = (portion[-1][0], number + 1)
        else:
            portion.append((number, number + 1))
            piece = start // CHUNK_BYTES
        end = start + size
        filled += size
    return found
