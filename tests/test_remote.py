"""A cache by URL, from the command line: extracted, looked at, trained from; the store comes and goes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from commandline import done, refused, run
from object_store import google_environment, writers_expire
from safetensors.torch import load_file
from support import write_cache, write_target
from train.tiny_runs import LENGTHS

from dflash import store
from dflash.cache.mirror import FOLDER_VARIABLE, local_folder
from dflash.cache.reader import CacheReader


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def extract(target, tmp_path, monkeypatch) -> tuple[object, ...]:
    """Flags of an extraction of 24 conversations in several shards, without --out."""
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {n}"},
                {"role": "assistant", "content": "word " * (1 + 5 * n % 17)},
            ]
        }
        for n in range(24)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--max-length", 128, "--bucket-edges", "32,64,128", "--tokens-per-batch", 128)
    return ("extract", "--target", target, "--data", data, "--taps", "1,3", *flags, "--nproc", 1)


def everything(place: object) -> dict[int, bytes]:
    with CacheReader(local_folder(str(place))) as reader:
        return {
            s.id: s.hidden_states.float().numpy().tobytes() for s in reader.read(range(len(reader.index)))
        }


def test_extraction_whose_store_dies_midway_is_finished_by_another_machine(
    extract, bucket, s3, tmp_path, monkeypatch
):
    done(*extract, "--out", tmp_path / "local")
    url, fragments = f"{bucket}/cache", []

    def away(method: str, path: str) -> str | None:
        if method == "PUT" and "/index/" in path:
            fragments.append(path)
        return "drop" if len(fragments) > 1 else None

    s3.fault = away
    with monkeypatch.context() as patch:
        patch.setattr(store, "RETRY_S", 0.3)
        assert "run the same command again when the store answers" in refused(*extract, "--out", url)
    s3.reset()
    writers_expire(monkeypatch)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "second"))
    assert 0 < json.loads(done("cache", "info", url, "--json"))["samples"] < 24
    assert "run the same `dflash extract`" in refused("train", "--cache", url, "--out", tmp_path / "run")
    done(*extract, "--out", url)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "third"))
    assert everything(url) == everything(tmp_path / "local")
    s3.requests.clear()
    done(*extract, "--out", url)  # finished: nothing is written
    assert not [request for request in s3.requests if request.startswith("PUT")]
    assert "dtype: this 'float32', other 'bfloat16'" in refused(*extract, "--dtype", "float32", "--out", url)


def started(tmp_path: Path, machine: str, *flags: object) -> subprocess.Popen[str]:
    """The program in a process of its own, on a machine of this name."""
    return subprocess.Popen(
        [sys.executable, "-m", "dflash", *map(str, flags)],
        env={**os.environ, FOLDER_VARIABLE: str(tmp_path / machine)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_of_two_machines_that_extract_to_one_url_at_a_time_one_does_it(extract, bucket, s3, tmp_path):
    url, other_has_ended = f"{bucket}/cache", threading.Event()

    def wait(method: str, path: str) -> None:
        if method == "PUT" and "/index/" in path:
            assert other_has_ended.wait(100)

    s3.fault = wait
    runs = [started(tmp_path, machine, *extract, "--out", url) for machine in ("one", "two")]
    with ExitStack() as stack:
        for run_ in runs:
            stack.callback(run_.kill)
        while all(run_.poll() is None for run_ in runs):
            time.sleep(0.05)
        other_has_ended.set()
        said = [run_.communicate()[0] for run_ in runs]
    assert sorted(run_.returncode for run_ in runs) == [0, 2], said
    loser = said[[run_.returncode for run_ in runs].index(2)].strip().splitlines()[-1]
    assert f"{url} is being written by" in loser
    done("cache", "verify", url, "--deep")
    done(*extract, "--out", tmp_path / "local")
    assert everything(url) == everything(tmp_path / "local")


@pytest.mark.long
def test_a_run_that_is_killed_is_gone_on_with_at_once_by_its_own_machine(
    extract, bucket, s3, tmp_path, monkeypatch
):
    url, puts, second, killed = f"{bucket}/cache", [], threading.Event(), threading.Event()

    def wait(method: str, path: str) -> None:
        if method == "PUT" and "/index/" in path:
            puts.append(path)
            if len(puts) == 2:
                second.set()
                assert killed.wait(100)

    s3.fault = wait
    first = started(tmp_path, "one", *extract, "--out", url)
    with ExitStack() as stack:
        stack.callback(first.communicate)
        stack.callback(killed.set)
        stack.callback(first.kill)
        assert second.wait(100)
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "two"))
        assert f"(process {first.pid}) since" in refused(*extract, "--out", url)
        assert "is being written by" in refused("cache", "repair", url)
    s3.reset()
    assert "if it is dead run the same command again in" in refused(*extract, "--out", url)
    again = started(tmp_path, "one", *extract, "--nproc", 2, "--out", url)  # ranks that commit in one order
    assert again.communicate()[0]
    assert again.returncode == 0
    done("cache", "verify", url, "--deep")
    assert len(everything(url)) == 24


def test_training_from_a_url_takes_the_steps_of_training_from_the_folder(bucket, tmp_path, monkeypatch):
    cache, url = write_cache(tmp_path / "cache", LENGTHS), f"{bucket}/cache"
    done("cache", "push", cache, url)
    monkeypatch.setenv("DFLASH_LOCAL_CACHE_GB", "4e-5")  # less than the cache: copies come and go
    flags = ("--layers", 1, "--block-size", 4, "--tokens-per-batch", 64, "--batches-per-step", 2)
    flags += ("--max-steps", 4, "--holdout", 0, "--min-ready", 1, "--max-ready", 4, "--nproc", 1)
    for place, name in ((cache, "one"), (url, "two")):
        done("train", "--cache", place, "--out", tmp_path / name, *flags)
    one, two = (
        load_file(max((tmp_path / name).rglob("model.safetensors"), key=str)) for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    assert all(bool((one[name] == two[name]).all()) for name in one)


def test_a_cache_in_googles_store_is_extracted_looked_at_trained_from_and_repaired(
    extract, bucket, s3, tmp_path, monkeypatch
):
    for name, value in google_environment(s3.server_address[1]).items():
        monkeypatch.setenv(name, value)
    url = f"{bucket}/cache".replace("s3://", "gs://")
    done(*extract, "--out", tmp_path / "local")
    done(*extract, "--out", url)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "second"))
    done("cache", "verify", url, "--deep")
    assert everything(url) == everything(tmp_path / "local")
    flags = ("--layers", 1, "--block-size", 4, "--tokens-per-batch", 128, "--batches-per-step", 1)
    flags += ("--max-steps", 2, "--holdout", 0, "--min-ready", 1, "--max-ready", 2, "--nproc", 1)
    done("train", "--cache", url, "--out", tmp_path / "run", *flags)
    there = store.Store(url)
    shard = next(iter(there.sizes("shards")))
    there.remove(shard)
    assert shard in run("cache", "verify", url).output
    assert "samples to make again" in done("cache", "repair", url)
    done(*extract, "--out", url)
    done("cache", "verify", url, "--deep")
    assert everything(url) == everything(tmp_path / "local")


def test_every_tool_takes_a_url(bucket, tmp_path, monkeypatch):
    cache, url = write_cache(tmp_path / "cache", LENGTHS), f"{bucket}/cache"
    assert "are there" in done("cache", "push", cache, url)
    assert "are there" in done("cache", "push", cache, url)  # again: nothing to do
    other = write_cache(tmp_path / "other", LENGTHS, seed=1)
    assert "holds something else" in refused("cache", "push", other, url)
    assert url in done("cache", "info", url)
    assert done("cache", "ls", url, "--json") == done("cache", "ls", cache, "--json")
    done("cache", "verify", url)
    done("cache", "verify", url, "--deep")
    done(
        "sample",
        url,
        "--settings",
        "tokens-per-batch=64,batches-per-step=2,min-ready=1,max-ready=4",
        "--ranks",
        2,
    )
    done("cache", "subset", url, "--where", "length < 40", "--out", f"{bucket}/small")
    done("cache", "subset", cache, "--where", "length < 40", "--out", tmp_path / "small")
    shutil.rmtree(tmp_path / "mirrors")
    assert everything(f"{bucket}/small") == everything(tmp_path / "small")
    done("cache", "diff", f"{bucket}/small", tmp_path / "small")
    done("cache", "drop-taps", url, "--keep", "1", "--out", f"{bucket}/one-tap")
    done("cache", "verify", f"{bucket}/one-tap", "--deep")
    assert everything(f"file://{cache}") == everything(url)


def test_urls_that_cannot_be_used_are_one_line(bucket, tmp_path, s3, monkeypatch):
    assert "is not a cache" in refused("cache", "info", f"{bucket}/nothing")
    assert "unknown kind of URL" in refused("cache", "info", "ftp://host/cache")
    assert "here a path is needed" in run("train", "--cache", tmp_path, "--out", "s3://b/run").output
    monkeypatch.setattr(store, "RETRY_S", 0.3)
    s3.away = True
    assert "when the store answers" in refused("cache", "info", f"{bucket}/cache")
