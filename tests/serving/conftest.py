"""The demo's target and drafter, and prompts that were held out from its training."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from clients import NEW_TOKENS, ROOT, decode_all

from dflash.decode.config import Generation
from dflash.demo.run import corpus_file
from dflash.drafter import Drafter
from dflash.evaluate.pair import open_pair
from dflash.export.give import ExportConfig, export_drafter
from dflash.extract.prompts import load_prompts
from dflash.target import Target

logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line a request would hide the figures
PROMPTS = 20
LONGEST = 400
"""Tokens of a prompt: long documents cost minutes in float32 and show nothing more."""


class Demo(NamedTuple):
    """What `make demo` left, opened in float32."""

    target_folder: Path
    drafter_folder: Path
    target: Target
    drafter: Drafter
    prompts: list[list[int]]


def _prompts(tokenizer: Any) -> list[list[int]]:
    """The same share of every kind of held-out prompt, none longer than `LONGEST` tokens."""
    prompts = load_prompts((str(corpus_file("heldout.jsonl")),), tokenizer)
    kinds: dict[str | None, list[list[int]]] = {}
    for prompt in prompts:
        if len(prompt.input_ids) <= LONGEST:
            kinds.setdefault(prompt.kind, []).append(prompt.input_ids.tolist())
    share = -(-PROMPTS // len(kinds))
    return [ids for found in kinds.values() for ids in found[:share]][:PROMPTS]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The drafter is the one that `dflash export --to zlab` takes from the run."""
    folder = Path(os.environ.get("DFLASH_DEMO", ROOT / "demo"))
    if not (folder / "result.json").exists():
        pytest.fail(f"{folder} holds no finished demo; run `make demo`, or `make serving-test`, which does")
    drafter_folder = tmp_path_factory.mktemp("demo") / "zlab"
    export_drafter(ExportConfig(folder / "run", drafter_folder, "zlab"))
    target, drafter, tokenizer = open_pair(str(folder / "target"), drafter_folder, dtype="float32")
    return Demo(folder / "target", drafter_folder, target, drafter, _prompts(tokenizer))


@pytest.fixture(scope="session")
def ours(demo: Demo) -> list[Generation]:
    """Our own greedy speculative answers to the demo's prompts."""
    return decode_all(demo.target, demo.drafter, demo.prompts, NEW_TOKENS)
