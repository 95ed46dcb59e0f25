"""Never twice, never lost: killed, stopped, out of disk or memory, with other ranks, with a failing one."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from dataclasses import replace

import pytest
from chat_families import dialogue, write_jsonl
from extract_runs import exit_codes, same, samples_of, start_ranks
from support import write_target

from dflash.board import Board
from dflash.cache.manifest import load_manifest
from dflash.cache.shard import ShardStream
from dflash.errors import CacheError, RankFailed, TargetError
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.stopping import exit_code
from dflash.target import TruncatedTarget
from dflash.world import World

# Ranks are forked: several imports of torch would cost more than all the rest.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SAMPLES = 40


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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def config_of(folder, target, data):
    return ExtractConfig(
        str(target), (data,), folder / "cache", (0, 2), 160, (64, 160), 2, 200, "float32", 12_000
    )


@pytest.fixture
def config(tmp_path, target, data, home, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(home))
    return config_of(tmp_path, target, data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target, data, home):
    """The samples of an undisturbed run."""
    undisturbed = config_of(tmp_path_factory.mktemp("whole"), target, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(home))
        extract(undisturbed, World())
    return samples_of(undisturbed.out)


def kill_again_and_again(config, whole, kills, seed):
    """Kill all ranks at a random moment, 1, 2 and 3 of them in turn; finish a cache when a run survives.

    Gives the number of runs that were killed.
    """
    chance, done, turn = random.Random(seed), 0, 0
    started = time.monotonic()
    extract(replace(config, out=config.out.with_name(f"timed{seed}")), World())
    duration = time.monotonic() - started
    while done < kills:
        size = 1 + turn % 3
        ranks = start_ranks(config, size)
        time.sleep(chance.uniform(0.1, 1.2) * duration)
        killed = [process for process in chance.sample(ranks, size) if process.is_alive()]
        for process in killed:
            os.kill(process.pid, signal.SIGKILL)
        done, turn = done + bool(killed), turn + 1
        exit_codes(ranks, 20)
        if (config.out / "manifest.json").exists() and load_manifest(config.out).complete:
            assert same(samples_of(config.out), whole)
            config = replace(config, out=config.out.with_name(f"cache{seed}-{turn}"))
    extract(config, World())
    assert same(samples_of(config.out), whole)
    return done


def test_kills_at_random_moments_lose_and_repeat_nothing(config, whole):
    assert kill_again_and_again(config, whole, 6, 0) >= 6


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_more_kills_lose_and_repeat_nothing(config, whole, seed):
    assert kill_again_and_again(config, whole, 60, seed) >= 60


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_work_and_end_with_the_states_of_one(config, whole, size):
    assert exit_codes(start_ranks(config, size)) == [0] * size
    assert load_manifest(config.out).complete
    assert same(samples_of(config.out), whole)
    assert not list(config.out.rglob("*.tmp"))


def slowed(monkeypatch, seconds=0.05):
    """Let every batch take so long that a test can act meanwhile."""
    capture = TruncatedTarget.capture

    def slow(*args):
        time.sleep(seconds)
        capture(*args)

    monkeypatch.setattr(TruncatedTarget, "capture", slow)


def run_command(config, world):
    """What the command does with a report."""
    if stopped := extract(config, world).stopped:
        raise SystemExit(exit_code(stopped))


@pytest.mark.parametrize(
    ("number", "size", "hit"),
    [
        (signal.SIGTERM, 1, 0),
        (signal.SIGINT, 2, 1),
        pytest.param(signal.SIGINT, 1, 0, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, 1, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_any_rank_ends_all_within_seconds_and_loses_no_batch(
    config, whole, monkeypatch, number, size, hit
):
    """What was captured by then is committed, less than a unit though it may be; the rest follows later."""
    slowed(monkeypatch)
    config = replace(config, shard_bytes=1 << 30)
    ranks = start_ranks(config, size, run_command)
    while not list(config.out.glob("shards/*/*")):
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(ranks[hit].pid, number)
    started = time.monotonic()
    assert exit_codes(ranks) == [128 + number] * size
    assert time.monotonic() - started < 5
    part = samples_of(config.out, allow_incomplete=True)
    assert 0 < len(part) < SAMPLES
    assert not list(config.out.rglob("*.tmp"))
    monkeypatch.undo()
    assert exit_codes(start_ranks(config, 1, run_command)) == [0]
    assert same(samples_of(config.out), whole)


def test_a_stopped_run_says_how_to_go_on(config, monkeypatch):
    slowed(monkeypatch, 0.01)
    asked = Board.stop_asked
    monkeypatch.setattr(Board, "stop_asked", lambda self: "SIGTERM" if self.add("asked") > 5 else asked(self))
    report = extract(config, World())
    assert report.stopped == "SIGTERM"
    assert f"stopped by SIGTERM after {report.samples} of {SAMPLES} samples" in report.text()
    assert "run the same command again" in report.text()


def failing_rank(config, world):
    """Rank 1 fails after a few batches."""
    if world.rank == 1:
        TruncatedTarget.capture = failing
    try:
        extract(config, world)
    except RankFailed as error:
        raise SystemExit(41 if "rank 1 has failed: the fan is stuck" in str(error) else 42) from error
    except TargetError as error:
        raise SystemExit(43) from error


def failing(*_):
    raise TargetError("the fan is stuck")


def test_a_failed_rank_ends_the_others_with_what_it_said(config, monkeypatch):
    """Also one that waits for it, having nothing left to do."""
    slowed(monkeypatch, 0.02)
    started = time.monotonic()
    assert exit_codes(start_ranks(config, 3, failing_rank)) == [41, 43, 41]
    assert time.monotonic() - started < 20


def lonely_rank(config, world):
    try:
        extract(config, world)
    except RankFailed as error:
        raise SystemExit(44 if "rank 0 is gone; it was at" in str(error) else 45) from error


def test_a_killed_first_rank_takes_its_store_along_and_the_others_name_it(config, monkeypatch):
    slowed(monkeypatch)
    ranks = start_ranks(config, 2, lonely_rank)
    while not list(config.out.glob("shards/*/*")):
        time.sleep(0.01)
    ranks[0].kill()
    assert exit_codes(ranks, 20) == [-signal.SIGKILL, 44]


def test_a_full_disk_is_one_line_and_can_be_resumed(config, whole, monkeypatch):
    append, count = ShardStream.append, iter(range(25))

    def full(self, sample):
        if next(count, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, sample)

    monkeypatch.setattr(ShardStream, "append", full)
    with pytest.raises(CacheError, match=r"No space left on device; run the same command again") as caught:
        extract(config, World())
    assert "\n" not in str(caught.value)
    assert 0 < len(samples_of(config.out, allow_incomplete=True)) <= 25
    monkeypatch.undo()
    monkeypatch.setenv("DFLASH_HOME", str(config.out.parent / "home"))
    extract(config, World())
    assert same(samples_of(config.out), whole)


def limited_rank(config, world):
    """Files may not become larger than a few samples, which the kernel enforces."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        extract(config, world)
    except CacheError as error:
        raise SystemExit(46 if "run the same command again" in str(error) else 47) from error


def test_a_write_that_the_kernel_refuses_leaves_nothing_behind(config, whole):
    assert exit_codes(start_ranks(replace(config, shard_bytes=1 << 30), 1, limited_rank)) == [46]
    assert not list(config.out.rglob("*.tmp"))
    extract(config, World())
    assert same(samples_of(config.out), whole)
