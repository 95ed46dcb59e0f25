"""A training step of ours against those of SpecForge 0.2.0 and speculators 0.9.0, alternating, in one run.

    .venv/bin/python benchmarks/train_step.py [ROUNDS]

Hidden size 512, intermediate 1536, 5 layers, 8/4 heads, vocabulary 32,000, blocks of 16, 128 anchors a
sequence, 2 x 1024 and 2 x 2048 tokens, bfloat16; the same weights, tokens, features, anchors and loss
positions for all, which the printed losses show. Each arm is a process of its own; they take turns, so that
noise of the machine falls on all. A ratio is the median over rounds of the peer's forward and backward time
over ours in that round.

- `gemm_share`: a step's forward and backward pass is recorded, and its products with weights (projections,
  MLP, fc and lm_head, forward and backward; not those within attention) are done again one after another, on
  factors of the same shapes, strides and dtypes. Their time over that of the step just before, median of 3.
- On a processor that cannot multiply bfloat16 our trainer computes in float32, and so does its arm. How much
  of the difference that makes, `specforge-float32` shows.
- `memory_vs_...`: peak resident memory behind the inputs (weights, optimizer and all), ours over the peer's.

On two quiet cores it takes about five minutes, without bfloat16 instructions five times as long. On a busy
machine set OMP_NUM_THREADS=1: threads that wait for each other at the end of every operation measure the
scheduler.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers_env import bench_python

HERE = Path(__file__).resolve().parent
SIZES = (1024, 2048)
PEERS = ("specforge", "speculators")
FLOAT32 = "specforge-float32"
"""SpecForge's step in float32, where ours computes in it; not in the last line."""
PACKAGES = {
    "specforge": ["specforge==0.2.0"],
    "speculators": ["speculators==0.9.0"],
    "what their training steps import": [
        *("hs-connectors==0.9.0", "openai", "jiter", "distro", "sniffio"),
        *("loguru", "pydantic-settings", "python-dotenv"),
    ],
}


class Arm:
    """A process that does one step when asked."""

    def __init__(self, name: str, tokens: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [bench_python(PACKAGES), HERE / "train_step_arms.py", name, str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rounds: list[dict[str, float]] = []

    def reply(self) -> dict[str, Any]:
        """The next line."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}; its error is above")
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        """Do something and wait for it."""
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self.reply()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def median(self, key: str) -> float:
        """Over the rounds."""
        return statistics.median(one[key] for one in self.rounds)

    def over(self, other: Arm) -> float:
        """Our time in the units of another's, round by round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(mine["learn"] / its["learn"] for mine, its in pairs)


def measure(tokens: int, rounds: int) -> dict[str, float]:
    """All arms at one size, in turns; prints the table and gives the figures."""
    arms = [Arm(name, tokens) for name in ("ours", *PEERS)]
    dtypes = [arm.reply()["dtype"] for arm in arms]
    if dtypes[0] == "torch.float32":
        print("ours computes in float32, as in training: this processor cannot multiply bfloat16")
        arms.append(Arm(FLOAT32, tokens))
        arms[-1].reply()
    for arm in arms:
        first = arm.ask("step")
        print(f"{arm.name:<18} first loss {first['loss']:.3f}", flush=True)
    ours, *peers = arms
    for _ in range(rounds):
        for arm in arms:
            arm.rounds.append(arm.ask("step"))
    memory = {arm.name: arm.ask("memory")["bytes"] for arm in arms}
    print(f"\n2 x {tokens} tokens{'':<4} fwd+bwd s  optimizer s  tokens/s  peak MiB    fwd+bwd / ours")
    for arm in arms:
        rate = 2 * tokens / (arm.median("learn") + arm.median("update"))
        line = f"{arm.name:<19} {arm.median('learn'):>9.3f} {arm.median('update'):>12.3f} {rate:>9.0f}"
        print(f"{line} {memory[arm.name] / 2**20:>9.0f} {arm.over(ours):>13.2f}x")
    products = [(ours.ask("step")["learn"], ours.ask("products")) for _ in range(3)]
    share, every = (
        statistics.median(one[key] / learn for learn, one in products) for key in ("weights", "all")
    )
    print(f"products with weights {share:.0%} of our step, with attention's {every:.0%}")
    _print_parts(ours)
    for arm in arms:
        arm.close()
    ratios = {peer.name: peer.over(ours) for peer in peers}
    return ratios | {"gemm": share, **{f"memory_{name}": memory["ours"] / memory[name] for name in PEERS}}


def _print_parts(ours: Arm) -> None:
    parts = ours.ask("parts") | {"clip and optimizer": ours.median("update")}
    print("\npart, forward and backward by itself     s   share")
    for name, seconds in parts.items():
        print(f"{name:<36} {seconds:>6.3f} {seconds / sum(parts.values()):>6.0%}")
    print()


def main() -> None:
    """Print the tables and the JSON line."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found = {tokens: measure(tokens, rounds) for tokens in SIZES}
    result = {f"vs_specforge_{tokens}": found[tokens]["specforge"] for tokens in SIZES}
    result["vs_speculators"] = min(found[tokens]["speculators"] for tokens in SIZES)
    result["gemm_share"] = min(found[tokens]["gemm"] for tokens in SIZES)
    for name in PEERS:
        result[f"memory_vs_{name}"] = max(found[tokens][f"memory_{name}"] for tokens in SIZES)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
