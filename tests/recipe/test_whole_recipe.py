"""A whole recipe with the real commands on a tiny target, and the processes that they run in."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import write_target

from dflash.cli import cli
from dflash.recipe.execute import Outcome, execute
from dflash.recipe.reading import load_recipe
from dflash.recipe.run import Options, preview, run_recipe

RECIPE = """
[run]
out = "out"
target = "target"
data = "train.jsonl"
holdout = "heldout.jsonl"
[extract]
taps = [1, 3]
max-length = 128
bucket-edges = [48, 128]
dtype = "float32"
[train]
layers = 1
block-size = 4
tokens-per-batch = 256
batches-per-step = 2
max-steps = 3
[eval]
max-new-tokens = 6
[export]
to = "zlab"
[report]
samples = 0
"""


def place_of(folder: Path) -> Path:
    write_target(folder / "target")
    for name, count in (("train", 24), ("heldout", 2)):
        rows = [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "sun " * n}]}
            for n in range(1, count + 1)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "recipe.toml"
    path.write_text(RECIPE)
    return path


class Here:
    """Runs the real commands in this process, which has loaded already what they need."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, arguments: Sequence[str], *, lock: int | None, quiet: bool = False) -> Outcome:
        self.ran.append("plan" if "--plan" in arguments else arguments[0])
        result = CliRunner().invoke(cli, list(arguments))
        assert result.exit_code == 0, result.output
        return Outcome(0, result.stdout.splitlines())


def test_a_recipe_with_the_real_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    path, here, shown = place_of(tmp_path), Here(), []

    def run(*sets: str) -> list[str]:
        here.ran.clear()
        assert run_recipe(load_recipe(cli.commands, path, sets), Options(), here, shown.append) == 0
        return list(here.ran)

    assert run() == ["plan", "extract", "train", "eval", "export", "report"]
    assert "2/2" in shown[-1]
    out = tmp_path / "out"
    assert (out / "export" / "model.safetensors").exists()
    assert "<html" in (out / "report.html").read_text()
    assert run() == []

    # a lost shard is made again, with the same content, so nothing behind it runs
    next(out.glob("cache-*/shards/*/*.safetensors")).unlink()
    assert run() == ["cache", "extract"]

    # training that was cut off goes on in its folder; here its newest checkpoint is lost
    (run_folder,) = out.glob("train-*")
    newest = run_folder / "checkpoints" / "step-000003" / "trainer" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert run("train.keep=2")[0] == "train"
    assert run("train.keep=2") == []

    (tmp_path / "target").rename(tmp_path / "moved")
    assert run("train.keep=2", f"run.target={tmp_path / 'moved'}") == []


def test_a_plan_loads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    path, here, shown = place_of(tmp_path), Here(), []
    import dflash.target_files

    monkeypatch.setattr(dflash.target_files, "load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    assert preview(load_recipe(cli.commands, path), Options(), here, shown.append) == 0
    assert here.ran == ["plan"]
    assert not (tmp_path / "out").exists()


def test_the_command_answers_for_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nlrr = 1\n")
    result = CliRunner().invoke(cli, ["run", str(path), "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert "no key 'lrr'" in result.stderr
    monkey = {"RANK": "0", "WORLD_SIZE": "2"}
    result = CliRunner().invoke(cli, ["run", str(path)], env=monkey)
    assert (result.exit_code, "without torchrun" in result.stderr) == (2, True)


def test_a_stage_is_a_process_whose_output_is_shown_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"], lock=None).output[0].startswith("dflash, version")
    assert "dflash, version" in capfd.readouterr().out
    outcome = execute(["--version"], lock=None, quiet=True)
    assert (outcome.code, capfd.readouterr().out) == (0, "")
    assert execute(["train", "--nonsense"], lock=None).code == 2
    assert "--nonsense" in capfd.readouterr().err


_STAGE = """
import fcntl, os, signal, sys, time
from dflash.recipe.child import end_with
end_with(int(sys.argv[1]))
def stop(number, frame):
    print("saving", flush=True)
    time.sleep(0.2)
    open(sys.argv[2], "w").write(str(number))
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
open(sys.argv[2] + ".ready", "w").close()
time.sleep(60)
"""
_RUN = """
import subprocess, sys
from dflash.recipe import execute
from dflash.recipe.state import locked
from pathlib import Path
popen = subprocess.Popen
def stand_in(line, **more):
    return popen([sys.executable, "-c", sys.argv[1], line[3], sys.argv[2]], **more)
execute.subprocess.Popen = stand_in
with locked(Path(sys.argv[3])) as lock:
    sys.exit(execute.execute(["train"], lock=lock).code)
"""


def started(note: Path, folder: Path) -> subprocess.Popen[str]:
    """A run whose stage is at work."""
    line = [sys.executable, "-c", _RUN, _STAGE, str(note), str(folder)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    while not note.with_name("note.ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_stage_and_its_exit_code_is_that_of_the_run(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path / "note", tmp_path) as process:
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
        assert process.stdout.read() == "saving\n"
    assert (tmp_path / "note").read_text() == str(int(number))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_stage_whose_run_is_killed_saves_and_ends_and_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dflash.recipe.state import locked

    with started(tmp_path / "note", tmp_path) as process:
        process.kill()
        process.wait()
        with locked(tmp_path):
            assert (tmp_path / "note").read_text() == str(int(signal.SIGTERM))
        assert "waiting for it" in capsys.readouterr().err


STAGES = ("plan", "extract", "train", "eval", "export", "report")


def command(folder: Path) -> dict[str, Any]:
    """How the recipe of a folder is run."""
    env = os.environ | {"DFLASH_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-m", "dflash", "run", str(folder / "recipe.toml")], "env": env}


def run_whole(folder: Path) -> str:
    return subprocess.run(**command(folder), capture_output=True, text=True, check=True).stdout


def records(folder: Path) -> dict[str, dict[str, Any]]:
    with suppress(FileNotFoundError):
        return json.loads((folder / "out" / "run-state.json").read_text())["stages"]
    return {}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Seconds that each stage takes when nothing disturbs it."""
    folder = place_of(tmp_path_factory.mktemp("usual")).parent
    run_whole(folder)
    return {name: records(folder)[name]["seconds"] for name in STAGES}


def kill_in(folder: Path, stage: str, after: float, *, both: bool) -> bool:
    """Kill the run so many seconds into a stage, and the stage too if both; whether it was still at work."""
    with subprocess.Popen(**command(folder), stdout=subprocess.DEVNULL) as process:
        while stage not in records(folder):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(after)
        found = ["ps", "--ppid", str(process.pid), "-o", "pid="]
        stages = subprocess.run(found, capture_output=True, text=True, check=False).stdout.split()
        for pid in (process.pid, *(map(int, stages) if both else ())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return not records(folder)[stage]["done"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_kill_9_in_every_stage_and_the_same_command_goes_on(
    tmp_path: Path, usual: dict[str, float], seed: int
) -> None:
    """The run is killed alone, so that its stage saves and ends, and with its stage, in turn."""
    chance, folder = random.Random(seed), place_of(tmp_path).parent
    hit = [
        kill_in(folder, stage, chance.random() * usual[stage], both=(seed + number) % 2 == 1)
        for number, stage in enumerate(STAGES)
    ]
    assert any(hit)
    assert "2/2" in run_whole(folder)
    assert run_whole(folder).count("whole and unchanged") == len(STAGES)
    out = folder / "out"
    assert len(list(out.glob("cache-*"))) == len(list(out.glob("train-*"))) == 1
    assert not [path for path in out.glob("*.old-*") if not path.name.startswith("export.")]
