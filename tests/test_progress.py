"""Progress shows what is done, how fast, and how long it will take, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from dflash import progress
from dflash.progress import Progress, format_seconds


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (75.2, "1:15"),
        (3599.9, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
        (float("inf"), "-:--"),
    ],
)
def test_seconds_are_written_as_a_clock_shows_them(seconds, text):
    assert format_seconds(seconds) == text


def test_the_line_holds_share_count_rate_and_time_left(clock):
    with Progress("extract", 4000, enabled=False) as bar:
        clock.now += 10
        bar.advance(1000, "loss 3.1")
        assert bar.text() == "extract  25% | 1,000/4,000 tokens | 100 tokens/s | 0:30 left | loss 3.1"
        clock.now += 30
        bar.advance(3000)
        assert bar.text() == "extract 100% | 4,000/4,000 tokens | 100 tokens/s | 0:40 | loss 3.1"


def test_what_an_earlier_run_has_done_does_not_count_towards_the_rate(clock):
    with Progress("train", 1000, "steps", done=900, enabled=False) as bar:
        assert bar.text() == "train  90% | 900/1,000 steps | 0 steps/s | -:-- left"
        clock.now += 5
        bar.advance(50)
        assert bar.rate == 10
        assert bar.text() == "train  95% | 950/1,000 steps | 10 steps/s | 0:05 left"


def test_no_work_at_all_is_done_at_once(clock):
    assert Progress("extract", 0, enabled=False).text().startswith("extract 100% | 0/0 tokens")


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(clock, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("train", 100) as bar:
        for _ in range(40):
            clock.now += 1
            bar.advance(1)
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[1] for line in lines] == ["15/100 tokens", "30/100 tokens", "40/100 tokens"]


def test_a_terminal_gets_one_bar_that_is_redrawn(clock, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("train", 8) as bar:
        for _ in range(8):
            clock.now += 1
            bar.advance(1)
    drawn = stream.getvalue().split("\r\x1b[K")[1:]
    assert [text.count("█") for text in drawn] == [3, 6, 9, 12, 15, 18, 21, 24, 24]
    assert all(len(text.split(" ")[0]) == 24 for text in drawn)
    assert stream.getvalue().count("\n") == 1


def test_other_ranks_are_silent(clock, capsys):
    with Progress("train", 8, enabled=False) as bar:
        clock.now += 100
        bar.advance(8)
    assert capsys.readouterr() == ("", "")
