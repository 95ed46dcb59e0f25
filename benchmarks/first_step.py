"""How long from the shell to the first optimizer step, and how long the run waits for its data.

    .venv/bin/python benchmarks/first_step.py demo/cache          # behind `make demo`
    .venv/bin/python benchmarks/first_step.py --samples 10000000  # an index that long, made for the purpose

On a cache it starts `dflash train` with the demo's settings and watches `metrics.jsonl`: `first_step_s` is
from the start of the process to the end of the first step, `waited` is the share of the later steps' time
that was spent waiting for data.

With --samples it writes an index of so many rows, without states, and reports what a start pays for it, in a
process of its own: reading it, its digest, the sampler and the plan of the first step (`start_s`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 12
EDGES = (256, 512, 1024, 2048)
DEMO = {
    "layers": 3,
    "block-size": 4,
    "anchor-density": 0.38,
    "gamma": 1.5,
    "sampled-softmax": 8192,
    "tokens-per-batch": 4400,
    "batches-per-step": 1,
    "optimizer": "muon",
    "lr": 2e-3,
}


def on_cache(cache: Path) -> dict[str, Any]:
    """Start a run as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        flags = [part for name, value in DEMO.items() for part in (f"--{name}", str(value))]
        command = [Path(sys.executable).parent / "dflash", "train", "--cache", cache, "--out", out]
        metrics, started = out / "metrics.jsonl", time.perf_counter()
        process = subprocess.Popen([*command, *flags, "--max-steps", str(STEPS)], stdout=subprocess.DEVNULL)
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        first = time.perf_counter() - started
        if process.wait():
            raise SystemExit(f"dflash train ended with {process.returncode}; its error is above")
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        later = [step for step in steps if "waited" in step][1:]
        seconds = sum(step["seconds"] + step["waited"] for step in later)
        share = sum(step["waited"] for step in later) / seconds
    return {"first_step_s": round(first, 2), "waited": round(share, 4)}


def on_index(samples: int) -> dict[str, Any]:
    """Write an index, then time a start over it in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--write", str(samples), folder], check=True)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, __file__, "--start", folder], check=True, capture_output=True, text=True
        )
        inner = json.loads(done.stdout.splitlines()[-1])
        return {"samples": samples, "start_s": round(time.perf_counter() - started, 2)} | inner


def write_index(samples: int, cache: Path) -> None:
    """Ten fragments that commit samples of up to 2,048 tokens in four buckets; there are no shards."""
    import numpy as np

    from dflash.cache.fragment import encode_fragment, fragment_path
    from dflash.cache.manifest import Identity, Manifest, create_cache
    from dflash.cache.shard import DATA_START, shard_name

    digests = {
        f"{name}_digest": "0" * 64 for name in ("config", "weights", "tokenizer", "template", "corpus")
    }
    identity = Identity(
        target="none",
        revision=None,
        taps=(1, 3),
        num_target_layers=6,
        hidden_size=64,
        vocab_size=1000,
        dtype="bfloat16",
        codec="raw",
        bucket_edges=EDGES,
        max_length=EDGES[-1],
        **digests,
    )
    manifest = create_cache(cache, Manifest(identity, samples))
    (cache / "index").mkdir(exist_ok=True)
    rng, rows = np.random.default_rng(0), 1000
    for number in range(10):
        shards = samples // 10 // rows
        bucket = np.repeat(rng.integers(0, len(EDGES), shards), rows)
        top = np.array(EDGES)[bucket]
        length = (top - rng.integers(0, 200, shards * rows)).astype(np.int32)
        before = np.cumsum(length) - length
        columns = {
            "id": rng.integers(0, 1 << 64, shards * rows, dtype=np.uint64),
            "bucket": top.astype(np.int32),
            "shard": np.repeat(np.arange(shards, dtype=np.int32), rows),
            "row": np.tile(np.arange(rows, dtype=np.int32), shards),
            "length": length,
            "supervised": length // 2,
            "offset": DATA_START + (before - np.repeat(before[::rows], rows)) * identity.bytes_per_token,
            "nbytes": length.astype(np.int64) * identity.bytes_per_token,
            "crc32c": rng.integers(0, 1 << 32, shards * rows, dtype=np.uint32),
        }
        names = [shard_name(int(edge), f"w{number}-{at:06d}") for at, edge in enumerate(top[::rows])]
        data = encode_fragment(names, columns, f"w{number}", manifest.digest())
        fragment_path(cache, f"w{number}").write_bytes(data)


def start(cache: Path) -> dict[str, float]:
    """What a run does with its index before it reads a sample."""
    from dflash.cache.index import load_index
    from dflash.cache.manifest import load_manifest
    from dflash.train.sampler import Corpus, Sampler, SamplerConfig

    times = [time.perf_counter()]
    index = load_index(cache, load_manifest(cache))
    times.append(time.perf_counter())
    corpus = Corpus(index.lengths, index.buckets, EDGES, index.digest())
    times.append(time.perf_counter())
    Sampler(corpus, SamplerConfig(), epochs=6).next_step()
    times.append(time.perf_counter())
    names = ("load_s", "digest_s", "first_plan_s")
    return {name: round(end - begin, 2) for name, begin, end in zip(names, times, times[1:], strict=False)}


def main() -> None:
    """Print one JSON line."""
    command, *rest = sys.argv[1:]
    if command == "--write":
        write_index(int(rest[0]), Path(rest[1]))
    elif command == "--start":
        print(json.dumps(start(Path(rest[0]))))
    elif command == "--samples":
        print(json.dumps(on_index(int(rest[0]))))
    else:
        print(json.dumps(on_cache(Path(command))))


if __name__ == "__main__":
    main()
