"""Who may write to a cache in an object store: one run at a time.

A claim is an object `writers/<n>.json`, created where none of that number is; of two runs one wins. The
highest number holds. Its run writes the object again now and then, as a sign of life, and at the end as
released. A later run takes the next number once the holder has released or has not been heard of for
`EXPIRY_S`, and at once if the holder ran on this machine, where a lock on a file has told that it is gone.

A run that sleeps through its expiry finds the higher number and stops. Should it be put to sleep between that
look and its next write, the order of commits (`handover`) still keeps it from committing what others have.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from dflash.errors import CacheError, StoreError
from dflash.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLAIMS_FOLDER = "writers"
EXPIRY_S = 300.0
"""Seconds without a sign of life after which another machine may go on; longer than requests are tried."""
_CLAIM = re.compile(rf"{CLAIMS_FOLDER}/([0-9]{{6,18}})\.json")
_SIGNS = 5
"""Signs of life in that time."""
_SIGN_RETRY_S = 5.0
"""Seconds for which a sign of life is tried again; the next one comes soon."""


@dataclass(frozen=True)
class Holder:
    """What a claim says of the run that made it."""

    machine: str = ""
    """Of the folder through which the run writes: the same text means the same lock file."""
    host: str = "an unknown host"
    process: int = 0
    since: str = "an unknown time"
    released: bool = False

    @classmethod
    def here(cls, machine: str) -> Holder:
        """This process."""
        return cls(machine, socket.gethostname(), os.getpid(), now())

    @classmethod
    def read(cls, data: bytes) -> Holder:
        """The holder in a claim; one that nobody knows where it cannot be read."""
        try:
            value = json.loads(data)
            machine, host, since = (str(value[name]) for name in ("machine", "host", "since"))
            return cls(machine, host, int(value["process"]), since, value["released"] is True)
        except (ValueError, TypeError, KeyError):
            return cls()

    def data(self) -> bytes:
        """The claim's bytes."""
        return json.dumps(asdict(self)).encode()

    def text(self) -> str:
        """Who and since when, for errors."""
        return f"{self.host} (process {self.process}) since {self.since}"


@dataclass(frozen=True)
class Claim:
    """The right of one run, on all its ranks, to write to a cache."""

    store: Store
    number: int

    @property
    def key(self) -> str:
        """The key of its object."""
        return f"{CLAIMS_FOLDER}/{self.number:06d}.json"

    def check(self) -> None:
        """Go on only while this is the claim that holds.

        Raises:
            CacheError: another run has taken over.
            StoreError: the store does not answer, or refuses.
        """
        last = max(_claims(self.store), default=0)
        if last == self.number:
            return
        holder = _holder(self.store, last) or Holder()
        raise CacheError(
            f"{self.store.url} was taken over by {holder.text()}, because this run had not been heard of for "
            f"{EXPIRY_S:.0f} s; what it committed stays; run the same command again when that one has ended"
        )


@contextmanager
def claimed(store: Store, machine: str) -> Iterator[Claim]:
    """Hold the claim to a cache until the block ends.

    Args:
        store: The cache's.
        machine: Names the lock file that the caller holds; the holder of an earlier claim with it is gone.

    Raises:
        CacheError: another run is writing; says who, since when and what to do.
        StoreError: the store does not answer, or refuses.
    """
    holder = Holder.here(machine)
    claim = _taken(store, holder)
    hasty, over = Store(store.url, min(_SIGN_RETRY_S, store.retry_s)), threading.Event()

    def live() -> None:
        while not over.wait(EXPIRY_S / _SIGNS):
            with suppress(StoreError):  # of a store that is away for long the commits tell
                hasty.replace(claim.key, holder.data())

    thread = threading.Thread(target=live, name="dflash-claim", daemon=True)
    thread.start()
    try:
        yield claim
    finally:
        over.set()
        thread.join()
        with suppress(StoreError):  # then it expires
            hasty.replace(claim.key, replace(holder, released=True).data())


@contextmanager
def locked(path: Path, url: str) -> Iterator[None]:
    """Hold a lock file of this machine until the block ends; a process that dies lets go of it.

    Raises:
        CacheError: another process of this machine holds it.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise CacheError(
                f"{url} is being written by {file.read(200).strip()} of this machine; wait for it or stop it"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} (since {now()})")
        file.flush()
        yield


def now() -> str:
    """The time, for people."""
    return datetime.now(timezone.utc).isoformat(" ", "seconds")


def _taken(store: Store, holder: Holder) -> Claim:
    """The claim after the last one, once that does not hold any more."""
    while True:
        ages = _claims(store)
        last = max(ages, default=0)
        before = _holder(store, last)
        if last and before is None:  # removed by the holder of a higher one
            continue
        if before is not None:
            _refuse_living(store, before, ages[last], holder.machine)
        claim = Claim(store, last + 1)
        try:
            store.create(claim.key, holder.data())
        except FileExistsError:  # another run was faster
            continue
        there = _claims(store)
        if max(there, default=0) == claim.number:
            for number in sorted(there)[:-1]:
                store.remove(Claim(store, number).key)
            return claim
        store.remove(claim.key)  # its number was used before, by a run that others have followed


def _refuse_living(store: Store, before: Holder, age: float, machine: str) -> None:
    if before.released or before.machine == machine or age >= EXPIRY_S:
        return
    age = max(age, 0)  # clocks differ
    raise CacheError(
        f"{store.url} is being written by {before.text()}, last heard of {age:.0f} s ago; wait for it, or if "
        f"it is dead run the same command again in {EXPIRY_S - age:.0f} s, on its machine at once"
    )


def _claims(store: Store) -> dict[int, float]:
    """Seconds since each claim was last written, by its number."""
    now_s, listed = time.time(), store.listed(CLAIMS_FOLDER)
    found = ((_CLAIM.fullmatch(key), entry.written) for key, entry in listed.items())
    return {int(match[1]): now_s - written for match, written in found if match is not None}


def _holder(store: Store, number: int) -> Holder | None:
    try:
        return Holder.read(store.read(Claim(store, number).key))
    except FileNotFoundError:
        return None
