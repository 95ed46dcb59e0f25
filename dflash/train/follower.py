"""Following a cache on the disk: the first rank looks, waits and decides; the others are told.

Decisions go through the key-value store of the process group and are polled, in the loader's thread, so that
a wait of hours is no collective that times out, a signal can end it, and a rank that fails ends the others.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING

from dflash.cache.growing import GrowingCache, planned_of
from dflash.cache.manifest import MANIFEST_NAME, load_manifest
from dflash.cache.planned import PLANNED_NAME, Planned, load_planned
from dflash.cache.reader import CacheReader
from dflash.cache.subset import subset
from dflash.errors import CheckpointError, ConfigError, SourceStarved
from dflash.progress import format_seconds
from dflash.train.arrived import Source
from dflash.train.follow_log import Decision, FollowLog
from dflash.train.followed import Starved
from dflash.train.following import FollowSampler
from dflash.train.holdout import split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np

    from dflash.board import Board
    from dflash.train.config import TrainConfig
    from dflash.train.following import Attempts
    from dflash.train.pools import IntArray
    from dflash.train.sampler import SamplerState

FIRST_WORD_S, RAREST_WORD_S = 10.0, 600.0
"""When a wait is first mentioned, and how rarely at last; in between the gaps double."""
_FIRST_POLL_S, _POLL_S = 0.01, 0.25


class _Closed(Exception):  # noqa: N818 - no error
    """The run is over; nobody wants the step that is waited for."""


class Patience:
    """How long what is missing has been waited for, and when to say so.

    Args:
        limit: Seconds that a wait may take; None for any time.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._named: tuple[int, ...] | None = None
        self._gap_s = self._next_word = 0.0
        self.begin()

    def begin(self) -> None:
        """Another wait begins."""
        self._since: dict[int, float] = {}
        self._pause_s = _FIRST_POLL_S

    def wait(self, starved: Starved, note: str, *, progress: bool) -> list[int] | None:
        """Wait a little, saying now and then what for, less and less often while it is the same.

        Args:
            starved: What is missing.
            note: What to say beside it.
            progress: Whether anything has arrived since the last call, which is what counts where it is not a
                matter of single buckets.

        Returns:
            Buckets that have been missing for too long, none (an empty list) where all that arrives is too
            little; None while patience lasts.
        """
        now = time.monotonic()
        keys = starved.buckets or (-1,)
        kept = {} if progress and not starved.buckets else self._since
        self._since = {key: kept.get(key, now) for key in keys}
        age = now - min(self._since.values())
        if age >= FIRST_WORD_S and (keys != self._named or now >= self._next_word):
            say(f"waiting for {format_seconds(age)}: {starved}; {note}")
            self._gap_s = min(2 * self._gap_s, RAREST_WORD_S) if keys == self._named else FIRST_WORD_S
            self._named, self._next_word = keys, now + self._gap_s
        if self._limit is not None and age >= self._limit:
            return [key for key, since in self._since.items() if key >= 0 and now - since >= self._limit]
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _POLL_S)
        return None


class Follower:
    """Decides, on the first rank, what a step may draw from, and tells it to the others.

    Args:
        config: The run; `follow` must be set.
        board: Shared by the ranks of this run alone.
        wish: What asks this rank to stop, if anything does: a signal's name, say.
    """

    def __init__(self, config: TrainConfig, board: Board, wish: Callable[[], str | None]) -> None:
        if config.follow is None:
            raise ConfigError("this run does not follow its cache")
        self._config, self._follow, self._board, self._wish = config, config.follow, board, wish
        self._closing, self._patience = Event(), Patience(config.follow.max_wait)
        self._aside: list[int] = []
        self._main = board.world.is_main
        board.shared("begun", self._await_cache, self._meanwhile)
        self._growing = GrowingCache(config.cache)
        self._log = FollowLog(config.out, resume=config.resume)
        self._recorded = self._log.decisions
        planned = self._log.planned(self.reader.manifest.digest())
        self._planned = Planned.from_json(
            board.shared("planned", lambda: asdict(planned or planned_of(config.cache))), PLANNED_NAME
        )

    @property
    def reader(self) -> CacheReader:
        """Reads the samples of rows that have arrived."""
        return self._growing.reader

    def sampler(self, state: SamplerState | None = None) -> FollowSampler:
        """The steps of the run, from the beginning or from a saved position."""
        config = self._config
        source = Source(self._planned, self.reader.manifest.digest(), config.holdout.share)
        return FollowSampler(self, source, config.sampler, epochs=config.epochs, state=state)

    def held_out(self) -> CacheReader:
        """The samples of the complete cache that an evaluation walks over."""
        whole = CacheReader(self._config.cache, allow_incomplete=True)  # data may have been appended since
        return subset(whole, split(whole.index.ids, self._config.holdout)[1])

    def begin(self) -> None:
        """Start the record, once every rank has read the one that may be there; on the first rank."""
        self._log.begin(self.reader.manifest.digest(), self._planned)

    def close(self) -> None:
        """End every wait: the run is over."""
        self._closing.set()

    def history(self, steps: int) -> list[Decision]:
        """The decisions for the first `steps` steps."""
        history = self._recorded[:steps]
        self._aside = list(history[-1].aside) if history else []
        return history

    def rows(self, parts: Sequence[Sequence[str]]) -> tuple[np.ndarray, IntArray, IntArray]:
        """Make parts of the cache readable; gives ids, buckets and lengths of their samples, `[n]` each."""
        rows = self._growing.add(parts)
        index = self.reader.index
        return index.ids[rows], index.buckets[rows], index.lengths[rows]

    def decide(self, attempts: Attempts) -> Decision:
        """The decision for a step; all of it is taken in, and the step is planned.

        Raises:
            SourceStarved: what it needs was waited for too long.
            RankFailed: another rank failed meanwhile.
        """
        step = attempts.index
        if step < len(self._recorded):
            found = self._recorded[step]
            self._take_in(found, attempts)
        else:
            try:
                plain = self._board.shared(
                    f"step{step}", lambda: self._search(attempts).plain(), self._meanwhile
                )
            except _Closed:
                return Decision(step, end="the end of the run")
            found = Decision(**plain)
            if found.error is not None:
                raise SourceStarved(found.error)
            if not self._main and found.end is None:
                self._take_in(found, attempts)
        self._aside = list(found.aside)
        return found

    def _take_in(self, decision: Decision, attempts: Attempts) -> None:
        attempts.arrive(decision.parts, decision.digest)
        try:
            chunks = attempts.attempt(decision.aside, gated=False)
        except Starved as starved:
            chunks = [[-1, str(starved)]]  # type: ignore[list-item] # shown only
        if chunks != decision.chunks:
            raise CheckpointError(
                f"step {decision.step} cannot be repeated as it was recorded (now {chunks}, then "
                f"{decision.chunks}); start afresh"
            )

    def _search(self, attempts: Attempts) -> Decision:
        """Wait until the step can be planned, or until a signal, an error or impatience ends the wait."""
        found = Decision(attempts.index, aside=list(self._aside))
        self._patience.begin()
        starved: Starved | None = None
        while True:
            news = self._look(attempts, found)
            if news or starved is None:
                starved = self._attempt(attempts, found)
                if starved is None:
                    self._log.add(found)
                    return found
            if (end := self._end()) is not None:
                return Decision(found.step, end=end)
            note = f"{attempts.committed():.0%} of the cache is there"
            missing = self._patience.wait(starved, note, progress=news)
            if missing is not None:
                more = sorted({*found.aside, *missing})
                if self._follow.on_starved != "reweight" or more == found.aside:
                    return Decision(found.step, error=self._given_up(starved, note))
                say(f"going on without it after {self._follow.max_wait:g} s: {starved}")
                found.aside, starved = more, None

    def _attempt(self, attempts: Attempts, found: Decision) -> Starved | None:
        back = found.aside if found.digest else attempts.refilled(found.aside)
        if back:
            say(f"{self._names(back)} delivered again")
        found.aside = [bucket for bucket in found.aside if bucket not in back]
        try:
            found.chunks = attempts.attempt(found.aside, gated=True)
        except Starved as starved:
            return starved
        return None

    def _look(self, attempts: Attempts, found: Decision) -> bool:
        """Take in what has been committed since the last look; says whether there was anything."""
        names, complete = self._growing.look()
        if complete:
            found.digest = self._content_digest()
        if names:
            found.parts.append(names)
        attempts.arrive([names] if names else [], found.digest)
        return bool(names or complete)

    def _content_digest(self) -> str:
        """That of what the finished cache has for training, as any run takes it."""
        whole = CacheReader(self._config.cache)
        rows, _ = split(whole.index.ids, self._config.holdout)
        return (subset(whole, rows) if self._config.holdout.share else whole).index.digest()

    def _end(self) -> str | None:
        """What asks the run to stop on any rank, if anything does."""
        self._board.check()
        self._check_open()
        return self._wish() or self._board.stop_asked()

    def _meanwhile(self) -> None:
        """What a rank that waits for the first one does."""
        self._check_open()
        if (wish := self._wish()) is not None:
            self._board.ask_to_stop(wish)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise _Closed

    def _names(self, buckets: Sequence[int]) -> str:
        return "bucket " + ", ".join(str(self._planned.edges[bucket]) for bucket in buckets)

    def _given_up(self, starved: Starved | str, note: str) -> str:
        return (
            f"{self._config.cache} has not delivered for {self._follow.max_wait:g} s (--max-wait): "
            f"{starved}; {note}; see whether `dflash extract` still runs, then go on with --resume"
        )

    def _await_cache(self) -> str:
        """Wait until the extraction has begun."""
        while (missing := _not_begun(self._config.cache)) is not None:
            if self._end() is not None:
                raise SourceStarved(f"stopped before the extraction had begun: {missing}")
            if self._patience.wait(Starved(missing), "start `dflash extract`", progress=False) is not None:
                raise SourceStarved(self._given_up(missing, "nothing is there yet"))
        return "begun"


def say(text: str) -> None:
    """A line for the terminal."""
    sys.stderr.write(f"follow: {text}\n")
    sys.stderr.flush()


def _not_begun(cache: Path) -> str | None:
    """What is missing for training to begin, if anything is."""
    if not (cache / MANIFEST_NAME).is_file():
        return f"{cache} has no {MANIFEST_NAME}"
    manifest = load_manifest(cache)
    if manifest.complete:
        return None
    if not (cache / PLANNED_NAME).is_file():
        return f"{cache} has no {PLANNED_NAME}, which says how much of each length will come"
    planned = load_planned(cache, manifest.identity.bucket_edges)
    if sum(planned.samples) != manifest.expected_samples:  # of before data was appended
        return f"{cache / PLANNED_NAME} is not up to date"
    return None
