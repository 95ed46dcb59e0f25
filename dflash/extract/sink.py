"""Samples on their way to disk: checksums, writes and flushes in a thread, while the target goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from typing_extensions import Self

from dflash.cache.writer import CacheWriter, Sample

_WAITING_BATCHES = 3
"""Bounds the host memory when the disk is slower than the target."""
_POLL_S = 0.1


class Sink:
    """Feeds one writer from a thread, in order. Leaving it by an exception drops what is still waiting.

    Args:
        writer: Used by the thread alone until the block is left.
    """

    def __init__(self, writer: CacheWriter) -> None:
        self._writer = writer
        self._queue: queue.Queue[Sequence[Sample] | None] = queue.Queue(_WAITING_BATCHES)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dflash-sink", daemon=True)
        self.waited_s = 0.0
        """Seconds for which the producer waited for the disk."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._put([])  # an empty batch ends the thread
        else:
            self._stop.set()
        self._thread.join()
        if kind is None:
            self._raise()

    def write(self, samples: Sequence[Sample]) -> None:
        """Queue a batch; waits while the disk is behind.

        Raises:
            CacheError: an earlier batch could not be written.
        """
        if samples:
            self._put(samples)

    def commit(self) -> None:
        """Queue a commit of everything before it."""
        self._put(None)

    def _put(self, item: Sequence[Sample] | None) -> None:
        started = time.perf_counter()
        while True:
            self._raise()
            try:
                self._queue.put(
                    item, timeout=_POLL_S
                )  # never for ever: the thread may have ended by an error
            except queue.Full:
                continue
            break
        self.waited_s += time.perf_counter() - started

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    item = self._queue.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                if item is None:
                    self._writer.flush()
                    continue
                if not item:
                    return
                for sample in item:
                    self._writer.write(sample)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that feeds this one
            self._error = error
