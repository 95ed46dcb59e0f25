"""Learning within half a minute that another process of a run is gone or stopped, also while this one waits.

A process that is killed says nothing, and NCCL waits for it until a time-out of minutes. So every rank holds
a TCP connection to the first one. The kernel closes it with the process, whatever the process was doing, and
keep-alive probes notice within half a minute that a machine is gone. A process that is stopped (SIGSTOP, a
frozen machine) keeps its connection, but the thread here no longer says every few seconds what the rank is
at. The first rank passes the news on. A rank that learns it ends, by itself if it can within seconds, else
from the thread that watches.

A main thread that is stuck while its process lives is not told from one that is slow: compiling or writing
may take long. So it is only warned about, by name and with what it is at, once others wait for it or once it
takes far longer than ever before. Collectives give up after `dflash.dist.TIMEOUT`; where ranks meet without
one, `Lifeline.check` does.
"""

from __future__ import annotations

import json
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
from dflash.errors import EXIT_RANK_FAILED, RankFailed, lacks_memory
from dflash.progress import warn
from dflash.store import seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dflash.board import Board

GRACE_S = 3.0
"""How long a rank may take to end by itself once another one is gone."""
SILENCE_S = 25.0
"""How long a rank may say nothing, unless `DFLASH_SILENCE_S` is set; it speaks ten times as often."""
_LATE, _STUCK = 2.4, 24.0
"""How many times as long a rank may be at something behind which others wait, before that is said; and before
it counts as stuck: a minute, and ten."""
_UNUSUAL, _USUAL = 10.0, 3
"""How many times as long as any before it a part takes when that is said; how many must be over by then."""
_SAVING_S = 20.0
"""How much longer it may take where it is writing what must be whole."""
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
    stage: int = 0
    """Number of the stage that this belongs to; all ranks go through the same ones."""
    moved: float = field(default_factory=time.monotonic)
    """When `doing` last changed, as this process learnt it."""
    parts: int = 0
    """How many parts of the present stage are over."""
    longest: float = 0.0
    """Seconds that the longest of them took."""
    heard: float = field(default_factory=lambda: time.monotonic() + TIMEOUT.total_seconds())
    """When it last said anything; in the future until it first does, since the first rank awaits all."""
    rest: bytes = b""
    """Of a message whose end has not come yet."""

    def at(self, doing: str, stage: int) -> None:
        """It is alive, and has come to this."""
        self.heard = now = time.monotonic()
        if (doing, stage) == (self.doing, self.stage):
            return
        if stage == self.stage:
            self.parts, self.longest = self.parts + 1, max(self.longest, now - self.moved)
        else:
            self.parts, self.longest = 0, 0.0
        self.doing, self.stage, self.moved = doing, stage, now

    def still(self) -> str:
        """What it has been at, and for how long."""
        seconds = time.monotonic() - self.moved
        return f"rank {self.rank} is alive but has been at {self.doing} for {seconds:.0f} s"

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
        advice: What to do when one is gone, such as `run the same command again`.
    """

    def __init__(self, board: Board, silence_s: float = SILENCE_S, advice: str = "") -> None:
        self.board, self._left, self._known = board, threading.Event(), threading.Event()
        self.me, self.silence_s = Member(board.world.rank), silence_s
        self.peers: dict[socket.socket, Member] = {}
        """The ranks behind this one's connections: all others on the first rank, that one on any other."""
        self._looked, self._advice = time.monotonic(), advice and f"; {advice}"
        self._failed: str | None = None
        self.lost: str | None = None
        """Why the run cannot go on, once it is known."""
        self.writing = threading.Lock()
        """Held while something is written that the end should not cut off."""

    def at(self, doing: str, *, part: bool = False) -> None:
        """Say what the main thread begins, such as `step 41`; the others name it if this rank stops.

        To say the same again changes nothing.

        Args:
            doing: As it reads behind `it was at`.
            part: It belongs to the stage before; ranks may go through different numbers of parts.
        """
        if doing != self.me.doing:
            self.me.at(doing, self.me.stage + (not part))

    def watch(self) -> None:
        """Wait for the end or the silence of any connection."""
        threading.Thread(target=self._watch_board, name="board", daemon=True).start()
        waiting, beat, said, warned = dict(self.peers), 0.0, "", False
        if self.board.world.is_main:  # all are here, and speak at once
            for member in waiting.values():
                member.heard = time.monotonic()
        while not self._left.is_set():
            failed = self._failed  # before the links, which say more of a rank that took the store with it
            if (now := time.monotonic()) >= beat or said != self.me.doing:
                beat, said = now + self.silence_s / 10, self.me.doing
                self.say("at", said)
            news = self._heard(waiting) or self._silent(waiting) or failed
            if news is not None:
                self._end(news)
                return
            if self.board.world.is_main:  # which hears of all
                late = self.late(_LATE * self.silence_s) or self._unusual()
                if late is not None and not warned:
                    warn(late)
                warned = late is not None

    def late(self, limit_s: float) -> str | None:
        """Which rank has been at something for so long, while another one known here is long past it."""
        members, now = [self.me, *self.peers.values()], time.monotonic()
        ahead = max(members, key=lambda member: (member.stage, -member.moved))
        behind = [one for one in members if one.stage < ahead.stage and now - one.moved >= limit_s]
        if not behind or now - ahead.moved < limit_s:
            return None
        last = min(behind, key=lambda member: (member.stage, member.moved))
        return f"{last.still()}, while rank {ahead.rank} waits at {ahead.doing}"

    def check(self) -> None:
        """Go on waiting only while no other rank is stuck. For places where all meet at last.

        A part that takes long because all parts of its stage do is waited for.

        Raises:
            RankFailed: one has long been at something that this one is past; all ranks are told.
        """
        longest = max((member.longest for member in self.peers.values()), default=0.0)
        if (late := self.late(max(_STUCK * self.silence_s, 3 * longest))) is not None:
            late += self._advice
            self.board.fail(late)
            raise RankFailed(late)

    def _unusual(self) -> str | None:
        """Which ranks take far longer for a part of a stage than ever before."""
        now = time.monotonic()
        found = [
            f"{one.still()}; so far such took {one.longest:.1f} s at most"
            for one in (self.me, *self.peers.values())
            if one.parts >= _USUAL and now - one.moved > max(_LATE * self.silence_s, _UNUSUAL * one.longest)
        ]
        return "; ".join(found) or None

    def verdict(self) -> str | None:
        """Why another rank's failure ends this one; None if no news of one comes."""
        self._known.wait(2 * _NEWS_S)
        return self.lost

    def explained(self, error: BaseException) -> str | None:
        """The failure of another rank that this error only follows from; None if it is this rank's own."""
        if not _may_be_an_echo(error):
            return None
        if (late := self.late(_STUCK / 2 * self.silence_s)) is not None:
            self.board.fail(late)
        return late or self.verdict()

    def say(self, kind: str, text: str) -> None:
        """Send the peers a line: `at` with what this rank is at, `bye`, or `end` with why the run ends."""
        message = json.dumps([kind, text, self.me.stage]).encode() + b"\n"
        for link in self.peers:
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
                return f"rank {member.rank} is gone; it was at {member.doing}{self._advice}"
            *messages, member.rest = (member.rest + data).split(b"\n")
            for kind, text, stage in map(json.loads, messages):
                if kind == "end":
                    return str(text)
                if kind == "bye":
                    waiting.pop(link, None)
                member.at(text, stage)
        return None

    def _silent(self, waiting: dict[socket.socket, Member]) -> str | None:
        deaf, self._looked = time.monotonic() - self._looked, time.monotonic()
        for member in waiting.values():
            if deaf > self.silence_s / 2:  # this process was stopped, and so may have been those around it
                member.heard = self._looked
            if self._looked - member.heard > self.silence_s:
                return (
                    f"rank {member.rank} is stopped or its machine is frozen: nothing was heard from it for "
                    f"{self.silence_s:g} s; it was at {member.doing}{self._advice}"
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

    def _end(self, news: str) -> None:
        self.lost = news = within(_NEWS_S, lambda: self._post(news), news)
        self._known.set()
        self.say("end", news)
        if not self._left.wait(GRACE_S):
            self.writing.acquire(timeout=_SAVING_S)
        for member in self.peers.values():
            member.wake(self.me)  # one that is stopped would keep its launcher waiting
        if not self._left.is_set():
            sys.stderr.write(f"Error: {news}; this rank ends too\n")
            sys.stderr.flush()
            within(_NEWS_S, self.board.count_out, None)
            os._exit(EXIT_RANK_FAILED)


@contextmanager
def lifeline(board: Board, silence_s: float | None = None, advice: str = "") -> Iterator[Lifeline]:
    """Watch the other ranks for the length of the block.

    Args:
        board: That of the run.
        silence_s: How long nothing may be heard from a rank; that of the first rank holds on all.
        advice: What to do when one is gone, such as `run the same command again`.

    An error of torch's collectives within the block is reported as the failure of the other rank behind it.

    Raises:
        RankFailed: another rank has failed, or is gone.
        ConfigError: `DFLASH_SILENCE_S` is no number of seconds.
    """
    line = Lifeline(board, silence_s or seconds_of("DFLASH_SILENCE_S", SILENCE_S), advice)
    if board.world.size == 1:
        yield line
        return
    line.peers = _accepted(line) if board.world.is_main else _connected(line)
    thread = threading.Thread(target=line.watch, name="lifeline", daemon=True)
    thread.start()
    try:
        yield line
    except BaseException as error:
        if (news := line.explained(error)) is not None:
            raise RankFailed(f"{news}; this rank ends too") from error
        board.tell(error)  # before the connections end, which say less
        raise
    else:
        line.say("bye", line.me.doing)
    finally:
        line.leave()
        thread.join()
        for link in line.peers:
            link.close()


def _may_be_an_echo(error: BaseException | None) -> bool:
    """Whether an error of torch's collectives or its store is behind this one."""
    while error is not None and not isinstance(error, RuntimeError):
        error = error.__cause__
    return error is not None and not lacks_memory(error)


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
        port, me, deadline = server.getsockname()[1], line.me, time.monotonic() + TIMEOUT.total_seconds()
        board.shared("lifeline", lambda: [port, token, me.pid, me.machine, line.silence_s])
        while len(peers) < board.world.size - 1:
            board.check()
            if time.monotonic() > deadline:
                came = {member.rank for member in peers.values()}
                away = ", ".join(str(rank) for rank in range(1, board.world.size) if rank not in came)
                board.fail(away := f"nothing was heard from rank {away} since it joined the run")
                raise RankFailed(away)
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
    port, token, pid, machine, line.silence_s = line.board.shared("lifeline", lambda: None)
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
