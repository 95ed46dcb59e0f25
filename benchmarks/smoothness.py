"""Does the length mix make the loss rough? The same drafter on the same tokens, drawn in different ways.

    .venv/bin/python benchmarks/smoothness.py demo/cache [--steps N] [--seeds N] [--only NAME ...]

The cache is the demo's (`make demo`): hidden states of a real 135 M target. Each setting trains a small
drafter from the same weights on the same number of tokens, once for each seed; one sample in 40 is held out.
Printed are means over the seeds, and their standard deviation:

- roughness: standard deviation of the step-to-step change of the loss behind the first quarter of the steps;
- grad norm: standard deviation of the gradient norm there, over its mean;
- walk: tokens a cycle of the serving walk adds on the held-out samples at the end;
- loss: mean over the last fifth of these steps;
- mix: how far the tokens of a step are from the corpus's mix (total variation), mean over steps;
- samples: of a step, mean.

`fifo_10_60` is the live queue of earlier pipelines with a producer that delivers the longest samples first;
what arrives at the other queues is in random order, as rows of a cache are. `uniform` shuffles the whole
corpus. The last line is JSON. On two quiet cores it takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash.train.batches import AnchorConfig
from dflash.train.compare import roughness
from dflash.train.config import TrainConfig
from dflash.train.holdout import HoldoutConfig
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.pools import Draw
from dflash.train.producer import arrival_order, select
from dflash.train.run import Run
from dflash.train.runs import METRICS_NAME
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, Step
from dflash.train.trainer import ranks
from dflash.world import World

QUEUE = {"compose": "bucketed", "min_ready": 30, "max_ready": 90}
SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "fifo_10_60": ("longest-first", {**QUEUE, "policy": "fifo", "min_ready": 10, "max_ready": 60}),
    "fifo_30_90": ("corpus", {**QUEUE, "policy": "fifo"}),
    "shuffle_30_90": ("corpus", {**QUEUE, "policy": "shuffle"}),
    "stratified_bucketed": ("corpus", {**QUEUE, "policy": "stratified"}),
    "stratified_mixed": ("corpus", {**QUEUE, "policy": "stratified", "compose": "mixed"}),
    "uniform": ("corpus", {"policy": "shuffle", "compose": "mixed", "max_ready": 1_000_000}),
}
"""By name: the order of arrival, and what of the sampler's settings is not common to all."""


class Figures(NamedTuple):
    """Of one training."""

    roughness: float
    grad_norm: float
    walk: float
    loss: float
    mix: float
    samples: float


class MappedSampler(Sampler):
    """A sampler over some rows of a cache, in an order of arrival of their own."""

    def __init__(self, corpus: Corpus, rows: np.ndarray, config: SamplerConfig) -> None:
        super().__init__(select(corpus, rows, "benchmark"), config)
        self._rows = rows

    def next_step(self) -> Step | None:
        """The next step, in rows of the cache."""
        step = super().next_step()
        if step is None:
            return None
        batches = tuple(
            tuple(Draw(int(self._rows[draw.row]), draw.epoch) for draw in batch) for batch in step.batches
        )
        return replace(step, batches=batches)


class BenchmarkRun(Run):
    """A run that ends behind a number of tokens, and so does its learning rate's schedule."""

    budget = 0

    def through(self, tokens: int) -> float:
        """How far the run is in the middle of a step of so many tokens."""
        return min((self.consumed + tokens / 2) / self.budget, 1.0)


def config_for(cache: Path, out: Path, name: str, seed: int, steps: int) -> TrainConfig:
    """One layer, blocks of four, two micro-batches of 1,536 tokens a step."""
    sampler = SamplerConfig(tokens_per_batch=1536, batches_per_step=2, seed=seed)
    return TrainConfig(
        cache,
        out,
        network=NetworkConfig(layers=1, block_size=4),
        anchors=AnchorConfig(density=0.2, seed=seed),
        objective=ObjectiveConfig(4, gamma=1.5, sampled_softmax=4096),
        sampler=replace(sampler, **SETTINGS[name][1]),  # type: ignore[arg-type]
        optim=OptimConfig("muon", lr=2e-3),
        holdout=HoldoutConfig(0.025),
        epochs=None,
        max_steps=steps,
        seed=seed,
        save_every=steps,
    )


def train_one(config: TrainConfig, name: str, tokens: int) -> Figures:
    """Train until so many tokens are consumed, and measure."""
    world = World()
    samples = []
    with ranks(world) as line:
        run = BenchmarkRun.open(config, world, line)
        run.budget = tokens
        run.sampler = MappedSampler(run.corpus, arrival_order(run.corpus, SETTINGS[name][0]), config.sampler)
        with run.loader() as loader:
            for loaded in run.remaining(loader):
                run.step(loaded)
                samples.append(sum(len(batch.samples) for batch in loaded.batches))
                if run.consumed >= tokens:
                    break
    lines = [json.loads(line) for line in (config.out / METRICS_NAME).read_text().splitlines()]
    calm = lines[len(lines) // 4 :]
    norms = np.array([line["grad_norm"] for line in calm])
    shares = np.array([line["tokens_by_bucket"] for line in calm]) / [[line["tokens"]] for line in calm]
    return Figures(
        roughness=roughness([line["loss"] for line in calm]) or 0.0,
        grad_norm=float(norms.std() / norms.mean()),
        walk=run.evaluator.walk(run.drafter)["walk_tau"],
        loss=float(np.mean([line["loss"] for line in calm[-len(calm) // 5 :]])),
        mix=float(np.abs(shares - run.sampler.quota).sum(axis=1).mean() / 2),
        samples=float(np.mean(samples)),
    )


def main() -> None:
    """Train everything, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description="How rough the loss is under different samplers.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--steps", type=int, default=90, help="tokens of each training, in full steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    titles = ("roughness", "grad norm", "walk tau", "loss", "mix", "samples")
    print(" " * 21 + " ".join(f"{title:>15}" for title in titles))
    result: dict[str, float] = {}
    for name in arguments.only:
        found = []
        for seed in range(arguments.seeds):
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                config = config_for(arguments.cache, out, name, seed, 2 * arguments.steps)
                tokens = arguments.steps * config.sampler.packing.capacity * 9 // 10
                found.append(train_one(config, name, tokens))
            took = time.perf_counter() - started
            print(f"{name}, seed {seed}, {took:.0f} s: {found[-1]}", file=sys.stderr, flush=True)
        means, spreads = np.mean(found, axis=0), np.std(found, axis=0)
        cells = " ".join(f"{mean:>7.4f} ±{spread:.4f}" for mean, spread in zip(means, spreads, strict=True))
        print(f"{name:<20} {cells}", flush=True)
        result |= {f"roughness_{name}": round(means[0], 4), f"walk_{name}": round(means[2], 4)}
    print(json.dumps({name: float(value) for name, value in result.items()}))


if __name__ == "__main__":
    main()
