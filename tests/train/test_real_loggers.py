"""What the real packages keep of a run, read back from their own files; skipped where they are missing.

pip install 'dflash-trainer[tensorboard,wandb,trackio]'
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support import write_cache
from tiny_runs import LENGTHS

from dflash.train.loggers import LOGGERS, scalars
from dflash.train.record import METRICS_NAME

EDGES = (16, 32, 64)
Curves = dict[int, dict[str, float]]
"""The figures of each step, by name."""


def command(cache: Path, run: Path, logger: str) -> list[str]:
    given = {"cache": cache, "out": run, "layers": 2, "block-size": 4, "tokens-per-batch": 64}
    given |= {"batches-per-step": 2, "min-ready": 1, "max-ready": 4, "max-steps": 4, "eval-every": 2}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "dflash", "train", *flags, "--holdout", "0.35", "--log", logger]


def start(folder: Path, arguments: list[str]) -> None:
    """The command as users give it, without network, and with all that the packages write in this folder."""
    own = {f"WANDB_{name}_DIR": str(folder / "wandb") for name in ("CONFIG", "CACHE", "DATA")}
    own |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(arguments, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr


@pytest.fixture(scope="module", params=LOGGERS)
def logged(request, tmp_path_factory) -> tuple[str, Path]:
    """A run that stopped behind its first step and went on; another one beside it, of the same name."""
    logger = request.param
    if find_spec(logger) is None:
        pytest.skip(f"{logger} is not installed")
    folder = tmp_path_factory.mktemp(logger)
    cache = write_cache(folder / "cache", LENGTHS)
    arguments = command(cache, folder / "monday" / "run", logger)
    start(folder, [*arguments, "--max-minutes", "1e-6"])
    start(folder, command(cache, folder / "tuesday" / "run", logger))
    start(folder, [*arguments, "--resume"])
    return logger, folder


def add(curves: Curves, step: int, figures: dict[str, float]) -> None:
    """A figure that comes twice, with a step and with its evaluation, is the same."""
    known = curves.setdefault(step, {})
    assert {name: value for name, value in known.items() if figures.get(name, value) != value} == {}
    known |= figures


def expected(run: Path) -> Curves:
    curves: Curves = {}
    for text in (run / METRICS_NAME).read_text().splitlines():
        line = json.loads(text)
        add(curves, line["step"], scalars(line, EDGES))
    return curves


def tensorboard_curves(run: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    curves: Curves = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            add(curves, event.step, {name: event.value})
    return curves


def trackio_curves(run: Path) -> Curves:
    rows = sqlite3.connect(run.parent.parent / "trackio" / "dflash.db").execute(
        "SELECT step, metrics FROM metrics WHERE run_name = ?",
        (f"run-{(run / 'trackio-id').read_text()}",),
    )
    curves: Curves = {}
    for step, metrics in rows:
        add(curves, step, json.loads(metrics))
    return curves


def wandb_records(path: Path):
    """The records of a file of wandb: seven bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_curves(run: Path) -> Curves:
    """Those of all starts, which `wandb sync` puts together by their id."""
    curves: Curves = {}
    for path in (run / "wandb").glob("offline-run-*/*.wandb"):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == (run / "wandb-id").read_text()
            if record.WhichOneof("record_type") == "history":
                figures = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                named = {name: value for name, value in figures.items() if not name.startswith("_")}
                add(curves, record.history.step.num, named)
    return curves


READERS = {"tensorboard": tensorboard_curves, "wandb": wandb_curves, "trackio": trackio_curves}


def test_all_figures_of_all_starts_arrive_at_their_steps_under_their_names(logged) -> None:
    logger, folder = logged
    for parent in ("monday", "tuesday"):
        run = folder / parent / "run"
        curves, wanted = READERS[logger](run), expected(run)
        assert wanted.keys() == {1, 2, 3, 4}
        assert {"loss", "walk_tau", "accuracy/1", "loss_by_bucket/64"} <= wanted[4].keys()
        assert curves.keys() == wanted.keys()
        for step, figures in wanted.items():
            assert curves[step].keys() == figures.keys()
            ours, theirs = ([part[name] for name in figures] for part in (figures, curves[step]))
            # TensorBoard keeps float32
            np.testing.assert_allclose(theirs, ours, rtol=1e-6)
