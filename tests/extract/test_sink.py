"""The writing thread keeps order, hands its errors over, and never makes the producer wait for ever."""

from __future__ import annotations

import threading

import pytest

from dflash.errors import CacheError
from dflash.extract.sink import Sink


class FakeWriter:
    """Records what it is asked; fails or waits on request."""

    def __init__(self, fail_at=None, gate=None):
        self.calls, self.fail_at, self.gate = [], fail_at, gate

    def write(self, sample):
        if self.gate is not None:
            self.gate.wait(10)
        if sample == self.fail_at:
            raise CacheError("disk full")
        self.calls.append(sample)

    def flush(self):
        self.calls.append("commit")


def test_everything_is_written_in_order_before_the_block_ends():
    writer = FakeWriter()
    with Sink(writer) as sink:
        for number in range(20):
            sink.write([2 * number, 2 * number + 1])
            sink.commit()
        sink.write([])
    expected = [item for number in range(20) for item in (2 * number, 2 * number + 1, "commit")]
    assert writer.calls == expected


def test_an_error_of_the_thread_is_raised_where_samples_are_written():
    def produce():
        with Sink(FakeWriter(fail_at=3)) as sink:
            for number in range(10_000):
                sink.write([number])

    with pytest.raises(CacheError, match="disk full"):
        produce()


def test_an_error_at_the_very_end_is_raised_too():
    with pytest.raises(CacheError, match="disk full"), Sink(FakeWriter(fail_at=0)) as sink:
        sink.write([0])


def test_an_error_of_the_producer_drops_what_waits():
    """Nothing that follows an error is written, and the thread is gone."""
    gate = threading.Event()
    writer = FakeWriter(gate=gate)

    def produce():
        with Sink(writer) as sink:
            for number in range(3):
                sink.write([number])
            threading.Timer(0.05, gate.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce()
    assert len(writer.calls) <= 1
    assert not [thread for thread in threading.enumerate() if thread.name == "dflash-sink"]


def test_a_slow_disk_bounds_what_waits():
    gate = threading.Event()
    with Sink(FakeWriter(gate=gate)) as sink:
        threading.Timer(0.2, gate.set).start()
        for number in range(8):
            sink.write([number])
        assert gate.is_set()
    assert sink.waited_s > 0.1
