"""What the ranks of a run tell each other while they work: counters, notes, and who has failed.

Everything goes through the key-value store of the process group and is polled. Collectives would not do: one
that waits has a time-out, which a day of work on another rank exceeds, cannot be interrupted by a signal, and
does not learn that another rank has failed.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import (  # type: ignore[attr-defined] # it re-exports the stores without saying so
    DistError,
    HashStore,
    PrefixStore,
    Store,
    distributed_c10d,
    is_initialized,
)

from dflash.errors import DflashError, RankFailed
from dflash.stopping import stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dflash.world import World

_FIRST_POLL_S, _POLL_S = 0.001, 0.02
_FAREWELL_S = 5.0
"""How long the first rank, which may host the store, waits for the others to have read how it ended."""
_ECHO_S = 2.0
"""How much later a rank ends than the one whose failure ends it: launchers show the first one alone."""
_uses = itertools.count()
_Result = TypeVar("_Result")


class Board:
    """A board that every rank of a world opens at the same point of its run.

    Any call may raise RankFailed: the store went with the rank that held it.

    Args:
        world: This process.
        topic: Keeps apart what different parts of the program write.
        store: Shared by all ranks; that of the process group when None.
    """

    def __init__(self, world: World, topic: str, store: Store | None = None) -> None:
        self.world = world
        joined = world.size > 1 and is_initialized()
        if store is None:
            # torch has no public way to the store of a group.
            store = distributed_c10d._get_default_store() if joined else HashStore()  # noqa: SLF001
        self._store = PrefixStore(f"dflash/{topic}/{next(_uses)}", store)

    def add(self, counter: str, amount: int = 1) -> int:
        """Add to a counter, which starts at 0; returns what it holds then."""
        with _reachable():
            return int(self._store.add(counter, amount))

    def post(self, note: str, value: Any) -> None:
        """Leave a JSON value of this rank."""
        self._set(f"{note}/{self.world.rank}", json.dumps(value))

    def exchange(self, note: str, value: Any) -> list[Any]:
        """Post a JSON value of this rank; gives those of all ranks, by rank.

        Raises:
            RankFailed: another rank failed meanwhile.
        """
        self.post(note, value)
        return self.collect(note)

    def collect(self, note: str, meanwhile: Callable[[], object] = lambda: None) -> list[Any]:
        """The values that all ranks have posted, by rank; waits for those that have not, calling `meanwhile`.

        Raises:
            RankFailed: another rank failed meanwhile.
        """
        keys = [f"{note}/{rank}" for rank in range(self.world.size)]

        def all_here() -> bool:
            meanwhile()
            return self._has(*keys)

        self._wait(all_here)
        return [json.loads(self._get(key)) for key in keys]

    def shared(
        self, note: str, make: Callable[[], Any], meanwhile: Callable[[], object] = lambda: None
    ) -> Any:
        """What `make` gives on the main rank, on every rank: a JSON value; the others call `meanwhile`.

        Raises:
            RankFailed: another rank failed meanwhile.
        """
        if self.world.is_main:
            self._set(note, json.dumps(make()))

        def here() -> bool:
            meanwhile()
            return self._has(note)

        self._wait(here)
        return json.loads(self._get(note))

    def hand(self, note: str, rank: int, value: Any) -> None:
        """Leave a JSON value for one other rank."""
        self._set(f"{note}/to/{rank}", json.dumps(value))

    def taken(self, note: str, meanwhile: Callable[[], object]) -> Any:
        """Wait for the value that another rank hands to this one, calling `meanwhile` now and then.

        It is gone from the board then, which would grow without end otherwise.

        Raises:
            RankFailed: another rank failed meanwhile.
        """
        key = f"{note}/to/{self.world.rank}"

        def here() -> bool:
            meanwhile()
            return self._has(key)

        self._wait(here)
        value = json.loads(self._get(key))
        with _reachable():
            self._store.delete_key(key)
        return value

    def meet(self, place: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank has come to this place, calling `meanwhile` now and then.

        Raises:
            RankFailed: another rank failed meanwhile.
        """
        self.add(place)

        def all_here() -> bool:
            meanwhile()
            return self.add(place, 0) >= self.world.size

        self._wait(all_here)

    def check(self) -> None:
        """Go on only while no other rank has failed.

        Raises:
            RankFailed: one has; carries what it said.
        """
        if self._has("failed"):
            raise RankFailed(self._get("failed"))

    def tell(self, error: BaseException) -> None:
        """Tell all ranks of an error of this one, unless it is only the echo of another one's."""
        if not isinstance(error, RankFailed):
            text = str(error) if isinstance(error, DflashError) else repr(error)
            with suppress(RankFailed):
                self.fail(f"rank {self.world.rank} has failed: {text}")

    def fail(self, reason: str) -> None:
        """Tell all ranks that one has failed, unless they know already."""
        if not self._has("failed"):
            self._set("failed", reason)

    def ask_to_stop(self, reason: str) -> None:
        """Ask all ranks to stop."""
        self._set("stop", reason)

    def stop_asked(self) -> str | None:
        """Why the ranks were asked to stop, if they were."""
        return self._get("stop") if self._has("stop") else None

    @contextmanager
    def telling_failure(self) -> Iterator[None]:
        """Tell the others what error ends this block; and end it only when all have read how it ended."""
        try:
            yield
        except BaseException as error:
            with stop_signals() as stop:  # a launcher that ends all must not cut off what this rank will say
                # who holds the store may be stopped
                within(_FAREWELL_S, partial(self.tell, error), None)
                within(2 * _FAREWELL_S, self._leave, None)
                deadline = time.monotonic() + _ECHO_S * isinstance(error, RankFailed)
                while stop.name is None and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            raise
        with suppress(RankFailed):  # all is done: the first rank may be gone already
            self._leave()

    def count_out(self) -> None:
        """Say that a rank will not come back to the board."""
        self.add("left")

    def _leave(self) -> None:
        """The first rank may hold the store, so it goes last."""
        if self.world.size == 1:
            return
        self.count_out()
        deadline = time.monotonic() + _FAREWELL_S
        while self.world.is_main and self.add("left", 0) < self.world.size and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _wait(self, ready: Callable[[], bool]) -> None:
        pause = _FIRST_POLL_S  # doubled, so that nobody waits much longer than what he waits for takes
        while not ready():
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)

    def _has(self, *keys: str) -> bool:
        with _reachable():
            return bool(self._store.check(list(keys)))

    def _get(self, key: str) -> str:
        with _reachable():
            return self._store.get(key).decode()

    def _set(self, key: str, value: str) -> None:
        with _reachable():
            self._store.set(key, value)


def within(seconds: float, work: Callable[[], _Result], otherwise: _Result) -> _Result:
    """What `work` returns; `otherwise` if it fails with another rank, or takes longer and is left alone."""
    found = [otherwise]

    def run() -> None:
        with suppress(RankFailed):
            found[0] = work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        reason = str(error).strip().split("\n")[0]
        raise RankFailed(f"the process that holds the ranks' store is gone ({reason})") from error
