"""Runs that follow a cache on the disk: one that arrives by and by, stalls, goes on again, or never comes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from support import write_cache
from tiny_runs import LENGTHS, Delivery, run_ranks, same, tiny_config, trained

from dflash.cache import growing
from dflash.cache.planned import PLANNED_NAME
from dflash.cache.reader import CacheReader
from dflash.errors import CacheCorrupt, CacheMismatch, CheckpointError, ConfigError, RankFailed, SourceStarved
from dflash.train import follower
from dflash.train.checkpoint import checkpoints
from dflash.train.follow_log import LOG_NAME
from dflash.train.followed import Starved
from dflash.train.follower import Patience
from dflash.train.following import FollowConfig
from dflash.train.holdout import HoldoutConfig, split
from dflash.train.record import METRICS_NAME, RunLog
from dflash.train.run import Run
from dflash.train.sampler import SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

ALONE = World()
FOLLOW = FollowConfig()
MANY = LENGTHS * 3
SMALL = SamplerConfig(tokens_per_batch=64, batches_per_step=2, min_ready=2, max_ready=4)
ORDER = [row for start in range(3) for row in range(start, 30, 3)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Looks at the disk all the time, and speaks of waiting at once."""
    monkeypatch.setattr(growing, "_QUIET_S", 0.0)
    monkeypatch.setattr(growing, "_QUIET_FACTOR", 0)
    monkeypatch.setattr(follower, "FIRST_WORD_S", 0.02)
    monkeypatch.setattr(follower, "_POLL_S", 0.01)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def behind_step(monkeypatch, actions: dict[int, Callable[[], None]]) -> None:
    """Call an action once, as soon as a step is recorded."""
    real, waiting = RunLog.add, dict(actions)

    def add(self, figures, *rest):
        real(self, figures, *rest)
        waiting.pop(figures["step"], lambda: None)()

    monkeypatch.setattr(RunLog, "add", add)


def following(cache, out, **changes):
    defaults = {"sampler": SMALL, "epochs": 2, "max_steps": None, "follow": FOLLOW, "save_every": 100}
    return tiny_config(cache, out, **(defaults | changes))


def consumed(out, config) -> list[tuple[int, int]]:
    """Tokens by bucket of each step."""
    return [tuple(line["tokens_by_bucket"]) for line in lines(out / METRICS_NAME)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A run that followed a cache that came in ten parts, and that cache."""
    folder = tmp_path_factory.mktemp("followed")
    delivery = Delivery(folder / "cache", MANY)
    patch = pytest.MonkeyPatch()
    patch.setattr(growing, "_QUIET_S", 0.0)
    parts = [ORDER[start : start + 3] for start in range(12, 30, 3)]
    delivery.bring(*ORDER[:12])
    behind_step(patch, {step: lambda p=p: delivery.bring(*p) for step, p in enumerate(parts[:-1], 1)})
    config = following(delivery.cache, folder / "run")
    timer = threading.Timer(0.7, delivery.finish)
    timer.start()
    result = train(config, ALONE)
    timer.join()
    patch.undo()
    return config, result


def test_a_run_trains_while_its_cache_is_written_and_takes_every_sample_once_an_epoch(followed):
    config, result = followed
    assert result.tokens == 2 * sum(MANY)
    record = lines(config.out / LOG_NAME)
    assert sum(len(part) for line in record[1:] for part in line.get("parts", [])) > 4
    assert [line["step"] for line in record[1:]] == list(range(len(record) - 1))
    assert record[-1]["digest"] == CacheReader(config.cache).manifest.content_digest
    assert len(record) - 1 < result.steps  # once the cache is complete there is nothing to decide
    first = lines(config.out / METRICS_NAME)[0]
    assert first["follow"]["committed"] < 1
    assert "follow" not in lines(config.out / METRICS_NAME)[-1]
    shares = result.mix["shares"]
    assert shares == pytest.approx(result.mix["quota"], abs=1e-9)


def test_the_record_repeats_a_run_bit_for_bit_though_the_cache_is_complete_by_then(followed, tmp_path):
    config, result = followed
    again = replace(config, out=tmp_path / "run", resume=True)
    again.out.mkdir()
    shutil.copy(config.out / LOG_NAME, again.out)
    repeated = train(again, ALONE)
    assert same(trained(repeated.checkpoint), trained(result.checkpoint))
    assert (again.out / LOG_NAME).read_bytes() == (config.out / LOG_NAME).read_bytes()


@pytest.mark.parametrize("crash_at", [3, pytest.param(7, marks=pytest.mark.long)])
def test_a_crash_and_a_resume_consume_the_recorded_order_bit_for_bit(
    followed, tmp_path, monkeypatch, crash_at
):
    config, result = followed
    broken = replace(config, out=tmp_path / "run", resume=True, save_every=2)
    broken.out.mkdir()
    shutil.copy(config.out / LOG_NAME, broken.out)

    def crash():
        raise RuntimeError("the machine went down")

    behind_step(monkeypatch, {crash_at: crash})
    with pytest.raises(RuntimeError, match="went down"):
        train(broken, ALONE)
    with (broken.out / LOG_NAME).open("a") as file:
        file.write('{"step": 99, "par')  # cut off in the middle of a line
    resumed = train(broken, ALONE)
    assert same(trained(resumed.checkpoint), trained(result.checkpoint))
    assert [line["step"] for line in lines(broken.out / METRICS_NAME)] == list(range(1, result.steps + 1))


def rank_of_a_repeat(rank: int, size: int, config) -> dict:
    return trained(train(config, World(rank, size, rank)).checkpoint)


def test_two_ranks_take_the_same_steps_as_one(followed, tmp_path):
    config, result = followed
    both = replace(config, out=tmp_path / "run", resume=True)
    both.out.mkdir()
    shutil.copy(config.out / LOG_NAME, both.out)
    one, other = run_ranks(tmp_path / "ranks", 2, rank_of_a_repeat, both)
    assert same(one, other)
    assert consumed(both.out, both) == consumed(config.out, config)
    alone = trained(result.checkpoint)
    for name, tensor in one.items():
        assert tensor.allclose(alone[name], atol=2e-3), name


def rank_of_a_follower(rank: int, size: int, config, delivery) -> dict:
    if rank == 1:
        timers = [threading.Timer(0.1 + n / 5, delivery.bring, ORDER[n * 6 : n * 6 + 6]) for n in range(5)]
        timers.append(threading.Timer(1.2, delivery.finish))
        for timer in timers:
            timer.start()
    return trained(train(config, World(rank, size, rank)).checkpoint)


def test_two_ranks_agree_on_what_has_arrived_while_it_arrives(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    config = following(delivery.cache, tmp_path / "run")
    one, other = run_ranks(tmp_path / "ranks", 2, rank_of_a_follower, config, delivery)
    assert same(one, other)
    assert sum(line["tokens"] for line in lines(config.out / METRICS_NAME)) == 2 * sum(MANY)
    assert len({str(line.get("parts")) for line in lines(config.out / LOG_NAME)[1:]}) > 2


def rank_that_fails(rank: int, size: int, config) -> dict:
    if rank == 1:
        behind_step(pytest.MonkeyPatch(), {2: lambda: (_ for _ in ()).throw(ConfigError("rank 1 is broken"))})
    with pytest.raises((ConfigError, RankFailed, RuntimeError)) as caught:
        train(config, World(rank, size, rank))
    assert "broken" in str(caught.value) or "gloo" in str(caught.value).lower()
    os._exit(0)  # the group cannot be left in order


def test_a_rank_that_fails_ends_the_others_though_they_wait_for_data(tmp_path, monkeypatch):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*ORDER[:12])
    config = following(delivery.cache, tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="rank-0"):  # both have ended well, without tensors
        run_ranks(tmp_path / "ranks", 2, rank_that_fails, config)


def test_a_source_that_stalls_ends_the_run_with_a_checkpoint_and_one_that_goes_on_lets_it_finish(
    tmp_path, capsys
):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*ORDER[:20])
    config = following(delivery.cache, tmp_path / "run", follow=FollowConfig(max_wait=0.3))
    with pytest.raises(SourceStarved, match=r"not delivered for 0.3 s .*% of the cache .*--resume"):
        train(config, ALONE)
    assert "follow: waiting for 0:00: " in capsys.readouterr().err
    steps = len(lines(config.out / METRICS_NAME))
    assert checkpoints(config.out)[0].name == f"step-{steps:06d}"
    delivery.finish()
    result = train(replace(config, resume=True), ALONE)
    assert result.tokens == 2 * sum(MANY)
    assert [line["step"] for line in lines(config.out / METRICS_NAME)] == list(range(1, result.steps + 1))


def rank_that_starves(rank: int, size: int, config) -> dict:
    with pytest.raises(SourceStarved):
        train(config, World(rank, size, rank))
    return trained(checkpoints(config.out)[0])


def test_all_ranks_end_together_when_the_source_stalls(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*ORDER[:20])
    config = following(delivery.cache, tmp_path / "run", follow=FollowConfig(max_wait=0.3))
    one, other = run_ranks(tmp_path / "ranks", 2, rank_that_starves, config)
    assert same(one, other)


LONG = [row for row, length in enumerate(MANY) if length > 32]
REST = [row for row, length in enumerate(MANY) if length <= 32]


def test_a_bucket_that_comes_first_is_not_drawn_before_the_others_are_there(tmp_path, capsys):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*LONG)
    config = following(delivery.cache, tmp_path / "run", follow=FollowConfig(max_wait=0.2))
    with pytest.raises(SourceStarved, match="buckets 16, 32 are due, but too little of them is committed"):
        train(config, ALONE)
    assert not (config.out / METRICS_NAME).exists()
    assert "buckets 16, 32 are due" in capsys.readouterr().err
    delivery.bring(*REST)
    delivery.finish()
    result = train(config, ALONE)
    assert max(result.mix["variation"][0]["last"], 0) < 0.1


def test_reweight_goes_on_without_a_bucket_for_as_long_as_it_is_empty(tmp_path, capsys, monkeypatch):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*LONG[:8])
    config = following(delivery.cache, tmp_path / "run", follow=FollowConfig(0.4, "reweight"), epochs=1)
    behind_step(monkeypatch, {1: delivery.finish})
    result = train(config, ALONE)
    figures = lines(config.out / METRICS_NAME)
    assert figures[0]["follow"]["aside"] == [16, 32]
    assert figures[0]["tokens_by_bucket"][:2] == [0, 0]
    assert result.tokens == sum(MANY)
    shown = capsys.readouterr().err
    assert "follow: going on without it after 0.4 s: buckets 16, 32 are due" in shown
    assert "delivered again" in shown
    assert next(line["aside"] for line in lines(config.out / LOG_NAME)[1:] if "aside" in line) == [0, 1]


def test_reweight_ends_by_an_error_too_when_nothing_comes_at_all(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*LONG[:8])
    config = following(delivery.cache, tmp_path / "run", follow=FollowConfig(0.15, "reweight"))
    with pytest.raises(SourceStarved, match="see whether `dflash extract` still runs"):
        train(config, ALONE)
    assert lines(config.out / METRICS_NAME)


def test_a_signal_ends_a_wait_with_a_checkpoint(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*ORDER[:20])
    config = following(delivery.cache, tmp_path / "run")
    timer = threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    stopped = train(config, ALONE)
    assert stopped.stopped == "SIGTERM"
    assert 0 < stopped.steps == len(lines(config.out / METRICS_NAME))
    delivery.finish()
    assert train(replace(config, resume=True), ALONE).tokens == 2 * sum(MANY)


def test_a_run_that_has_its_steps_does_not_wait_for_more(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*ORDER[:20])
    config = following(delivery.cache, tmp_path / "run", epochs=None, max_steps=2)
    assert train(config, ALONE).steps == 2


def test_a_run_may_be_started_before_its_extraction(tmp_path, capsys):
    config = following(tmp_path / "cache", tmp_path / "run", epochs=1)
    late = threading.Timer(0.3, lambda: Delivery(tmp_path / "cache", MANY).finish())
    late.start()
    assert train(config, ALONE).tokens == sum(MANY)
    late.join()
    assert f"{tmp_path / 'cache'} has no manifest.json" in capsys.readouterr().err


def test_an_extraction_that_never_begins_is_an_error_behind_max_wait(tmp_path):
    config = following(tmp_path / "cache", tmp_path / "run", follow=FollowConfig(0.1))
    with pytest.raises(SourceStarved, match=r"has no manifest.json; nothing is there yet"):
        train(config, ALONE)
    cache = Delivery(tmp_path / "cache", MANY).cache
    (cache / PLANNED_NAME).unlink()
    with pytest.raises(SourceStarved, match=r"has no planned.json, which says how much"):
        train(config, ALONE)


@pytest.mark.parametrize("compose", ["mixed", "bucketed"])
def test_a_complete_cache_can_be_followed_too_and_needs_no_plan(tmp_path, compose):
    cache = write_cache(tmp_path / "cache", LENGTHS)
    assert not (cache / PLANNED_NAME).exists()
    config = following(cache, tmp_path / "run", sampler=replace(SMALL, compose=compose))
    assert train(config, ALONE).tokens == 2 * sum(LENGTHS)


def test_held_out_samples_are_never_drawn_and_walked_over_once_the_cache_is_complete(tmp_path, monkeypatch):
    delivery = Delivery(tmp_path / "cache", MANY)
    delivery.bring(*ORDER[:20])
    config = following(
        delivery.cache,
        tmp_path / "run",
        holdout=HoldoutConfig(0.2),
        eval_every=1,
        sampler=replace(SMALL, min_ready=1),
    )
    behind_step(monkeypatch, {2: delivery.finish})
    result = train(config, ALONE)
    ids = CacheReader(delivery.cache).index.ids
    rows, held_out = split(ids, config.holdout)
    assert 0 < len(held_out) < 30
    assert result.tokens == 2 * sum(MANY[int(i) - 1] for i in ids[rows])
    assert lines(config.out / LOG_NAME)[-1]["digest"] == ordinary_digest(config)
    every = lines(config.out / METRICS_NAME)
    first = next(number for number, line in enumerate(every) if "kind" in line)
    assert "follow" in every[0]
    assert "follow" not in every[first - 1]
    assert every[-1]["kind"] == "evaluation"


def ordinary_digest(config) -> str:
    """The digest of what any run of the finished cache trains on."""
    run = replace(config, follow=None, out=config.out.with_name("ordinary"))
    return Run.open(run, ALONE).corpus.digest


def test_the_schedule_runs_on_the_planned_tokens(followed):
    config, _ = followed
    rates = [line["lr"] for line in lines(config.out / METRICS_NAME)]
    epochs = [line["epoch"] for line in lines(config.out / METRICS_NAME)]
    assert epochs == sorted(epochs)
    assert epochs[-1] == pytest.approx(2)
    peak = rates.index(max(rates))
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)


def test_following_and_not_following_are_different_runs(followed, tmp_path):
    config, _ = followed
    with pytest.raises(ConfigError, match="follow: was True, now None"):
        train(replace(config, follow=None, resume=True), ALONE)
    with pytest.raises(ConfigError, match="holds a run already"):
        train(config, ALONE)


def test_a_record_that_lacks_a_step_is_refused(followed, tmp_path):
    config, _ = followed
    out = tmp_path / "run"
    shutil.copytree(config.out, out)
    kept = (out / LOG_NAME).read_text().splitlines(keepends=True)
    (out / LOG_NAME).write_text("".join(kept[:2] + kept[3:]))
    with pytest.raises(CheckpointError, match="lacks steps"):
        train(replace(config, out=out, resume=True), ALONE)
    (out / LOG_NAME).write_text("".join(["not json\n", *kept[1:]]))
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(replace(config, out=out, resume=True), ALONE)


def test_a_record_of_another_cache_is_refused_and_one_that_is_not_resumed_is_replaced(followed, tmp_path):
    config, _ = followed
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(config.out / LOG_NAME, out)
    other = following(write_cache(tmp_path / "cache", LENGTHS, hidden=16), out, max_steps=1)
    with pytest.raises(CacheMismatch, match="is of another cache"):
        train(replace(other, resume=True), ALONE)
    assert train(other, ALONE).steps == 1


def test_a_fragment_that_is_gone_or_a_cache_that_was_replaced_is_noticed(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    cache = growing.GrowingCache(delivery.cache)
    delivery.bring(0, 1)
    names, _ = cache.look()
    assert len(names) == 2
    (delivery.cache / "index" / f"{names[0]}.arrow").unlink()
    with pytest.raises(CacheCorrupt, match="is gone"):
        cache.add([names])
    shutil.rmtree(delivery.cache)
    write_cache(delivery.cache, LENGTHS, hidden=16)
    with pytest.raises(CacheMismatch, match="replaced by another cache"):
        cache.look()


def test_rows_of_a_growing_cache_never_move_and_read_what_was_written(tmp_path):
    delivery = Delivery(tmp_path / "cache", MANY)
    cache = growing.GrowingCache(delivery.cache)
    seen: list[int] = []
    for start in range(0, 30, 10):
        delivery.bring(*ORDER[start : start + 10])
        names, complete = cache.look()
        assert not complete
        cache.add([names])
        ids = cache.reader.index.ids.tolist()
        assert ids[: len(seen)] == seen
        seen = ids
        for sample in cache.reader.read(range(len(ids))):
            assert len(sample.input_ids) == MANY[sample.id - 1]
    delivery.finish()
    assert cache.look() == ([], True)


def test_a_wait_is_mentioned_less_and_less_often(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(follower, "FIRST_WORD_S", 10.0)
    monkeypatch.setattr(follower.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(follower.time, "sleep", lambda _: now.__setitem__(0, now[0] + 1))
    patience = Patience(None)
    for _ in range(100):  # short waits for the same bucket, one after another
        patience.begin()
        for _ in range(20):
            assert patience.wait(Starved("bucket 256 is due", [0]), "7% is there", progress=True) is None
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "follow: waiting for 0:10: bucket 256 is due; 7% is there"
    assert 5 < len(said) < 12
    patience.begin()
    for _ in range(12):
        patience.wait(Starved("bucket 512 is due", [1]), "7% is there", progress=True)
    assert len(capsys.readouterr().err.splitlines()) == 1  # another bucket is news
