"""`dflash demo`: the whole job on a small real model, by calling what the commands call, and one table."""

from __future__ import annotations

import json
import math
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash.cache.info import cache_info
from dflash.demo.gguf import convert_gguf, find_demo_gguf
from dflash.evaluate.config import EvalConfig
from dflash.evaluate.figures import EvalReport
from dflash.evaluate.run import evaluate
from dflash.extract.pipeline import ExtractConfig, ExtractReport, extract
from dflash.files import publish_bytes, publish_json
from dflash.train.batches import AnchorConfig
from dflash.train.config import TrainConfig, TrainResult
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.sampler import SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

BLOCK_SIZE = 4
"""Short: in a few minutes of training the far slots learn little, and verifying them costs as much."""
RESULT_NAME = "result.json"
TABLE_NAME = "table.txt"


def corpus_file(name: str) -> Path:
    """`train.jsonl` or `heldout.jsonl` of the corpus that comes with the package."""
    return Path(str(files("dflash.demo") / "data" / name))


def extract_config(target: Path, cache: Path) -> ExtractConfig:
    """Stage 1 of the demo."""
    return ExtractConfig.from_flags(
        target=str(target),
        data=(str(corpus_file("train.jsonl")),),
        out=cache,
        max_length=1536,
        bucket_edges=(128, 256, 512, 1024, 1536),
        tokens_per_batch=2048,
        shard_mb=64,
    )


def train_config(cache: Path, run: Path) -> TrainConfig:
    """Stage 2 of the demo: a small drafter, small steps, for a machine with two cores."""
    return TrainConfig(
        cache=cache,
        out=run,
        network=NetworkConfig(layers=3, block_size=BLOCK_SIZE),
        anchors=AnchorConfig(density=0.38),
        objective=ObjectiveConfig(BLOCK_SIZE, gamma=1.5, sampled_softmax=8192),
        sampler=SamplerConfig(tokens_per_batch=4400, batches_per_step=1),
        optim=OptimConfig("muon", lr=2e-3),
        epochs=None,
        max_steps=300,
        resume=True,
    )


def eval_config(target: Path, run: Path) -> EvalConfig:
    """Held-out prompts of every kind, decoded in float32, where output must not change by a token."""
    return EvalConfig(
        str(target),
        run,
        (str(corpus_file("heldout.jsonl")),),
        max_new_tokens=48,
        dtype="float32",
        per_kind=8,
    )


def run_demo(out: Path) -> str:
    """Do everything below `out` and return the table. What is there already is not done again.

    Raises:
        DflashError: as the stages raise it.
    """
    started = time.perf_counter()
    target, cache, run = out / "target", out / "cache", out / "run"
    convert_gguf(find_demo_gguf(), target)
    world = World()
    extracted = extract(extract_config(target, cache), world)
    trained = train(train_config(cache, run), world)
    evaluated = evaluate(eval_config(target, run))
    result = demo_result(cache_info(cache), extracted, trained, evaluated)
    result["seconds"] = round(time.perf_counter() - started, 1)
    result |= _measured_before(out, extracted, trained)
    table = demo_table(result, evaluated)
    publish_json(out / RESULT_NAME, result)
    publish_bytes(out / TABLE_NAME, f"{table}\n".encode())
    return table


def demo_result(
    info: dict[str, Any], extracted: ExtractReport, trained: TrainResult, evaluated: EvalReport
) -> dict[str, Any]:
    """What `result.json` holds, but for the total time."""
    total = evaluated.total
    return {
        "samples": info["samples"],
        "tokens": info["tokens"],
        "bytes": info["shard_bytes"],
        "bytes_per_token": info["bytes_per_token"],
        "extract_tokens_per_s": extracted.tokens_per_s,
        "train_steps": trained.steps,
        "train_tokens": trained.tokens,
        "train_seconds": trained.seconds,
        "loss": trained.loss,
        "mix": trained.mix,
        "walk_tau": total.walk_tau,
        "anchor_tau": total.anchor_tau,
        "speedup": total.speedup,
        "outputs_equal": total.equal,
        "outputs_total": total.prompts,
        "eval": evaluated.to_json(),
    }


def _measured_before(out: Path, extracted: ExtractReport, trained: TrainResult) -> dict[str, Any]:
    """Figures of stages that had nothing left to do, from the demo that did them."""
    path = out / RESULT_NAME
    before = json.loads(path.read_text()) if path.exists() else {}
    keys = [] if extracted.new_tokens else ["extract_tokens_per_s"]
    keys += [] if not math.isnan(trained.loss) else ["train_seconds", "loss", "mix"]
    return {key: before[key] for key in keys if key in before}


def demo_table(result: dict[str, Any], evaluated: EvalReport) -> str:
    """The demo's one table."""
    return "\n".join(
        [
            _row("cache", _cache_text(result)),
            _row("length mix", _mix_text(result["mix"])),
            _row("training", _training_text(result)),
            "",
            evaluated.table(),
            "",
            _equal_text(result),
        ]
    )


def _training_text(result: dict[str, Any]) -> str:
    return (
        f"{result['train_steps']} steps, {result['train_tokens']:,} tokens, {result['train_seconds']:.0f} s, "
        f"final loss {result['loss']:.3f}"
    )


def _equal_text(result: dict[str, Any]) -> str:
    return (
        f"Output unchanged on {result['outputs_equal']} of {result['outputs_total']} held-out prompts "
        f"(greedy, float32). {result['seconds']:.0f} s in all."
    )


def _row(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _cache_text(result: dict[str, Any]) -> str:
    return (
        f"{result['samples']:,} samples, {result['tokens']:,} tokens, {result['bytes'] / 2**20:,.0f} MiB, "
        f"{result['bytes_per_token']:,.0f} bytes/token, extracted at "
        f"{result['extract_tokens_per_s']:,.0f} tokens/s"
    )


def _mix_text(mix: dict[str, Any]) -> str:
    pairs = zip(mix["shares"], mix["quota"], strict=True)
    shares = "  ".join(f"{share:.1%}/{quota:.1%}" for share, quota in pairs)
    window = mix["variation"][0]
    spread = window["last"] if window["mean"] is None else window["mean"]
    return f"share/quota by bucket {shares}; total variation over {window['draws']} draws {spread:.4f}"
