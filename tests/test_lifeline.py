"""Who is named as silent, late or stuck, by what the ranks have said of themselves. Nothing waits here."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from dflash import dist
from dflash import lifeline as module
from dflash.board import Board
from dflash.errors import ConfigError, RankFailed, TargetError
from dflash.lifeline import Lifeline, Member, lifeline
from dflash.world import World

NOW = 1000.0
SILENCE_S = 25.0


@pytest.fixture
def clock(monkeypatch):
    """The time, in a list of one, as the module sees it."""
    now = [NOW]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@contextmanager
def first_rank(size: int = 3, advice: str = ""):
    """The lifeline of the first rank of so many, and the other ends of its connections."""
    line = Lifeline(Board(World(0, size), "test"), SILENCE_S, advice)
    pairs = [socket.socketpair() for _ in range(size - 1)]
    line.peers = {ours: Member(rank + 1) for rank, (ours, _) in enumerate(pairs)}
    try:
        yield line, [theirs for _, theirs in pairs]
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def members(line: Lifeline) -> list[Member]:
    return [line.me, *line.peers.values()]


def test_what_a_rank_says_is_what_it_is_named_with(clock):
    with first_rank(advice="start again") as (line, ends):
        ends[0].sendall(json.dumps(["at", "batch 7 of unit 2", 4]).encode() + b"\n")
        assert line._heard(line.peers) is None
        ends[0].close()
        assert line._heard(line.peers) == "rank 1 is gone; it was at batch 7 of unit 2; start again"


def test_a_message_may_come_in_pieces_and_several_at_once(clock):
    with first_rank(2) as (line, ends):
        data = b"".join(json.dumps(["at", f"step {n}", n]).encode() + b"\n" for n in range(1, 4))
        for piece in (data[:5], data[5:40], data[40:]):
            ends[0].sendall(piece)
            assert line._heard(line.peers) is None
        (member,) = line.peers.values()
        assert (member.doing, member.stage) == ("step 3", 3)


def test_silence_ends_the_run_and_words_do_not(clock):
    with first_rank() as (line, _):
        for member in line.peers.values():
            member.heard = NOW
        for _second in range(25):
            clock[0] += 1
            assert line._silent(line.peers) is None
        list(line.peers.values())[1].at("step 4", 4)
        clock[0] += 1
        assert "rank 1 is stopped or its machine is frozen: nothing was heard from it for 25 s" in str(
            line._silent(line.peers)
        )


def test_a_rank_that_was_stopped_itself_gives_those_around_it_time_to_speak(clock):
    """Ctrl-Z, a paused container, a machine that moves: all of them wake up at once."""
    with first_rank() as (line, _):
        for member in line.peers.values():
            member.heard = NOW
        clock[0] += 100
        assert line._silent(line.peers) is None
        for _second in range(25):
            clock[0] += 1
            assert line._silent(line.peers) is None
        clock[0] += 1
        assert line._silent(line.peers) is not None


def test_a_rank_that_never_speaks_is_not_waited_for_for_ever(clock):
    with first_rank(2) as (line, _):
        heard = [member.heard for member in line.peers.values()]
        assert NOW < heard[0] < float("inf")


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 200)), min_size=2, max_size=5), st.floats(1, 100))
def test_only_who_has_not_moved_while_another_waits_further_on_is_late(states, limit):
    """And whoever is late is found."""
    with first_rank(len(states)) as (line, _):
        now = time.monotonic()
        for member, (stage, ago) in zip(members(line), states, strict=True):
            member.stage, member.moved, member.doing = stage, now - ago, f"stage {stage}"
        late = line.late(limit)
        ahead = [ago for stage, ago in states if stage == max(stage for stage, _ in states)]
        waited = max(ahead) >= limit
        behind = [(rank, stage) for rank, (stage, ago) in enumerate(states) if ago >= limit]
        behind = [(rank, stage) for rank, stage in behind if stage < max(stage for stage, _ in states)]
    if late is None:
        near = any(abs(ago - limit) < 1e-2 for _, ago in states)
        assert near or not (waited and behind)
    else:
        rank, lowest = int(late.split()[1]), min(stage for _, stage in behind)
        assert (rank, lowest) in behind
        assert late.startswith(f"rank {rank} is alive but has been at stage {lowest} for ")


def test_a_rank_that_gets_on_is_not_late_however_long_others_wait(clock):
    with first_rank(2) as (line, _):
        (member,) = line.peers.values()
        line.at("loading")
        member.at("loading", 1)
        line.at("the end")
        for batch in range(100):
            clock[0] += 300
            member.at(f"batch {batch}", 1)
            line.check()
            assert line.late(301) is None


def test_waiting_ends_after_ten_minutes_for_a_rank_that_is_stuck_and_all_are_told(clock):
    with first_rank(2, advice="start again") as (line, _):
        (member,) = line.peers.values()
        member.at("batch 3", 1)
        line.at("batch 1")
        line.at("the end")
        clock[0] += 599
        line.check()
        clock[0] += 2
        expected = (
            "rank 1 is alive but has been at batch 3 for 601 s, while rank 0 waits at the end; start again"
        )
        with pytest.raises(RankFailed) as caught:
            line.check()
        assert str(caught.value) == expected
        with pytest.raises(RankFailed, match=expected):
            line.board.check()


def test_a_rank_whose_parts_all_take_long_is_waited_for_longer(clock):
    with first_rank(2) as (line, _):
        (member,) = line.peers.values()
        member.at("batch 1", 1)
        clock[0] += 500
        member.at("batch 2", 1)
        line.at("batch 1")
        line.at("the end")
        clock[0] += 1400
        line.check()
        clock[0] += 200
        with pytest.raises(RankFailed, match="rank 1 is alive but has been at batch 2 for 1600 s"):
            line.check()


@pytest.mark.parametrize(("part_s", "named_after_s"), [(0.5, 60), (30, 300)])
def test_a_part_that_takes_far_longer_than_all_before_is_named_while_the_others_work(
    clock, part_s, named_after_s
):
    with first_rank(2) as (line, _):
        (member,) = line.peers.values()
        for batch in range(4):
            member.at(f"batch {batch}", 1)
            clock[0] += part_s
        member.at("batch 4", 1)
        clock[0] += named_after_s - 1
        assert line._unusual() is None
        clock[0] += 2
        assert f"rank 1 is alive but has been at batch 4 for {named_after_s + 1} s" in str(line._unusual())
        member.at("batch 5", 1)
        assert line._unusual() is None


def test_to_say_the_same_again_is_no_new_stage(clock):
    with first_rank(2) as (line, _):
        line.at("the end")
        before = line.me.stage, line.me.moved
        clock[0] += 100
        line.at("the end")
        assert (line.me.stage, line.me.moved) == before


def test_the_first_parts_of_a_stage_may_differ_as_they_like(clock):
    with first_rank(2) as (line, _):
        line.at("reading the corpus")
        clock[0] += 1
        line.at("preparing the cache", part=True)
        clock[0] += 10_000
        assert line._unusual() is None


def caused(cause: BaseException) -> BaseException:
    error = TargetError("cannot go on")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("Connection closed by peer"), True),
        (caused(RuntimeError("Connection closed by peer")), True),
        (torch.OutOfMemoryError("full"), False),
        (caused(torch.OutOfMemoryError("full")), False),
        (caused(ValueError("no such plan")), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_may_follow_from_another_rank_are_told_from_those_that_cannot(error, echo):
    assert module._may_be_an_echo(error) == echo


def test_a_rank_that_joins_and_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", timedelta(0))
    board = Board(World(0, 3), "test")
    with pytest.raises(RankFailed, match="nothing was heard from rank 1, 2 since it joined"), lifeline(board):
        pass
    with pytest.raises(RankFailed, match="nothing was heard from rank 1, 2"):
        board.check()


def test_a_rank_that_meets_the_others_and_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(dist, "TIMEOUT", timedelta(0))
    with pytest.raises(RankFailed, match="nothing was heard from rank 1 since it met the others"):
        dist.fresh_store(PrefixStore("test", HashStore()), World(0, 2))


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_silence_that_is_no_time_is_refused(monkeypatch, value):
    monkeypatch.setenv("DFLASH_SILENCE_S", value)
    with (
        pytest.raises(ConfigError, match=f"DFLASH_SILENCE_S='{value}' is not a number of seconds above 0"),
        lifeline(Board(World(), "alone")),
    ):
        pass
