"""How fast samples come out of a cache, against plain `preadv` and against other ways to store them.

    .venv/bin/python benchmarks/reader.py

5 MB samples (and 50 KB ones) in random order into one buffer, from the page cache. All arms read the same
samples in turn, in every round; a figure is the median over the rounds of our rate over the other's. The
buffer holds 16 large samples, a micro-batch of 16k tokens, or 256 small ones. The last line is JSON:

    vs_preadv           ours without checksums over plain `preadv`, which one thread issues sample by sample
    vs_preadv_crc       ours, with checksums as always, over plain `preadv` without
    small_vs_preadv     the same for small samples, with checksums
    vs_file_per_sample  ours over one safetensors file a sample
    vs_torch_load       ours over `torch.load` of one file a sample
    vs_mds              ours over random reads of mosaicml-streaming's `StreamingDataset`, in its own process
    vs_mds_kept         the same where its C library is told by environment to keep freed memory: by default
                        the copies of each sample may get fresh pages every time, which took most of the time
    open_10m_s, open_10m_mib   opening a cache of 10 M samples, and the most memory of that process

Ours reads with as many threads as there are processors, four at most. Where a peer's samples are copied into
the buffer by torch, from a safetensors file or from `torch.load`, it takes torch's own (`OMP_NUM_THREADS`);
`preadv` and mosaicml-streaming have one. A peer that cannot be installed or run is left out with the reason,
its figure None.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from peers_env import STREAMING, bench_python, last_line
from safetensors.torch import load_file, save_file

from dflash.cache.fragment import encode_fragment, fragment_path
from dflash.cache.manifest import Identity, Manifest, create_cache, save_manifest
from dflash.cache.reader import CacheReader
from dflash.cache.shard import DATA_START, shard_name
from dflash.cache.writer import CacheWriter, Sample, finalize

HERE = Path(__file__).resolve().parent
ROUNDS = 15
TAPS, HIDDEN = 5, 576
TOKEN_BYTES = TAPS * HIDDEN * 2
PACKAGES = {
    "mosaicml-streaming": [STREAMING],
    "what its reader imports": ["Brotli", "python-snappy", "cramjam", "zstd", "catalogue"],
}
IDENTITY = Identity(
    target="none",
    revision=None,
    config_digest="",
    weights_digest="",
    tokenizer_digest="",
    template_digest="",
    taps=tuple(range(TAPS)),
    num_target_layers=30,
    hidden_size=HIDDEN,
    vocab_size=49152,
    dtype="bfloat16",
    codec="raw",
    bucket_edges=(1024,),
    max_length=1024,
    corpus_digest="",
)
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
MALLOC: dict[str, dict[str, str]] = {"mds": {}, "mds_kept": KEPT}
Arm = Callable[[list[int]], float]
"""Reads samples into the buffer; returns the seconds it took."""


class Size(NamedTuple):
    """Samples of one size."""

    tokens: int
    count: int
    at_once: int
    """Samples that one call reads."""


LARGE, SMALL = Size(910, 32, 16), Size(9, 2048, 256)


def sample(number: int, size: Size) -> Sample:
    """Random states; ids and mask of that many tokens."""
    rng = np.random.default_rng(number)
    states = torch.from_numpy(rng.integers(0, 256, size.tokens * TOKEN_BYTES, np.uint8))
    shaped = states.view(torch.bfloat16).view(size.tokens, TAPS, HIDDEN)
    ids = rng.integers(0, 49152, size.tokens).astype(np.int32)
    return Sample(number, ids, np.ones(size.tokens, np.uint8), shaped)


def write_cache(folder: Path, size: Size) -> CacheReader:
    """A cache of such samples in shards of 64 MiB."""
    manifest = create_cache(folder, Manifest(IDENTITY, size.count))
    with CacheWriter(folder, manifest, "w0", 64 << 20) as writer:
        for number in range(size.count):
            writer.write(sample(number, size))
    finalize(folder)
    return CacheReader(folder)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def our_arms(reader: CacheReader, buffer: torch.Tensor) -> dict[str, Arm]:
    """The reader with and without checksums, and the bare system call on the same files."""
    files = [os.open(reader.cache / layout.name, os.O_RDONLY) for layout in reader.index.layouts]
    memory = buffer.numpy().data

    def read(rows: list[int], *, checked: bool) -> float:
        reader._checked = checked  # noqa: SLF001 - no user can turn the checks off
        return timed(lambda: reader.read(rows, buffer))

    def plain(rows: list[int]) -> float:
        extents = reader.index.locate(np.array(rows))
        places = zip(extents.shards.tolist(), extents.offsets.tolist(), strict=True)
        size = reader.buffer_bytes(rows[:1])
        start = time.perf_counter()
        for number, (shard, offset) in enumerate(places):
            os.preadv(files[shard], [memory[number * size : (number + 1) * size]], offset)
        return time.perf_counter() - start

    return {
        "preadv": plain,
        "unchecked": lambda rows: read(rows, checked=False),
        "ours": lambda rows: read(rows, checked=True),
    }


def file_arms(folder: Path, buffer: torch.Tensor) -> dict[str, Arm]:
    """One file a sample, as safetensors and as `torch.save` writes it."""
    size = LARGE.tokens * TOKEN_BYTES
    parts = buffer.view(torch.bfloat16).view(-1, LARGE.tokens, TAPS, HIDDEN)
    for number in range(LARGE.count):
        one = sample(number, LARGE)
        tensors = {
            "hidden_states": one.hidden_states,
            "input_ids": torch.from_numpy(one.input_ids),
            "loss_mask": torch.from_numpy(one.loss_mask),
        }
        save_file(tensors, folder / f"{number}.safetensors")
        torch.save(tensors, folder / f"{number}.pt")

    def through(load: Callable[[Path], dict[str, torch.Tensor]], suffix: str) -> Arm:
        def work(rows: list[int]) -> None:
            for place, row in enumerate(rows):
                parts[place].copy_(load(folder / f"{row}{suffix}")["hidden_states"])

        return lambda rows: timed(lambda: work(rows))

    assert parts[0].nbytes == size
    return {
        "file_per_sample": through(load_file, ".safetensors"),
        "torch_load": through(lambda path: torch.load(path, weights_only=True), ".pt"),
    }


class Streaming:
    """mosaicml-streaming in a process of its own environment."""

    def __init__(self, folder: Path, **environment: str) -> None:
        command = [HERE / "reader_peers.py", folder, str(LARGE.tokens * TOKEN_BYTES), str(LARGE.count)]
        self._process = subprocess.Popen(
            [bench_python(PACKAGES), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        if self._answer() != "ready":
            raise RuntimeError(last_line(self._process.communicate()[1]))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def read(self, rows: list[int]) -> float:
        """Seconds that it took for these samples."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def alternate(arms: dict[str, Arm], size: Size) -> dict[str, list[float]]:
    """Seconds of each arm in each round; a round reads every sample once, in an order of its own."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(ROUNDS + 1):
        order = rng.permutation(size.count).tolist()
        names = [*arms][number % len(arms) :] + [*arms][: number % len(arms)]
        found = dict.fromkeys(names, 0.0)
        for start in range(0, size.count, size.at_once):
            for name in names:
                found[name] += arms[name](order[start : start + size.at_once])
        if number:  # the first round warms up
            for name in names:
                seconds[name].append(found[name])
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, other: str) -> float | None:
    """Median of our rate over the other's in the same round."""
    if other not in seconds:
        return None
    pairs = zip(seconds[other], seconds[ours], strict=True)
    return round(median(theirs / mine for theirs, mine in pairs), 3)


def table(seconds: dict[str, list[float]], size: Size) -> None:
    """Print GB/s of each arm."""
    total = size.count * size.tokens * TOKEN_BYTES
    print(f"{size.count} samples of {size.tokens * TOKEN_BYTES / 1e6:.3g} MB")
    for name, values in seconds.items():
        print(f"  {name:<16} {total / median(values) / 1e9:7.2f} GB/s", flush=True)


def measure_large(folder: Path) -> dict[str, float | None]:
    """The figures of large samples."""
    reader = write_cache(folder / "large", LARGE)
    buffer = torch.ones(LARGE.at_once * LARGE.tokens * TOKEN_BYTES, dtype=torch.uint8)
    arms = our_arms(reader, buffer) | file_arms(folder, buffer)
    peers: list[Streaming] = []
    try:
        for name, environment in MALLOC.items():
            peers.append(Streaming(folder / name, **environment))
            arms[name] = peers[-1].read
    except (OSError, RuntimeError) as error:
        print(f"mosaicml-streaming is left out: {error}", file=sys.stderr)
    seconds = alternate(arms, LARGE)
    for peer in peers:
        peer.close()
    table(seconds, LARGE)
    return {
        "vs_preadv": ratio(seconds, "unchecked", "preadv"),
        "vs_preadv_crc": ratio(seconds, "ours", "preadv"),
        "vs_file_per_sample": ratio(seconds, "ours", "file_per_sample"),
        "vs_torch_load": ratio(seconds, "ours", "torch_load"),
        "vs_mds": ratio(seconds, "ours", "mds"),
        "vs_mds_kept": ratio(seconds, "ours", "mds_kept"),
    }


def measure_small(folder: Path) -> dict[str, float | None]:
    """The figures of small samples."""
    reader = write_cache(folder / "small", SMALL)
    buffer = torch.ones(SMALL.at_once * SMALL.tokens * TOKEN_BYTES, dtype=torch.uint8)
    seconds = alternate(our_arms(reader, buffer), SMALL)
    table(seconds, SMALL)
    return {
        "small_vs_preadv": ratio(seconds, "ours", "preadv"),
        "small_vs_preadv_unchecked": ratio(seconds, "unchecked", "preadv"),
    }


def write_index(cache: Path, shards: int = 400, rows: int = 25_000) -> None:
    """A cache of 10 M samples of which only the index exists, one fragment a shard."""
    manifest = Manifest(IDENTITY, shards * rows)
    cache.mkdir()
    save_manifest(cache, manifest)
    fragment_path(cache, "x").parent.mkdir()
    rng = np.random.default_rng(0)
    length = np.full(rows, 9, np.int32)
    size = 9 * TOKEN_BYTES
    columns = {
        "bucket": np.full(rows, 1024, np.int32),
        "shard": np.zeros(rows, np.int32),
        "row": np.arange(rows, dtype=np.int32),
        "length": length,
        "supervised": length,
        "offset": DATA_START + np.arange(rows, dtype=np.int64) * size,
        "nbytes": np.full(rows, size, np.int64),
        "crc32c": rng.integers(0, 1 << 32, rows, np.uint32),
    }
    for number in range(shards):
        name = f"w0-{number:06d}"
        # Ids are hashes: in no order, and different in the upper bits that make them unique here.
        ids = rng.integers(0, 1 << 40, rows, np.uint64) << np.uint64(24)
        columns["id"] = ids + np.arange(number * rows, (number + 1) * rows, dtype=np.uint64)
        data = encode_fragment([shard_name(1024, name)], columns, name, manifest.digest())
        fragment_path(cache, name).write_bytes(data)


OPEN = """
import json, resource, sys, time
from pathlib import Path
from dflash.cache.reader import CacheReader
start = time.perf_counter()
reader = CacheReader(Path(sys.argv[1]), allow_incomplete=True)
seconds = time.perf_counter() - start
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(reader.index) == 10_000_000
print(json.dumps({"open_10m_s": round(seconds, 2), "open_10m_mib": memory >> 10}))
"""


def measure_open(folder: Path) -> dict[str, float | None]:
    """Opening 10 M samples in a fresh process, the best of three: the seconds are bounds, not averages."""
    write_index(folder / "ten-million")
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", OPEN, folder / "ten-million"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(3)
    ]
    best: dict[str, float | None] = min(runs, key=lambda run: run["open_10m_s"])
    print(f"10 M samples open in {best['open_10m_s']} s and {best['open_10m_mib']} MiB")
    return best


def main() -> None:
    """Print the tables and the JSON line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = measure_large(folder) | measure_small(folder) | measure_open(folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
