"""The demo's flow, with a tiny target in the place of the real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import write_target

from dflash.demo import run as demo

KEYS = {
    "tokens",
    "bytes_per_token",
    "extract_tokens_per_s",
    "train_seconds",
    "walk_tau",
    "anchor_tau",
    "speedup",
    "outputs_equal",
    "outputs_total",
    "seconds",
}


def _chats(path: Path, count: int) -> Path:
    rows = [
        {
            "kind": "short",
            "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes " * n}],
        }
        for n in range(3, 3 + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a demo of two steps is done."""
    folder, full = tmp_path_factory.mktemp("demo"), demo.train_config
    chats = {"train.jsonl": _chats(folder / "t.jsonl", 9), "heldout.jsonl": _chats(folder / "h.jsonl", 2)}

    def short(cache: Path, run: Path) -> Any:
        return replace(full(cache, run), max_steps=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "home"))
        patch.setattr(demo, "find_demo_gguf", lambda: folder / "model.gguf")
        patch.setattr(demo, "convert_gguf", lambda _source, out: out.exists() or write_target(out, layers=8))
        patch.setattr(demo, "corpus_file", chats.__getitem__)
        patch.setattr(demo, "train_config", short)
        yield folder / "demo"


@pytest.fixture(scope="module")
def first(tiny: Path) -> dict[str, str]:
    """What the demo returned, and what it left in its files, when it was done for the first time."""
    table = demo.run_demo(tiny)
    return {"table": table} | {name: (tiny / name).read_text() for name in ("result.json", "table.txt")}


def test_the_demo_leaves_its_result_and_the_table_it_prints(tiny: Path, first: dict[str, str]) -> None:
    table, result = first["table"], json.loads(first["result.json"])
    assert result.keys() >= KEYS
    assert result["outputs_equal"] == result["outputs_total"] == 2
    assert first["table.txt"] == f"{table}\n"
    assert "walk tau" in table
    assert "share/quota" in table
    assert {"target", "cache", "run"} <= {path.name for path in tiny.iterdir()}


def test_the_demo_again_starts_from_what_is_there(tiny: Path, first: dict[str, str]) -> None:
    before = json.loads(first["result.json"])
    demo.run_demo(tiny)
    again = json.loads((tiny / "result.json").read_text())
    assert again["train_steps"] == before["train_steps"]
    for key in ("walk_tau", "extract_tokens_per_s", "train_seconds", "loss"):
        assert again[key] == before[key]
