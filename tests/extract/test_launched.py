"""The command as users start it, with several processes under torch's launcher. Imports take seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from chat_families import dialogue, write_jsonl
from extract_runs import samples_of
from support import write_target

pytestmark = pytest.mark.long
SAMPLES = 3000


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    target = write_target(tmp_path / "target")
    rows = [{"messages": dialogue(f"question {n}", "word " * (1 + n % 23))} for n in range(SAMPLES)]
    data = write_jsonl(tmp_path / "data.jsonl", *rows)
    flags = ["--target", str(target), "--data", data, "--out", str(tmp_path / "cache"), "--taps", "1,3"]
    flags += ["--max-length", "256", "--nproc", "2", "--tokens-per-batch", "256"]
    return [sys.executable, "-m", "dflash", "extract", *flags]


def started(command, out):
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not list(out.glob("shards/*/*")):
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_and_the_same_command_goes_on(command, tmp_path, number):
    process = started(command, tmp_path / "cache")
    process.send_signal(number)
    before = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert time.monotonic() - before < 20
    assert f"stopped by {signal.Signals(number).name} after" in output
    assert "run the same command again to go on" in output
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{SAMPLES:,} samples" in finished.stdout
    assert len(samples_of(tmp_path / "cache")) == SAMPLES


def test_a_killed_rank_ends_the_run(command, tmp_path):
    process = started(command, tmp_path / "cache")
    children = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was ended by SIGKILL, perhaps for lack of memory" in errors
    assert "Traceback" not in errors
    subprocess.run(command, capture_output=True, check=True)
    assert len(samples_of(tmp_path / "cache")) == SAMPLES


def test_the_launched_ranks_of_a_replica_finish_together(command, tmp_path):
    done = subprocess.run(
        [*command, "--tp", "2", "--tokens-per-batch", "2048"], capture_output=True, text=True, check=True
    )
    assert f"{SAMPLES:,} samples" in done.stdout
    assert len(samples_of(tmp_path / "cache")) == SAMPLES
    assert not list((tmp_path / "cache").glob("shards/*/rank1-*"))


def test_a_user_error_of_all_ranks_is_one_of_theirs(command):
    done = subprocess.run([*command, "--taps", "1,99"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Error: tap 99 is outside the target's layers 0..5" in done.stderr
