"""Learning at once that another process of a run is gone, also while this one waits in a collective.

A process that is killed says nothing, and NCCL waits for it until a time-out of minutes. So every rank holds
a TCP connection to the first one. The kernel closes it with the process, whatever the process was doing, and
keep-alive probes notice within half a minute that a machine is gone. The first rank passes the news on. A
rank that learns it ends, by itself if it can within seconds, else from the thread that watches.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dflash.errors import EXIT_RANK_FAILED, RankFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dflash.board import Board

GRACE_S = 3.0
"""How long a rank may take to end by itself once another one is gone."""
_SAVING_S = 20.0
"""How much longer it may take where it is writing what must be whole."""
_POLL_S = 0.2
_NEWS_S = 1.5
"""How long a rank whose collective failed waits for the news why."""
_BYE = b"bye\n"


class Lifeline:
    """What a rank knows of the others, and the thread that watches them."""

    def __init__(self, board: Board) -> None:
        self.board, self._left, self._known = board, threading.Event(), threading.Event()
        self.lost: str | None = None
        """Why the run cannot go on, once it is known."""
        self.writing = threading.Lock()
        """Held while something is written that the end should not cut off."""

    def watch(self, peers: dict[socket.socket, int]) -> None:
        """Wait for the end of any connection; the values are the ranks behind them."""
        waiting = dict(peers)
        while not self._left.is_set():
            ready, _, _ = select.select(list(waiting), [], [], _POLL_S)
            for link in ready:
                message = _received(link)
                if message == _BYE:
                    del waiting[link]
                    continue
                self._end(message.decode(errors="replace") or f"rank {waiting[link]} is gone", peers)
                return
            if self._failed_elsewhere():
                self._end("", peers)
                return

    def verdict(self) -> str | None:
        """Why another rank's failure ends this one; None if no news of one comes."""
        self._known.wait(_NEWS_S)
        return self.lost

    def leave(self) -> None:
        """The main thread ends by itself."""
        self._left.set()

    def _failed_elsewhere(self) -> bool:
        try:
            self.board.check()
        except RankFailed:
            return True
        return False

    def _end(self, news: str, peers: dict[socket.socket, int]) -> None:
        try:
            self.board.check()  # what the rank itself said is better than that it is gone
            self.board.fail(news)  # for ranks that wait at the board
            if self.board.world.is_main:
                self.board.count_out()  # in the place of the one that cannot
        except RankFailed as error:
            # the board may have gone with the rank that holds it; then the connection's news says more
            news = str(error) if " has failed" in str(error) or not news else news
        self.lost = news
        self._known.set()
        for link in peers:
            with suppress(OSError):
                link.sendall(news.encode())
        if self._left.wait(GRACE_S):
            return
        self.writing.acquire(timeout=_SAVING_S)
        if not self._left.is_set():
            sys.stderr.write(f"Error: {news}; this rank ends too\n")
            sys.stderr.flush()
            with suppress(RankFailed):
                self.board.count_out()
            os._exit(EXIT_RANK_FAILED)


@contextmanager
def lifeline(board: Board) -> Iterator[Lifeline]:
    """Watch the other ranks for the length of the block.

    An error of torch's collectives within the block is reported as the failure of the other rank behind it.

    Raises:
        RankFailed: another rank has failed, or is gone.
    """
    line, world = Lifeline(board), board.world
    if world.size == 1:
        yield line
        return
    peers = _accepted(board) if world.is_main else _connected(board)
    thread = threading.Thread(target=line.watch, args=(peers,), name="lifeline", daemon=True)
    thread.start()
    try:
        yield line
    except RuntimeError as error:
        if (news := line.verdict()) is not None:
            raise RankFailed(f"{news}; this rank ends too") from error
        board.tell(error)
        raise
    except BaseException as error:
        board.tell(error)  # before the connections end, which say less
        raise
    else:
        for link in peers:
            with suppress(OSError):
                link.sendall(_BYE)
    finally:
        line.leave()
        thread.join()
        for link in peers:
            link.close()


def _received(link: socket.socket) -> bytes:
    try:
        return link.recv(4096)
    except OSError:
        return b""


def _accepted(board: Board) -> dict[socket.socket, int]:
    """Connections of all other ranks, on the first one."""
    peers: dict[socket.socket, int] = {}
    token = secrets.token_hex(16)
    with socket.create_server(("", 0), backlog=board.world.size) as server:
        server.settimeout(_POLL_S)
        board.shared("lifeline", lambda: [server.getsockname()[1], token])
        while len(peers) < board.world.size - 1:
            board.check()
            with suppress(TimeoutError):
                link, _ = server.accept()
                rank = _introduced(link, token)
                if rank is None:
                    link.close()  # a stranger
                else:
                    peers[_kept_alive(link)] = rank
    return peers


def _introduced(link: socket.socket, token: str) -> int | None:
    link.settimeout(5)
    with suppress(OSError, ValueError):
        name, _, rank = link.recv(256).decode(errors="replace").strip().partition(" ")
        if secrets.compare_digest(name.encode(), token.encode()):
            return int(rank)
    return None


def _connected(board: Board) -> dict[socket.socket, int]:
    """The connection to the first rank, on any other."""
    port, token = board.shared("lifeline", lambda: None)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        link = socket.create_connection((host, port), timeout=10)
        link.sendall(f"{token} {board.world.rank}\n".encode())
    except OSError as error:
        raise RankFailed(f"rank 0 cannot be reached at {host}:{port} ({error})") from error
    return {_kept_alive(link): 0}


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setblocking(True)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux; elsewhere the system's own times hold
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link
