"""The demo's flow, with a tiny target in the place of the real one."""

from __future__ import annotations

import json
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


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    chats = {"train.jsonl": _chats(tmp_path / "t.jsonl", 9), "heldout.jsonl": _chats(tmp_path / "h.jsonl", 2)}
    full = demo.train_config

    def short(cache: Path, run: Path) -> Any:
        return replace(full(cache, run), max_steps=2)

    monkeypatch.setattr(demo, "find_demo_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(
        demo, "convert_gguf", lambda _source, out: out.exists() or write_target(out, layers=8)
    )
    monkeypatch.setattr(demo, "corpus_file", chats.__getitem__)
    monkeypatch.setattr(demo, "train_config", short)
    return tmp_path / "demo"


def test_the_demo_leaves_its_result_and_the_table_it_prints(tiny: Path) -> None:
    table = demo.run_demo(tiny)
    result = json.loads((tiny / "result.json").read_text())
    assert result.keys() >= KEYS
    assert result["outputs_equal"] == result["outputs_total"] == 2
    assert (tiny / "table.txt").read_text() == f"{table}\n"
    assert "walk tau" in table
    assert "share/quota" in table
    assert {"target", "cache", "run"} <= {path.name for path in tiny.iterdir()}


def test_the_demo_again_starts_from_what_is_there(tiny: Path) -> None:
    demo.run_demo(tiny)
    first = json.loads((tiny / "result.json").read_text())
    demo.run_demo(tiny)
    again = json.loads((tiny / "result.json").read_text())
    assert again["train_steps"] == first["train_steps"]
    for key in ("walk_tau", "extract_tokens_per_s", "train_seconds", "loss"):
        assert again[key] == first[key]
