"""Learning within half a minute that another process of a run is gone or stopped, also while this one waits.

A process that is killed says nothing, and NCCL waits for it until a time-out of minutes. So every rank holds
a TCP connection to the first one. The kernel closes it with the process, whatever the process was doing, and
keep-alive probes notice within half a minute that a machine is gone. A process that is stopped (SIGSTOP, a
frozen machine) keeps its connection, but the thread here no longer says every few seconds what the rank is
at. The first rank passes the news on. A rank that learns it ends, by itself if it can within seconds, else
from the thread that watches.

A main thread that is stuck while its process lives is not told from one that is slow: compiling or writing
may take long. Collectives give up after `dflash.dist.TIMEOUT`; whom they waited for is said at half of it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash.board import within
from dflash.dist import TIMEOUT
from dflash.errors import EXIT_RANK_FAILED, RankFailed
from dflash.progress import warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dflash.board import Board

GRACE_S = 3.0
"""How long a rank may take to end by itself once another one is gone."""
SILENCE_S = 25.0
"""How long nothing may be heard from a rank; it speaks ten times as often."""
_SAVING_S = 20.0
"""How much longer it may take where it is writing what must be whole."""
_LATE_S = TIMEOUT.total_seconds() / 2
"""How long one rank may be at something behind which another one waits, before that is said."""
_POLL_S = 0.2
_NEWS_S = 1.5
"""How long a rank whose collective failed waits for the news why."""


@dataclass
class Member:
    """What is known of a rank."""

    rank: int
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=lambda: f"{socket.gethostname()} {os.getppid()}")
    """Host and launcher: processes of one can be sent signals by their `pid`."""
    doing: str = "the start"
    """What its main thread is at."""
    moves: int = 0
    """How often that has changed; all ranks go through the same."""
    moved: float = field(default_factory=time.monotonic)
    """When it last changed, as this process learnt it."""
    heard: float = math.inf
    """When it last said anything; infinite before it first did, since the first rank awaits the slowest."""
    rest: bytes = b""
    """Of a message whose end has not come yet."""

    def at(self, doing: str, moves: int) -> None:
        """It is alive, and has come to this."""
        self.heard = time.monotonic()
        if moves != self.moves:
            self.doing, self.moves, self.moved = doing, moves, self.heard

    def wake(self, here: Member) -> None:
        """Let it go on if it is stopped, and on the machine of `here`."""
        if self.machine == here.machine:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)


class Lifeline:
    """What a rank knows of the others, and the thread that watches them.

    Args:
        board: That of the run.
        silence_s: How long nothing may be heard from a rank.
    """

    def __init__(self, board: Board, silence_s: float = SILENCE_S) -> None:
        self.board, self._left, self._known = board, threading.Event(), threading.Event()
        self.me, self._silence_s = Member(board.world.rank), silence_s
        self._failed: str | None = None
        self.lost: str | None = None
        """Why the run cannot go on, once it is known."""
        self.writing = threading.Lock()
        """Held while something is written that the end should not cut off."""

    def at(self, doing: str) -> None:
        """Say what the main thread begins, such as `step 41`; the others name it if this rank stops."""
        self.me.at(doing, self.me.moves + 1)

    def watch(self, peers: dict[socket.socket, Member]) -> None:
        """Wait for the end or the silence of any connection; the values are the ranks behind them."""
        threading.Thread(target=self._watch_board, name="board", daemon=True).start()
        waiting, beat, said, warned = dict(peers), 0.0, -1, False
        while not self._left.is_set():
            failed = self._failed  # before the links, which say more of a rank that took the store with it
            if (now := time.monotonic()) >= beat or said != self.me.moves:
                beat, said = now + self._silence_s / 10, self.me.moves
                self.say(peers, "at", self.me.doing)
            news = self._heard(waiting) or self._silent(waiting) or failed
            if news is not None:
                self._end(news, peers)
                return
            # the first rank hears of all
            if self.board.world.is_main and not warned and (late := self.late(peers)) is not None:
                warned = True
                warn(late)

    def late(self, peers: dict[socket.socket, Member]) -> str | None:
        """Which of the ranks known here has not followed where another one has long been."""
        members = sorted([self.me, *peers.values()], key=lambda member: member.moves)
        behind, ahead, now = members[0], members[-1], time.monotonic()
        if now - ahead.moved < _LATE_S or behind.moves == ahead.moves:
            return None
        return (
            f"rank {behind.rank} is alive but has been at {behind.doing} for {now - behind.moved:.0f} s, "
            f"while rank {ahead.rank} waits at {ahead.doing}"
        )

    def verdict(self) -> str | None:
        """Why another rank's failure ends this one; None if no news of one comes."""
        self._known.wait(2 * _NEWS_S)
        return self.lost

    def say(self, peers: dict[socket.socket, Member], kind: str, text: str) -> None:
        """Send all of them a line: `at` with what this rank is at, `bye`, or `end` with why the run ends."""
        message = json.dumps([kind, text, self.me.moves]).encode() + b"\n"
        for link in peers:
            with suppress(OSError):
                link.sendall(message)

    def leave(self) -> None:
        """The main thread ends by itself."""
        self._left.set()

    def _watch_board(self) -> None:
        """Beside the links: the store does not answer while the process that holds it is stopped."""
        while self._failed is None and not self._left.wait(_POLL_S):
            self._failed = self._failure()

    def _failure(self) -> str | None:
        try:
            self.board.check()
        except RankFailed as error:
            return str(error)
        return None

    def _heard(self, waiting: dict[socket.socket, Member]) -> str | None:
        """Take in what the others say, for a moment; gives news that end the run."""
        ready, _, _ = select.select(list(waiting), [], [], _POLL_S)
        for link in ready:
            member = waiting[link]
            if not (data := _received(link)):
                return f"rank {member.rank} is gone"
            *messages, member.rest = (member.rest + data).split(b"\n")
            for kind, text, moves in map(json.loads, messages):
                if kind == "end":
                    return str(text)
                if kind == "bye":
                    waiting.pop(link, None)
                member.at(text, moves)
        return None

    def _silent(self, waiting: dict[socket.socket, Member]) -> str | None:
        for member in waiting.values():
            if time.monotonic() - member.heard > self._silence_s:
                return (
                    f"rank {member.rank} is stopped or its machine is frozen: nothing was heard from it for "
                    f"{self._silence_s:g} s; it was at {member.doing}"
                )
        return None

    def _post(self, news: str) -> str:
        """Tell the ranks that wait at the board; what the rank itself said is better than that it is gone."""
        try:
            self.board.check()
            self.board.fail(news)
            if self.board.world.is_main:
                self.board.count_out()  # in the place of the one that cannot
        except RankFailed as error:
            # the board may have gone with the rank that holds it; then the connection's news says more
            return str(error) if " has failed" in str(error) else news
        return news

    def _end(self, news: str, peers: dict[socket.socket, Member]) -> None:
        self.lost = news = within(_NEWS_S, lambda: self._post(news), news)
        self._known.set()
        self.say(peers, "end", news)
        if not self._left.wait(GRACE_S):
            self.writing.acquire(timeout=_SAVING_S)
        for member in peers.values():
            member.wake(self.me)  # one that is stopped would keep its launcher waiting
        if not self._left.is_set():
            sys.stderr.write(f"Error: {news}; this rank ends too\n")
            sys.stderr.flush()
            within(_NEWS_S, self.board.count_out, None)
            os._exit(EXIT_RANK_FAILED)


@contextmanager
def lifeline(board: Board, silence_s: float = SILENCE_S) -> Iterator[Lifeline]:
    """Watch the other ranks for the length of the block.

    Args:
        board: That of the run.
        silence_s: How long nothing may be heard from a rank.

    An error of torch's collectives within the block is reported as the failure of the other rank behind it.

    Raises:
        RankFailed: another rank has failed, or is gone.
    """
    line, world = Lifeline(board, silence_s), board.world
    if world.size == 1:
        yield line
        return
    peers = _accepted(line) if world.is_main else _connected(line)
    thread = threading.Thread(target=line.watch, args=(peers,), name="lifeline", daemon=True)
    thread.start()
    try:
        yield line
    except RuntimeError as error:
        if (late := line.late(peers)) is not None:
            board.fail(late)
        if (news := late or line.verdict()) is not None:
            raise RankFailed(f"{news}; this rank ends too") from error
        board.tell(error)
        raise
    except BaseException as error:
        board.tell(error)  # before the connections end, which say less
        raise
    else:
        line.say(peers, "bye", line.me.doing)
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


def _accepted(line: Lifeline) -> dict[socket.socket, Member]:
    """Connections of all other ranks, on the first one."""
    peers: dict[socket.socket, Member] = {}
    board, token = line.board, secrets.token_hex(16)
    with socket.create_server(("", 0), backlog=board.world.size) as server:
        server.settimeout(_POLL_S)
        board.shared("lifeline", lambda: [server.getsockname()[1], token, line.me.pid, line.me.machine])
        while len(peers) < board.world.size - 1:
            board.check()
            with suppress(TimeoutError):
                link, _ = server.accept()
                member = _introduced(link, token)
                if member is None:
                    link.close()  # a stranger
                else:
                    peers[_kept_alive(link)] = member
    return peers


def _introduced(link: socket.socket, token: str) -> Member | None:
    link.settimeout(5)
    with suppress(OSError, ValueError):
        given, rank, pid, machine = json.loads(link.recv(1024).partition(b"\n")[0])
        if secrets.compare_digest(str(given).encode(), token.encode()):
            return Member(int(rank), int(pid), str(machine))
    return None


def _connected(line: Lifeline) -> dict[socket.socket, Member]:
    """The connection to the first rank, on any other."""
    port, token, pid, machine = line.board.shared("lifeline", lambda: None)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        link = socket.create_connection((host, port), timeout=10)
        link.sendall(json.dumps([token, line.me.rank, line.me.pid, line.me.machine]).encode() + b"\n")
    except OSError as error:
        raise RankFailed(f"rank 0 cannot be reached at {host}:{port} ({error})") from error
    return {_kept_alive(link): Member(0, pid, machine)}


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setblocking(True)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux; elsewhere the system's own times hold
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link
