"""The window of steps that are ready: a gate at the start, bounds that hold, and an end that is seen."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import ConfigError
from dflash.train.ready import ReadyLimits, ReadyWindow, ready_limits
from dflash.train.sampler import SamplerConfig
from dflash.world import World


def fill(window: ReadyWindow, sizes: list[int], error: BaseException | None = None) -> threading.Thread:
    def work() -> None:
        for number, size in enumerate(sizes):
            if not window.reserve(size):
                return
            window.put(number)
        window.finish(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=30), st.integers(1, 5), st.integers(0, 4), st.integers(10, 40))
def test_everything_comes_out_in_order_and_no_bound_is_ever_exceeded(sizes, steps, gate, limit):
    window = ReadyWindow(ReadyLimits(min(gate, steps), steps, limit))
    thread = fill(window, sizes)
    drawn = []
    while (item := window.draw().item) is not None:
        drawn.append(item)
    thread.join()
    assert drawn == list(range(len(sizes)))
    assert window.most_steps <= steps
    assert window.most_bytes <= limit


def test_the_first_draw_waits_for_the_gate_and_later_ones_for_their_step_alone():
    window = ReadyWindow(ReadyLimits(gate=3, steps=5, limit_bytes=100, patience=60))
    drawn = []
    drawing = threading.Thread(target=lambda: drawn.extend(window.draw() for _ in range(4)))
    drawing.start()
    for number in range(2):
        window.reserve(1)
        window.put(number)
    time.sleep(0.05)
    assert drawn == []
    window.reserve(1)
    window.put(2)
    until(lambda: len(drawn) == 3)
    window.reserve(1)
    window.put(3)
    drawing.join()
    assert [one.item for one in drawn] == [0, 1, 2, 3]
    assert drawn[0].ready == 0
    assert drawn[0].waited >= 0.04


def test_the_gate_does_not_keep_a_step_back_for_longer_than_its_patience():
    window = ReadyWindow(ReadyLimits(gate=3, steps=5, limit_bytes=100, patience=0.05))
    window.reserve(1)
    window.put(0)
    first = window.draw()
    assert first.item == 0
    assert first.waited >= 0.04
    window.reserve(1)
    window.put(1)
    assert window.draw().ready == 1  # once open, it stays open


@pytest.mark.parametrize("sizes", [[40, 40, 40], [1]])
def test_the_gate_opens_when_bytes_or_source_allow_no_more(sizes):
    """Three steps are wanted, but two fill the bytes, or there is only one."""
    window = ReadyWindow(ReadyLimits(gate=3, steps=5, limit_bytes=90))
    thread = fill(window, sizes)
    assert window.draw().item == 0
    while window.draw().item is not None:
        pass
    thread.join()


def test_an_error_comes_behind_what_was_ready():
    window = ReadyWindow(ReadyLimits(1, 5, 100))
    fill(window, [1, 1], ValueError("broken")).join()
    assert [window.draw().item for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        window.draw()


def test_a_closed_window_lets_the_loading_thread_go():
    window = ReadyWindow(ReadyLimits(1, 1, 100))
    thread = fill(window, [1] * 5)
    until(lambda: window.most_steps == 1)
    window.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("ranks", "window_bytes", "expected"),
    [
        (8, None, ReadyLimits(4, 11, 2 * 16384 * 40960)),
        (1, None, ReadyLimits(4, 11, 16 * 16384 * 40960)),
        (8, 700_000_000, ReadyLimits(4, 11, 700_000_000)),
    ],
)
def test_ready_micro_batches_count_over_all_ranks_and_bytes_on_each(ranks, window_bytes, expected):
    """30 and 90 micro-batches are 4 and 11 steps of 8."""
    assert ready_limits(SamplerConfig(), World(0, ranks), 40960, window_bytes) == expected


def test_small_caches_get_a_gibibyte_and_a_shallow_window_one_step():
    config = SamplerConfig(tokens_per_batch=64, min_ready=1, max_ready=4)
    assert ready_limits(config, World(), 100, None) == ReadyLimits(1, 1, 1 << 30)


def test_a_window_that_cannot_hold_one_micro_batch_is_refused_with_the_bytes_it_needs():
    with pytest.raises(ConfigError) as caught:
        ready_limits(SamplerConfig(), World(0, 4), 40960, 1 << 20)
    text = str(caught.value)
    assert "--window-bytes 1,048,576 cannot hold one micro-batch of 16,384 tokens at 40,960 bytes" in text
    assert "for each of the 2 that a rank runs in a step; use 1,342,177,280, or" in text
    assert "\n" not in text
