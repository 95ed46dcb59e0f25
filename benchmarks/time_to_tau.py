"""What a drafter is worth after the same training time: ours against a plain loop around SpecForge's model.

    .venv/bin/python benchmarks/time_to_tau.py demo/cache demo/target     # behind `make demo`

Both train the demo's drafter shape on the demo's cache for --seconds (default 300; start-up is not counted),
one after the other, from the same weights, with the same optimizer (Muon for matrices, AdamW for the rest,
peak rate 2e-3, clip 1.0, warm-up and cosine over the time), under bfloat16 autocast with float32 weights
(both in float32 where the processor cannot multiply bfloat16).

- ours: everything that the demo uses: packed micro-batches of 4,400 tokens, 0.38 anchors a supervised token,
  gamma 1.5, 8,192 drawn tokens that compete with the labels. It is trained for a third of the time too.
- SpecForge 0.2.0: `OnlineDFlashModel` with `sdpa`, its loss and its anchors as they are by default (up to 512
  a sequence, no decay), batches of 4 random samples, padded to the longest (its
  default is 1; with 8 the logits alone take gigabytes here).

Both are saved in the z-lab layout and decode the demo's held-out prompts by the same decoder. `gain` is
(walk_ours - 1) / (walk_specforge - 1). `time_ratio` is the smallest measured share of the time (1/3 or 1) in
which ours reaches SpecForge's walk; null if it does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers_env import bench_python
from torch import nn
from train_step import PACKAGES

from dflash.cache.reader import CacheReader
from dflash.demo.run import eval_config, train_config
from dflash.drafter import Drafter, init_weights
from dflash.evaluate.run import evaluate
from dflash.head import HEAD_NAME, TargetHead
from dflash.pretrained import write_drafter
from dflash.train.loader import StepLoader
from dflash.train.memory import keep_memory
from dflash.train.network import drafter_config
from dflash.train.optim import build_optimizer, lr_at, set_lr
from dflash.train.run import Run
from dflash.world import World

SAMPLES = 4
"""In a batch of SpecForge's."""


class TimedRun(Run):
    """A run whose schedule ends with the clock."""

    seconds, started = 0.0, 0.0

    def through(self, tokens: int) -> float:  # noqa: ARG002 - the clock alone decides
        """Elapsed share of the time."""
        return min((time.perf_counter() - self.started) / self.seconds, 1.0)


def ours(cache: Path, out: Path, seconds: float) -> dict[str, Any]:
    """Train ours; the drafter goes to `out`."""
    keep_memory()  # as `train` does
    config = replace(train_config(cache, out / "run"), max_steps=10**9, save_every=10**9, resume=False)
    run: Any = TimedRun.open(config, World())
    with StepLoader(run.reader, run.sampler, run.blocks, World(), run.device) as loader:
        run.seconds, run.started = seconds, time.perf_counter()
        for loaded in loader:
            run.step(loaded)
            if time.perf_counter() - run.started >= seconds:
                break
        waited = loader.waited / seconds
    write_drafter(run.drafter, out)
    return {"steps": run.done, "tokens": run.consumed, "waited": round(waited, 4)}


def specforge(cache: Path, out: Path, seconds: float) -> dict[str, Any]:
    """Train SpecForge's model; its weights, which have our names, go to `out`."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config, reader = train_config(cache, out), CacheReader(cache)
    dtype = config.compute_dtype(torch.device("cpu"))
    network = drafter_config(config.network, cache, reader.manifest)
    drafter, head = Drafter(network), TargetHead.load(cache / HEAD_NAME)
    init_weights(drafter, config.seed)
    draft = DFlashDraftModel(_qwen3(network))
    draft.load_state_dict(drafter.state_dict())
    lm_head = nn.Linear(*head.lm_head.shape[::-1], bias=False).requires_grad_(False)
    lm_head.weight.data = head.lm_head.to(dtype)
    embedding = nn.Embedding.from_pretrained(head.embedding.float())
    model = OnlineDFlashModel(
        draft,
        lm_head,
        embedding,
        mask_token_id=network.mask_token_id,
        block_size=network.block_size,
        attention_backend="sdpa",
    )
    optimizer = build_optimizer(draft, config.optim)
    rng, order, done = np.random.default_rng(config.seed), np.zeros(0, np.int64), 0
    torch.manual_seed(config.seed)
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        if len(order) < SAMPLES:
            order = rng.permutation(len(reader.index.lengths))
        rows, order = order[:SAMPLES], order[SAMPLES:]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, _, _ = model(*_padded(reader.read(rows), dtype))
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), config.optim.clip)
        set_lr(optimizer, lr_at(elapsed / seconds, config.optim))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
    drafter.load_state_dict({name: draft.state_dict()[name] for name in drafter.state_dict()})
    write_drafter(drafter, out)
    return {"steps": done}


def _padded(samples: list[Any], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Ids `[S, T]`, features `[S, T, K*H]` and mask `[S, T]`, padded to the longest."""

    def pad(parts: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(parts, batch_first=True)

    return (
        pad([torch.tensor(sample.input_ids, dtype=torch.long) for sample in samples]),
        pad([sample.hidden_states.flatten(1) for sample in samples]).to(dtype),
        pad([torch.tensor(sample.loss_mask, dtype=torch.float32) for sample in samples]),
    )


def _qwen3(network: Any) -> Any:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    config = Qwen3Config(
        **{name: getattr(network, name) for name in names},
        rope_parameters={"rope_type": "default", "rope_theta": network.rope_theta},
        block_size=network.block_size,
        num_target_layers=network.num_target_layers,
        dflash_config={
            "target_layer_ids": list(network.target_layer_ids),
            "mask_token_id": network.mask_token_id,
        },
    )
    config._attn_implementation = "sdpa"  # noqa: SLF001
    return config


def _trained(arm: str, cache: Path, out: Path, seconds: float) -> None:
    """Train an arm in a process of its own."""
    out.mkdir(parents=True)
    command = [bench_python(PACKAGES), __file__, "--arm", arm, str(cache), str(out), str(seconds)]
    subprocess.run(command, check=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0, help="Training time of each.")
    parser.add_argument("--per-kind", type=int, default=8, help="Most held-out prompts of each kind.")
    return parser.parse_args()


def main() -> None:
    """Train three times, decode three times, print the JSON line."""
    if sys.argv[1:2] == ["--arm"]:
        _, _, arm, cache, out, seconds = sys.argv
        done = {"ours": ours, "specforge": specforge}[arm](Path(cache), Path(out), float(seconds))
        print(f"{arm}, {float(seconds):.0f} s: {json.dumps(done)}", flush=True)
        return
    asked = _arguments()
    walks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = {
            "third": ("ours", asked.seconds / 3),
            "ours": ("ours", asked.seconds),
            "specforge": ("specforge", asked.seconds),
        }
        for name, (arm, limit) in plan.items():
            out = Path(folder) / name
            _trained(arm, asked.cache, out, limit)
            report = evaluate(replace(eval_config(asked.target, out), per_kind=asked.per_kind))
            walks[name] = report.total.walk_tau
            print(f"{name}\n{report.table()}", flush=True)
    print(json.dumps(result(walks)))


def result(walks: dict[str, float]) -> dict[str, float | None]:
    """The JSON of the last line."""
    theirs = walks["specforge"]
    reached = {1 / 3: walks["third"] >= theirs, 1.0: walks["ours"] >= theirs}
    return {
        "walk_ours": round(walks["ours"], 4),
        "walk_ours_third": round(walks["third"], 4),
        "walk_specforge": round(theirs, 4),
        "gain": round((walks["ours"] - 1) / max(theirs - 1, 1e-9), 3),
        "time_ratio": next((round(share, 3) for share, yes in reached.items() if yes), None),
    }


if __name__ == "__main__":
    main()
