"""Whether drafters trained from int8 and fp8 caches are as good as those trained from exact states.

    python benchmarks/codec_quality.py CACHE --out FOLDER [--steps N] [--seeds N]

`CACHE` is a raw one, the demo's say. It is transcoded to int8 and fp8; from each of the three a drafter is
trained with every seed, by the demo's settings but for the number of steps, without the held-out samples.
Every drafter then walks over the held-out samples of the raw cache, since exact states are what a server has.
The order of the samples depends on a cache's checksums, so it differs between codecs as it does between
seeds. Rerunning goes on where it stopped. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.cache.reader import CacheReader
from dflash.cache.subset import subset
from dflash.cache.transcode import transcode
from dflash.demo.run import train_config
from dflash.files import publish_json
from dflash.head import HEAD_NAME, TargetHead
from dflash.pretrained import load_drafter
from dflash.train.checkpoint import latest_checkpoint
from dflash.train.evaluation import Evaluator
from dflash.train.holdout import HoldoutConfig, split
from dflash.train.trainer import train
from dflash.world import World

CODECS = ("raw", "int8", "fp8")
CPU = torch.device("cpu")
HELD_OUT = HoldoutConfig(share=0.06, samples=80)


def trained(cache: Path, run: Path, steps: int, seed: int) -> Path:
    """Train a drafter, or find the one that is there; returns its checkpoint."""
    config = train_config(cache, run)
    own = replace(HELD_OUT, samples=1)  # what a run walks over by itself is not used here
    anchors = replace(config.anchors, seed=seed)
    train(replace(config, max_steps=steps, seed=seed, anchors=anchors, holdout=own), World())
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    return checkpoint


def walk_tau(checkpoint: Path, cache: Path) -> float:
    """Acceptance length of the serving walk over the held-out samples of a cache."""
    head = TargetHead.load(cache / HEAD_NAME)
    with CacheReader(cache) as reader:
        _, rows = split(reader.index.ids, HELD_OUT)
        evaluator = Evaluator(subset(reader, rows), head, World(), CPU)
        return float(evaluator.walk(load_drafter(checkpoint, torch.float32))["walk_tau"])


def row(codec: str, taus: list[float], exact: list[float]) -> dict[str, Any]:
    """Figures of one codec over its seeds; `spread` is the standard deviation, `to_raw` to raw's mean."""
    spread = float(np.std(exact, ddof=1)) if len(exact) > 1 else float("nan")
    difference = float(np.mean(taus) - np.mean(exact))
    return {
        "codec": codec,
        "walk_tau": [round(tau, 4) for tau in taus],
        "mean": round(float(np.mean(taus)), 4),
        "spread": round(float(np.std(taus, ddof=1)), 4) if len(taus) > 1 else None,
        "to_raw": round(difference, 4),
        "to_raw_in_spreads": round(difference / spread, 2) if spread > 0 else None,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For the terminal."""
    lines = [f"{'codec':<7}{'walk tau, mean':>15}{'spread':>9}{'to raw':>9}  by seed"]
    for one in rows:
        seeds = "  ".join(f"{tau:.4f}" for tau in one["walk_tau"])
        spread = "-" if one["spread"] is None else f"{one['spread']:.4f}"
        lines.append(f"{one['codec']:<7}{one['mean']:>15.4f}{spread:>9}{one['to_raw']:>+9.4f}  {seeds}")
    return "\n".join(lines)


def main() -> None:
    """Transcode, train, walk, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    caches = {"raw": options.cache}
    for codec in CODECS[1:]:
        caches[codec] = options.out / f"cache-{codec}"
        print(transcode(options.cache, caches[codec], codec).text(), flush=True)
    taus: dict[str, list[float]] = {codec: [] for codec in CODECS}
    for seed in range(options.seeds):
        for codec in CODECS:  # in turn, so that what the machine does meanwhile falls on all
            run = options.out / f"{options.steps}-steps" / f"{codec}-{seed}"
            taus[codec].append(walk_tau(trained(caches[codec], run, options.steps, seed), options.cache))
            print(f"{codec} seed {seed}: walk tau {taus[codec][-1]:.4f}", flush=True)
    rows = [row(codec, taus[codec], taus["raw"]) for codec in CODECS]
    print(table(rows))
    result = {"cache": str(options.cache), "steps": options.steps, "seeds": options.seeds, "codecs": rows}
    publish_json(options.out / "codec_quality.json", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
