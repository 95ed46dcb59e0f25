"""A rank that fails ends the run at once on all ranks, with its own error; nobody hangs."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
from support import write_cache
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained
from torch import distributed as torch_dist

from dflash import lifeline as module
from dflash.board import Board
from dflash.cache.reader import CacheReader
from dflash.errors import EXIT_RANK_FAILED, CacheCorrupt, RankFailed
from dflash.lifeline import Lifeline, lifeline
from dflash.train import run as run_module
from dflash.train.checkpoint import latest_checkpoint
from dflash.train.record import RunLog
from dflash.train.run import Run
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, batches_for
from dflash.train.trainer import ranks, train
from dflash.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SIX = SamplerConfig(tokens_per_batch=64, batches_per_step=6, min_ready=1, max_ready=8)
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("failing") / "cache", LENGTHS)


def kill_myself(*_arguments, **_settings) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def waiting(rank: int, size: int, victim: int, place: str) -> dict[str, torch.Tensor]:
    """One rank is killed while the others are in this place."""
    world = World(rank, size)

    def wait(line: Lifeline) -> None:
        if rank == victim:
            time.sleep(0.2)
            kill_myself()
        if place == "collective":
            torch_dist.all_reduce(torch.ones(1))
        else:
            line.board.collect("nothing")

    with pytest.raises(RankFailed, match=rf"rank {victim} is gone"):
        within_ranks(world, wait)
    return {"none": torch.zeros(1)}


def within_ranks(world: World, work) -> None:
    with ranks(world) as line:
        work(line)


@pytest.mark.parametrize("place", ["collective", "board"])
@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_that_wait_learn_at_once_that_another_one_was_killed(tmp_path, victim, place):
    started = time.monotonic()
    run_ranks(tmp_path / "ranks", 3, waiting, victim, place, ends={victim: KILLED})
    assert time.monotonic() - started < 20


def stuck(rank: int, size: int) -> dict[str, torch.Tensor]:
    """One rank is killed while the other cannot be interrupted, as in a collective of NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRACE_S", 0.5)
        with ranks(World(rank, size)):
            if rank == 1:
                kill_myself()
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(0.05)
    return {"none": torch.zeros(1)}


def test_a_rank_that_is_stuck_is_ended(tmp_path):
    started = time.monotonic()
    run_ranks(tmp_path / "ranks", 2, stuck, ends={0: EXIT_RANK_FAILED, 1: KILLED})
    assert time.monotonic() - started < 15


SILENCE_S = 2.0


def watched(board: Board, work, silence_s: float = SILENCE_S) -> None:
    with lifeline(board, silence_s) as line:
        work(line)


def stopped(rank: int, size: int, victim: int, place: str) -> NoReturn:
    """One rank is stopped behind a step while the others are in this place; woken up, it learns of it.

    All end with the command's exit code. A collective with a rank that is stopped cannot be interrupted; once
    one rank is ended by its watch, that of another fails, and that one may end by itself.
    """

    def work(line: Lifeline) -> None:
        line.at("step 7")
        torch_dist.barrier()
        if rank == victim:
            time.sleep(SILENCE_S / 2)  # in which it says where it is
            os.kill(os.getpid(), signal.SIGSTOP)
        if place == "collective":
            torch_dist.all_reduce(torch.ones(1))
        line.board.collect("nothing")

    expected = rf"rank {victim} is stopped .* for 2 s; it was at step 7|is gone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRACE_S", 0.5)
        with pytest.raises(RankFailed, match=expected):
            watched(Board(World(rank, size), "stopped"), work)
    raise SystemExit(EXIT_RANK_FAILED)


@pytest.mark.parametrize("place", ["collective", "board"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_stopped_ends_the_run_with_its_name_and_what_it_was_at(tmp_path, victim, place, capfd):
    started = time.monotonic()
    run_ranks(tmp_path / "ranks", 3, stopped, victim, place, ends=dict.fromkeys(range(3), EXIT_RANK_FAILED))
    assert time.monotonic() - started < 20
    if place == "collective":
        assert (
            f"Error: rank {victim} is stopped or its machine is frozen: nothing was heard from it for 2 s; "
            in (capfd.readouterr().err)
        )


def stopped_with_the_store(rank: int, size: int, folder) -> dict[str, torch.Tensor]:
    """The first rank holds the store, which does not answer while it is stopped."""
    if rank == 0:
        store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(folder / "port")
    while not (folder / "port").exists():
        time.sleep(0.01)
    if rank > 0:
        store = torch_dist.TCPStore("127.0.0.1", int((folder / "port").read_text()))

    def work(line: Lifeline) -> None:
        torch_dist.barrier()
        if rank == 0:
            time.sleep(SILENCE_S)
            os.kill(os.getpid(), signal.SIGSTOP)
        line.board.collect("nothing")

    with pytest.raises(RankFailed):
        watched(Board(World(rank, size), "held", store), work)
    return {"none": torch.zeros(1)}


@pytest.mark.long
def test_a_store_that_is_stopped_with_the_rank_that_holds_it_keeps_nobody(tmp_path):
    started = time.monotonic()
    run_ranks(tmp_path / "ranks", 2, stopped_with_the_store, tmp_path, ends={1: EXIT_RANK_FAILED})
    assert time.monotonic() - started < 20


def busy(rank: int, size: int, how: str) -> dict[str, torch.Tensor]:
    """One rank works for twice as long as a rank may say nothing."""
    silence_s = 1.2
    end = time.monotonic() + 2 * silence_s

    def work(_line: Lifeline) -> None:
        if rank == 1 and how == "outside of Python":
            time.sleep(2 * silence_s)
        while rank == 1 and time.monotonic() < end:
            sum(range(1000))
        torch_dist.all_reduce(torch.ones(1))

    watched(Board(World(rank, size), "busy"), work, silence_s=silence_s)
    return {"none": torch.zeros(1)}


@pytest.mark.parametrize("how", ["outside of Python", "in Python"])
def test_a_rank_that_works_for_long_is_waited_for(tmp_path, how):
    run_ranks(tmp_path / "ranks", 2, busy, how)


def behind(rank: int, size: int, late: int) -> dict[str, torch.Tensor]:
    """A rank whose main thread does not come to the collective that the other one waits in."""

    def work(line: Lifeline) -> None:
        line.at("step 4")
        if rank == late:
            line.board.collect("nothing")  # for ever, but for news
        line.at("step 5")
        torch_dist.all_reduce(torch.ones(1))

    torch_dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LATE", 1.0 / SILENCE_S)
        patch.setattr(module, "_STUCK", 2.0 / SILENCE_S)
        with pytest.raises(RankFailed, match=rf"rank {late} is alive but has been at step 4 for"):
            watched(Board(World(rank, size), "behind"), work)
    return {"none": torch.zeros(1)}


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_alive_but_stuck_is_named_when_the_collective_gives_up(tmp_path, late, capfd):
    run_ranks(tmp_path / "ranks", 2, behind, late)
    warning = rf"Warning: rank {late} is alive but has been at step 4 for \d s, while rank {1 - late} waits"
    assert re.search(warning, capfd.readouterr().err)


def kept(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Rank 1 is killed; the first one waits until rank 2 knows, and rank 2 for what the first one sends."""

    def work(line: Lifeline) -> None:
        if rank == 1:
            kill_myself()
        if rank == 2:
            torch_dist.recv(torch.ones(1), src=0)
        line.board.collect("nothing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRACE_S", 0.5)
        with pytest.raises(RankFailed, match="rank 1 is gone"):
            within_ranks(World(rank, size), work)
    return {"none": torch.zeros(1)}


def test_a_rank_that_a_collective_with_the_living_keeps_is_ended_and_says_why(tmp_path, capfd):
    started = time.monotonic()
    run_ranks(tmp_path / "ranks", 3, kept, ends={1: KILLED, 2: EXIT_RANK_FAILED})
    assert time.monotonic() - started < 15
    assert "Error: rank 1 is gone; it was at the start; this rank ends too" in capfd.readouterr().err


def test_alone_there_is_nobody_to_watch():
    with lifeline(Board(World(), "alone")) as line:
        assert line.lost is None


def test_an_error_of_this_rank_stays_its_own(tmp_path):
    run_ranks(tmp_path / "ranks", 2, failing)


def failing(rank: int, size: int) -> dict[str, torch.Tensor]:
    def work(_line: Lifeline) -> None:
        if rank == 1:
            raise RuntimeError("a fault of rank 1")
        torch_dist.all_reduce(torch.ones(1))

    expected = "^a fault of rank 1" if rank == 1 else r"rank 1 has failed: RuntimeError.*a fault of rank 1"
    with pytest.raises(RuntimeError if rank == 1 else RankFailed, match=expected):
        within_ranks(World(rank, size), work)
    return {"none": torch.zeros(1)}


PLACES = {
    "open": (Run, "open"),
    "step": (Run, "step"),
    "update": (Run, "_update"),
    "record": (RunLog, "add"),
    "agree": (Run, "agree"),
    "save": (Run, "save"),
    "write": (run_module, "save_checkpoint"),
}


def killed_at(rank: int, size: int, cache, out, when) -> NoReturn:
    """A run one of whose ranks is killed at the n-th call of a part of the trainer.

    The others end with the command's exit code: by themselves, or by their watch where a collective keeps
    them.
    """
    victim, place, call = when
    calls = []
    owner, name = PLACES[place]
    real = getattr(owner, name)

    def counted(*arguments, **settings):
        calls.append(None)
        if len(calls) == call:
            kill_myself()
        return real(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(owner, name, counted)
        with pytest.raises(RankFailed, match=f"rank {victim} is gone|holds the ranks' store"):
            train(tiny_config(cache, out / "run", sampler=SIX, save_every=2), World(rank, size))
    raise SystemExit(EXIT_RANK_FAILED)


def kill_and_resume(cache, tmp_path, seed: int, whole: dict[str, torch.Tensor]) -> None:
    chance = random.Random(seed)
    size = chance.choice([2, 3])
    place = chance.choice(sorted(PLACES))
    victim = 0 if place == "write" else chance.randrange(size)
    call = 1 if place == "open" else chance.randrange(1, 4)
    started = time.monotonic()
    ends = dict.fromkeys(range(size), EXIT_RANK_FAILED) | {victim: KILLED}
    run_ranks(tmp_path / "ranks", size, killed_at, cache, tmp_path, (victim, place, call), ends=ends)
    assert time.monotonic() - started < 30, (size, place, victim, call)
    resumed = train(tiny_config(cache, tmp_path / "run", sampler=SIX, save_every=2, resume=True), World())
    assert resumed.steps == 8
    ours = trained(resumed.checkpoint)
    for name, tensor in whole.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0.1, atol=2e-2, msg=f"{seed}: {name}")


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """Weights of the run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    return trained(train(tiny_config(cache, folder / "run", sampler=SIX), World()).checkpoint)


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_at_random_ends_all_and_the_run_goes_on_from_what_is_whole(
    cache, tmp_path, whole, seed
):
    kill_and_resume(cache, tmp_path, seed, whole)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 40))
def test_many_ranks_killed_at_random(cache, tmp_path, whole, seed):
    kill_and_resume(cache, tmp_path, seed, whole)


def reading_damage(rank: int, size: int, cache, out) -> dict[str, torch.Tensor]:
    """An epoch over a cache with a damaged sample, which one of the ranks meets."""
    with pytest.raises((CacheCorrupt, RankFailed), match="dflash cache verify") as caught:
        train(tiny_config(cache, out / "run", epochs=1, max_steps=None), World(rank, size))
    return {"own": torch.tensor(float(caught.type is CacheCorrupt))}


def row_of_rank(cache, rank: int) -> int:
    """A row that this one of two ranks reads in the first epoch."""
    reader = CacheReader(cache)
    index, edges = reader.index, reader.manifest.identity.bucket_edges
    corpus = Corpus(index.lengths, index.buckets, edges, index.digest())
    step = Sampler(corpus, tiny_config(cache, cache).sampler, epochs=1).next_step()
    return batches_for(step, World(rank, 2))[0].draws[0].row


@pytest.mark.parametrize("victim", [0, 1])
def test_a_damaged_sample_stops_the_other_rank_too(tmp_path, victim, capfd):
    cache = write_cache(tmp_path / "cache", LENGTHS)
    reader, row = CacheReader(cache), row_of_rank(cache, victim)
    extent = reader.index.locate([row])
    path = cache / reader.index.layouts[int(extent.shards[0])].name
    data = bytearray(path.read_bytes())
    data[int(extent.offsets[0])] ^= 1
    path.write_bytes(data)
    started = time.monotonic()
    # the first rank waits for the others to have read why it ends; they wait for it, and are ended
    ends = {1: EXIT_RANK_FAILED} if victim == 0 else {}
    found = run_ranks(tmp_path / "ranks", 2, reading_damage, cache, tmp_path, ends=ends)
    assert [float(rank["own"]) for rank in found] == ([1.0] if victim == 0 else [0.0, 1.0])
    assert time.monotonic() - started < 20
    if victim == 0:
        assert f"rank 0 has failed: {path}: row" in capfd.readouterr().err
    assert latest_checkpoint(tmp_path / "run") is None


def test_the_same_run_on_the_same_ranks_is_the_same_bit_for_bit(cache, tmp_path):
    for name in ("a", "b"):
        run_ranks(tmp_path / f"ranks-{name}", 2, undisturbed, cache, tmp_path / name)
    first, second = (trained(latest_checkpoint(tmp_path / name)) for name in ("a", "b"))
    assert same(first, second)


def undisturbed(rank: int, size: int, cache, out) -> dict[str, torch.Tensor]:
    train(tiny_config(cache, out, sampler=SIX, max_steps=3), World(rank, size))
    return {"none": torch.zeros(1)}
