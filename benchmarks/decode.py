"""What speculative decoding gains here, beside Transformers' own with the same drafter.

    .venv/bin/python benchmarks/decode.py TARGET DRAFTER [--data FILE ...] [--per-kind N] [--max-new-tokens N]

Every prompt is decoded in four ways, in an order that turns from prompt to prompt, prefill included, float32:

- `plain`: Transformers' `generate`, greedy, one token a pass.
- `transformers`: the same with `speculation_type="dflash"` and the drafter exported to its layout.
- `dflash`: our decoder with `--adaptive`.
- `own_plain`: our decoder without a drafter.

Before that, one prompt of each kind is decoded in each way without being counted. The adaptive decoder keeps
what it has learnt of costs from prompt to prompt, as a server does. Afterwards blocks and trees (`--budget`)
are compared by acceptance on the same prompts.

The last line is JSON: `speedup` and `vs_transformers` are ratios of seconds over all prompts, `worst_kind`
the lowest speed-up of a kind of prompt, `equal` of `total` outputs equal plain `generate` token for token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.decode.pace import Pace
from dflash.demo.run import corpus_file
from dflash.evaluate.pair import open_pair
from dflash.export.give import export_network
from dflash.extract.prompts import Prompt, load_prompts, selected

WAYS = ("plain", "transformers", "dflash", "own_plain")


class Bench:
    """Models, loaded once, and what was measured."""

    def __init__(self, target: str, drafter: Path, tokens: int) -> None:
        self.tokens = tokens
        self.target, self.drafter, self.tokenizer = open_pair(target, drafter, dtype="float32")
        # A model of its own: ours has its linear layers switched for passes of a few rows.
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        with tempfile.TemporaryDirectory() as name:
            export_network(self.drafter, Path(name) / "drafter", "transformers", torch.float32)
            self.assistant = AutoModel.from_pretrained(Path(name) / "drafter", dtype=torch.float32).eval()
        self.pace = Pace(self.drafter.config.block_size - 1)
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.equal = self.total = 0

    def plain(self, ids: torch.Tensor) -> list[int]:
        """Transformers, one token a pass."""
        return self._transformers(ids)

    def transformers(self, ids: torch.Tensor) -> list[int]:
        """Transformers with our drafter."""
        return self._transformers(ids, assistant_model=self.assistant, speculation_type="dflash")

    def dflash(self, ids: torch.Tensor) -> list[int]:
        """Our decoder."""
        return generate(
            self.target, self.drafter, ids, DecodeConfig(self.tokens, adaptive=True), self.pace
        ).tokens

    def own_plain(self, ids: torch.Tensor) -> list[int]:
        """Our decoder, one token a pass."""
        return generate(self.target, None, ids, DecodeConfig(self.tokens)).tokens

    def _transformers(self, ids: torch.Tensor, **how: Any) -> list[int]:
        out = self.model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            do_sample=False,
            max_new_tokens=self.tokens,
            **how,
        )
        return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    def measure(self, prompt: Prompt, turn: int, *, count: bool = True) -> None:
        """Decode one prompt in every way."""
        ids = torch.from_numpy(prompt.input_ids).long()
        outputs: dict[str, list[int]] = {}
        for way in [*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]]:
            run: Callable[[torch.Tensor], list[int]] = getattr(self, way)
            started = time.perf_counter()
            outputs[way] = run(ids)
            if count:
                self.seconds[way, prompt.kind or "all"] += time.perf_counter() - started
        if count:
            self.total += 1
            self.equal += all(outputs[way] == outputs["plain"] for way in WAYS)

    def speedups(self, way: str) -> dict[str, float]:
        """Plain seconds over those of this way, by kind and over all."""
        kinds = sorted({kind for _, kind in self.seconds})
        ratios = {kind: self.seconds["plain", kind] / self.seconds[way, kind] for kind in kinds}
        whole = {w: sum(s for (name, _), s in self.seconds.items() if name == w) for w in WAYS}
        return ratios | {"": whole["plain"] / whole[way]}

    def taus(self, prompts: Sequence[Prompt], budget: int) -> dict[str, float]:
        """Acceptance length of blocks and of trees."""
        configs = {
            "block": DecodeConfig(self.tokens),
            "tree": DecodeConfig(self.tokens, draft="tree", budget=budget),
        }
        return {name: self._tau(prompts, config) for name, config in configs.items()}

    def _tau(self, prompts: Sequence[Prompt], config: DecodeConfig) -> float:
        accepted = [
            count
            for prompt in prompts
            for count in generate(
                self.target, self.drafter, torch.from_numpy(prompt.input_ids).long(), config
            ).accepted
        ]
        return sum(accepted) / len(accepted)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--data", nargs="*", default=[str(corpus_file("heldout.jsonl"))])
    parser.add_argument("--per-kind", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=32, help="nodes of a tree")
    given = parser.parse_args()
    bench = Bench(given.target, given.drafter, given.max_new_tokens)
    found = load_prompts(given.data, bench.tokenizer)
    prompts = selected(found, given.per_kind)
    for prompt in selected(found, 1):
        bench.measure(prompt, 0, count=False)
    for turn, prompt in enumerate(prompts):
        bench.measure(prompt, turn)
    ratios = {way: bench.speedups(way) for way in WAYS}
    for way, kinds in ratios.items():
        print(way.ljust(14), "  ".join(f"{kind or 'all'} {ratio:.2f}x" for kind, ratio in kinds.items()))
    taus = bench.taus(selected(found, min(given.per_kind or 3, 3)), given.budget)
    print(f"walk tau: block {taus['block']:.2f}, tree of {given.budget} nodes {taus['tree']:.2f}")
    ours = ratios["dflash"]
    result = {
        "speedup": round(ours[""], 3),
        "vs_transformers": round(ours[""] / ratios["transformers"][""], 3),
        "worst_kind": round(min(ours.values()), 3),
        "equal": bench.equal,
        "total": bench.total,
        "own_plain": round(ratios["own_plain"][""], 3),
        "tau_block": round(taus["block"], 3),
        "tau_tree": round(taus["tree"], 3),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
