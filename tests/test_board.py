"""Ranks agree through the board, wait without a time-out, and learn that another one has failed."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore

from dflash import board as board_module
from dflash.board import Board
from dflash.errors import ConfigError, RankFailed
from dflash.world import World


def boards(size):
    """Boards of ranks that share a store, as threads here."""
    store = HashStore()
    made = []
    for rank in range(size):
        board = Board(World(rank, size, rank), "test")
        board._store = PrefixStore("shared", store)
        made.append(board)
    return made


def together(work, size=3):
    """What `work(board)` gives on each rank, or raises."""
    results = [None] * size

    def run(rank, board):
        try:
            results[rank] = work(board)
        except BaseException as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate(boards(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_a_counter_gives_each_number_once():
    taken = together(lambda board: [board.add("unit") for _ in range(50)])
    assert sorted(number for numbers in taken for number in numbers) == list(range(1, 151))


def test_what_ranks_post_is_collected_by_rank():
    def work(board):
        board.post("note", {"rank": board.world.rank})
        return board.collect("note")

    assert together(work) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_what_the_main_rank_makes_is_shared():
    assert together(lambda board: board.shared("made", lambda: [board.world.rank, "x"])) == [[0, "x"]] * 3


def test_what_is_handed_to_a_rank_reaches_it_alone_in_order_and_leaves_the_board():
    def work(board):
        rank, size = board.world.rank, board.world.size
        for number in range(3):
            board.hand(f"note{number}", (rank + 1) % size, [rank, number])
        calls = []
        taken = [board.taken(f"note{number}", lambda: calls.append(1)) for number in range(3)]
        board.meet("place")
        return taken, len(calls) > 0, board._has(f"note0/to/{rank}")

    expected = [([[rank, number] for number in range(3)], True, False) for rank in (2, 0, 1)]
    assert together(work) == expected


def test_nobody_passes_a_meeting_before_all_are_there():
    def work(board):
        time.sleep(0.05 * board.world.rank)
        calls = []
        came = time.monotonic()
        board.meet("place", lambda: calls.append(1))
        return came, time.monotonic(), len(calls)

    came, left, calls = zip(*together(work), strict=True)
    assert min(left) >= max(came)
    assert calls[0] > 1


def test_a_failure_reaches_ranks_that_wait_and_is_not_told_twice():
    def work(board):
        with board.telling_failure():
            if board.world.rank == 1:
                raise ConfigError("no such flag")
            board.meet("never")

    first, second, third = together(work)
    assert isinstance(second, ConfigError)
    for error in (first, third):
        assert isinstance(error, RankFailed)
        assert str(error) == "rank 1 has failed: no such flag"


@pytest.mark.parametrize("failing", [0, 1])
def test_the_rank_that_fails_ends_before_those_that_fail_with_it(failing, monkeypatch):
    """A launcher shows the first one that ends, and gives the others no time to say why."""
    monkeypatch.setattr(board_module, "_ECHO_S", 0.6)
    ended = {}

    def work(board):
        try:
            with board.telling_failure():
                if board.world.rank == failing:
                    raise ConfigError("no such flag")
                board.meet("never")
        finally:
            ended[board.world.rank] = time.monotonic()

    together(work)
    assert all(ended[rank] - ended[failing] > 0.5 for rank in range(3) if rank != failing)


def test_a_request_to_stop_reaches_all():
    def work(board):
        if board.world.rank == 2:
            board.ask_to_stop("SIGTERM")
        board.meet("place")
        return board.stop_asked()

    assert together(work) == ["SIGTERM"] * 3


def test_alone_everything_works_at_once():
    board = Board(World(), "test")
    with board.telling_failure():
        board.meet("place")
        assert board.add("n", 5) == 5
        board.post("note", 1)
        assert board.collect("note") == [1]
        assert board.shared("made", lambda: None) is None
        assert board.stop_asked() is None
        board.check()
    with pytest.raises(ZeroDivisionError), board.telling_failure():
        _ = 1 / 0


def test_two_boards_in_one_process_do_not_mix():
    one, other = Board(World(), "test"), Board(World(), "test")
    one.add("n")
    assert other.add("n") == 1
