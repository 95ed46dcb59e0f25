"""A rank that is killed, stopped or stuck ends an extraction on all ranks, named with what it was at."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from chat_families import dialogue, write_jsonl
from extract_runs import exit_codes, same, samples_of, start_ranks
from support import write_target

from dflash import lifeline as module
from dflash.cache.shard import ShardStream
from dflash.errors import EXIT_RANK_FAILED, RankFailed
from dflash.extract import pipeline
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.lifeline import Lifeline
from dflash.target import TruncatedTarget
from dflash.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SAMPLES, SILENCE_S = 40, 1.5
KILLED = -signal.SIGKILL
AGAIN = "run the same command again to go on"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target", layers=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [
        {"messages": dialogue(f"question {n}", "word " * (1 + 5 * n % 23)), "id": f"row-{n}"}
        for n in range(SAMPLES)
    ]
    return write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", *rows)


@pytest.fixture
def config(tmp_path, target, data, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DFLASH_SILENCE_S", str(SILENCE_S))
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    return ExtractConfig(
        str(target), (data,), tmp_path / "cache", (0, 2), 160, (64, 160), 2, 200, "float32", 12_000
    )


@pytest.fixture
def whole(config):
    """The samples of an undisturbed run."""
    undisturbed = replace(config, out=config.out.with_name("whole"), tp=1)
    extract(undisturbed, World())
    return samples_of(undisturbed.out)


PLACES = {
    "corpus": (pipeline, "load_corpus", 1, "reading the corpus"),
    "prepare": (pipeline, "prepare", 1, "preparing the cache"),
    "plan": (pipeline, "plan_units", 1, "planning what is left to do"),
    "load": (TruncatedTarget, "__init__", 1, "loading the target"),
    "batch": (TruncatedTarget, "capture", 2, r"batch \d+ of (unit \d+|its replica)"),
    "end": (Lifeline, "check", 1, "the end, with nothing left to do"),
    "finish": (pipeline, "finalized", 1, "completing the cache"),
}
"""Where a rank can be hit: at which call of what, and what it is at then."""
FIRST_ONLY = {"prepare", "finish"}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


@dataclass(frozen=True)
class Hit:
    """What happens to one rank at a place, as the work of every rank."""

    how: Callable[[], None]
    victim: int
    place: str
    after_s: float = SILENCE_S / 2
    """In which it says where it is."""

    def __call__(self, config: ExtractConfig, world: World) -> None:
        """What a rank says when it ends is in a file of its own."""
        mark = config.out.with_name("hit")
        if world.rank == self.victim:
            self._lay(mark)
        elif self.place == "batch" and config.tp == 1:
            _wait_in_batches(mark)
        try:
            extract(config, world)
        except RankFailed as error:
            config.out.with_name(f"said{world.rank}").write_text(str(error))
            raise SystemExit(EXIT_RANK_FAILED) from error

    def _lay(self, mark: Path) -> None:
        owner, name, call, _ = PLACES[self.place]
        real, calls = getattr(owner, name), []

        def counted(*arguments, **settings):
            calls.append(None)
            if len(calls) == call:
                time.sleep(self.after_s)
                mark.touch()
                self.how()
            return real(*arguments, **settings)

        setattr(owner, name, counted)

    @property
    def text(self) -> str:
        """What the other ranks say."""
        at, name = PLACES[self.place][3], f"^rank {self.victim} is"
        if self.how is sleep_for_ever:
            return rf"{name} alive but has been at {at} for \d+ s, while rank \d waits at .*; {AGAIN}"
        how = (
            "gone" if self.how is kill else "stopped or its machine is frozen: nothing was heard .* for 1.5 s"
        )
        return rf"{name} {how}; it was at {at}; {AGAIN}"


def _wait_in_batches(mark: Path) -> None:
    """Leave work for the rank that is to be hit."""
    capture = TruncatedTarget.capture

    def patient(*arguments):
        while not mark.exists():
            time.sleep(0.01)
        capture(*arguments)

    TruncatedTarget.capture = patient


@pytest.fixture
def ended(config, capfd):
    """Runs ranks of which one is hit; gives what the others said, once all have ended without success.

    One that the store or a collective keeps, which nothing interrupts, is ended by its watch, which speaks.
    """

    def run(config: ExtractConfig, size: int, what: Hit, within_s: float = 20) -> list[str]:
        started = time.monotonic()
        codes = exit_codes(start_ranks(config, size, what), 40)
        paths = [config.out.with_name(f"said{rank}") for rank in range(size) if rank != what.victim]
        said = [path.read_text() for path in paths if path.exists()]
        said += re.findall("Error: (.*)", capfd.readouterr().err)
        victim, others = codes[what.victim], [code for rank, code in enumerate(codes) if rank != what.victim]
        assert others == [EXIT_RANK_FAILED] * (size - 1), said
        # one that wakes up where all is done but to say so does that
        woken = {EXIT_RANK_FAILED, 0} if what.place in {"end", "finish"} else {EXIT_RANK_FAILED}
        assert victim in ({KILLED} if what.how is kill else woken), said
        assert time.monotonic() - started < within_s
        assert all("\n" not in text for text in said)
        return said

    return run


def assert_goes_on(config: ExtractConfig, whole) -> None:
    """The same command ends with what an undisturbed one gives."""
    extract(replace(config, tp=1), World())
    if config.tp == 1:
        assert same(samples_of(config.out), whole)
    assert samples_of(config.out).keys() == whole.keys()
    assert not list(config.out.rglob("*.tmp"))


def assert_names(what: Hit, said: list[str]) -> None:
    """One line that says who and where; ranks that end later may say that one of those before is gone."""
    assert any(re.search(what.text, text) for text in said), said


LONG = [
    pytest.param(*case, marks=pytest.mark.long)
    for case in ((2, 0, "batch"), (2, 1, "load"), (3, 1, "batch"), (2, 0, "prepare"), (3, 2, "plan"))
]


@pytest.mark.parametrize(("size", "victim", "place"), [(3, 1, "end"), (2, 0, "finish"), *LONG])
def test_a_killed_rank_ends_all_within_seconds(config, whole, ended, size, victim, place):
    what = Hit(kill, victim, place)
    assert_names(what, ended(config, size, what, 15))
    assert_goes_on(config, whole)


@pytest.mark.parametrize(("size", "victim", "place"), [(3, 1, "end"), *LONG])
def test_a_stopped_rank_ends_all_with_its_name_and_what_it_was_at(config, whole, ended, size, victim, place):
    what = Hit(stop, victim, place)
    assert_names(what, ended(config, size, what))
    assert_goes_on(config, whole)


@pytest.mark.parametrize("how", [kill, pytest.param(stop, marks=pytest.mark.long)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_replica_that_loses_a_rank_in_a_batch_ends_as_well(config, whole, ended, how, victim):
    config, what = replace(config, tp=2), Hit(how, victim, "batch")
    assert_names(what, ended(config, 2, what))
    assert_goes_on(config, whole)


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (1, "batch"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, "batch"), (1, "load"), (1, "end"))),
    ],
)
def test_a_rank_that_is_stuck_is_not_waited_for_for_ever(config, whole, ended, monkeypatch, victim, place):
    monkeypatch.setattr(module, "_STUCK", 1.0)
    what = Hit(sleep_for_ever, victim, place)
    assert_names(what, ended(config, 2, what))
    assert_goes_on(config, whole)


def slow(config: ExtractConfig, world: World) -> None:
    """One rank takes three times as long as it may say nothing, to load and to write."""
    init, append, waits = TruncatedTarget.__init__, ShardStream.append, iter([3 * SILENCE_S])

    def load(*arguments, **settings):
        time.sleep(3 * SILENCE_S * world.rank)
        init(*arguments, **settings)

    def write(*arguments):
        time.sleep(next(waits, 0) * world.rank)
        return append(*arguments)

    TruncatedTarget.__init__, ShardStream.append = load, write
    extract(config, world)


@pytest.mark.long
def test_a_rank_that_loads_and_writes_for_long_is_waited_for(config, whole):
    assert exit_codes(start_ranks(config, 2, slow)) == [0, 0]
    assert same(samples_of(config.out), whole)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(15))
def test_ranks_hit_at_random_end_all_and_lose_nothing(config, whole, ended, seed):
    chance = random.Random(seed)
    size, tp = chance.choice([(2, 1), (3, 1), (2, 2), (4, 2)])
    place = chance.choice(sorted(PLACES))
    victim = 0 if place in FIRST_ONLY else chance.randrange(size)
    config = replace(config, tp=tp)
    what = Hit(chance.choice([kill, stop]), victim, place, chance.uniform(0, 1))
    said = ended(config, size, what, 30)
    assert any(f"rank {victim} is" in text for text in said), (what, said)
    assert_goes_on(config, whole)


@pytest.mark.long
def test_a_run_that_is_frozen_as_a_whole_goes_on_when_it_wakes_up(config, whole, monkeypatch):
    capture, begun = TruncatedTarget.capture, config.out.with_name("begun")

    def slow_capture(*arguments):
        begun.touch()
        time.sleep(0.1)
        capture(*arguments)

    monkeypatch.setattr(TruncatedTarget, "capture", slow_capture)
    ranks = start_ranks(config, 3)
    while not begun.exists():
        time.sleep(0.01)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in ranks:
            os.kill(process.pid, number)
        time.sleep(3 * SILENCE_S)
    assert exit_codes(ranks) == [0, 0, 0]
    assert same(samples_of(config.out), whole)
