"""What extraction costs beside the forward pass it cannot do without, and beside the plain recipe.

    .venv/bin/python benchmarks/extract.py TARGET [--samples N] [--rounds R] [--data FILE ...] [--dtype D]

Three ways over the same samples, in turn within one run, so that a busy machine slows all of them alike:

- `forward`: the bare truncated forward on the batches of `dflash extract`; nothing is captured or written.
- `dflash`: `dflash extract` into a new cache, from the first batch to the last fsync.
- `plain`: the full model on batches of 32 in file order, padded on the right, `output_hidden_states=True`,
  and one `torch.save` of the same taps for each sample.

The samples are dealt over the rounds, each an even draw from the corpus, by default the demo's. The plain
recipe, ten times slower, takes an even draw of each round's, in batches of 32 as well. Every way first runs a
little to warm up. Few samples a round leave gaps between their lengths, and with them padding.
Where other processes want the same cores, set OMP_NUM_THREADS=1: threads that spin for each other are slowed
by a factor that changes every minute.

The last line is JSON: `vs_forward` is the median over the rounds of a ratio of tokens/s, `vs_plain` the ratio
over all rounds, `pad_share` the padding that `dflash` computed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dflash.cache.manifest import load_manifest
from dflash.demo.run import extract_config
from dflash.extract.corpus import load_corpus
from dflash.extract.formats import find_sources
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.extract.plan import batches_of
from dflash.extract.preview import PLAIN_BATCH
from dflash.extract.token_store import TokenizedCorpus
from dflash.target import DTYPES, TruncatedTarget, load_tokenizer
from dflash.world import World

CPU = torch.device("cpu")


class Bench:
    """The models, loaded once, and what was measured."""

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.target)
        self.full: Any = AutoModelForCausalLM.from_pretrained(
            config.target, dtype=DTYPES[config.dtype]
        ).eval()
        self.taps = config.taps_of(self.full.config.get_text_config().num_hidden_layers)
        self.truncated = TruncatedTarget(config.target, self.taps, dtype=DTYPES[config.dtype], device=CPU)
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, int] = defaultdict(int)
        self.padded = 0.0
        """Tokens that `dflash` computed."""
        self.plain_samples = 0
        self.ratios: list[float] = []
        """Of every round: tokens/s of `dflash` over those of `forward`."""

    def forward(self, data: Path, _out: Path) -> tuple[int, float]:
        """Tokens and seconds of the bare truncated forward."""
        corpus = self._corpus(data)
        batches = batches_of(corpus.lengths, corpus.ids, self.config.edges, self.config.tokens_per_batch)
        started = time.perf_counter()
        with torch.inference_mode():
            for rows in batches:
                self.truncated.model(input_ids=padded_ids(corpus, rows), use_cache=False)
        return int(corpus.lengths.sum()), time.perf_counter() - started

    def dflash(self, data: Path, out: Path) -> tuple[int, float]:
        """Tokens and seconds of our extraction."""
        report = extract(replace(self.config, data=(str(data),), out=out), World())
        if not load_manifest(out).complete:
            raise RuntimeError(f"{out} is not complete")
        self.padded += report.new_tokens / (1 - report.pad_share)
        return report.new_tokens, report.seconds

    def plain(self, data: Path, out: Path) -> tuple[int, float]:
        """Tokens and seconds of the plain recipe, on an even draw of the samples in file order."""
        corpus = self._corpus(data)
        drawn = np.linspace(0, len(corpus) - 1, min(self.plain_samples, len(corpus))).astype(int)
        out.mkdir()
        started = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(drawn), PLAIN_BATCH):
                rows = drawn[first : first + PLAIN_BATCH]
                ids = padded_ids(corpus, rows)
                mask = (
                    torch.arange(ids.shape[1])[None] < torch.from_numpy(corpus.lengths[rows])[:, None]
                ).long()
                states = self.full(
                    input_ids=ids, attention_mask=mask, output_hidden_states=True
                ).hidden_states
                taken = torch.stack([states[tap + 1] for tap in self.taps], dim=2)
                for place, row in enumerate(rows.tolist()):
                    length = int(corpus.lengths[row])
                    torch.save(taken[place, :length].clone(), out / f"{row}.pt")
        return int(corpus.lengths[drawn].sum()), time.perf_counter() - started

    def round(self, data: Path, folder: Path, order: list[str], *, count: bool = True) -> None:
        """Every way over the same samples, in this order."""
        rates, padded = {}, self.padded
        for way in order:
            out = folder / way
            tokens, seconds = getattr(self, way)(data, out)
            shutil.rmtree(out, ignore_errors=True)
            rates[way] = tokens / seconds
            if count:
                self.tokens[way] += tokens
                self.seconds[way] += seconds
        if not count:
            self.padded = padded
            return
        self.ratios.append(rates["dflash"] / rates["forward"])

    def result(self) -> dict[str, Any]:
        """What the last line says."""
        rates = {way: self.tokens[way] / seconds for way, seconds in self.seconds.items()}
        return {
            "vs_forward": round(float(np.median(self.ratios)), 3),
            "vs_plain": round(rates["dflash"] / rates["plain"], 3),
            "pad_share": round(1 - self.tokens["dflash"] / self.padded, 4),
            "vs_forward_of_rounds": [round(ratio, 3) for ratio in self.ratios],
            "tokens": self.tokens["dflash"],
            "tokens_per_s": {way: round(rate, 1) for way, rate in rates.items()},
            "threads": torch.get_num_threads(),
        }

    def _corpus(self, data: Path) -> TokenizedCorpus:
        return load_corpus(replace(self.config.corpus, data=(str(data),)), self.tokenizer, show=False)


def padded_ids(corpus: TokenizedCorpus, rows: np.ndarray) -> torch.Tensor:
    """int64 [rows, longest], padded on the right with token 0."""
    ids = torch.zeros(len(rows), int(corpus.lengths[rows].max()), dtype=torch.long)
    for place, row in enumerate(rows.tolist()):
        tokens = corpus.example(row).input_ids
        ids[place, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    return ids


def write_parts(config: ExtractConfig, samples: int, rounds: int, folder: Path) -> list[Path]:
    """Rows of the corpus, in file order, as one file a round and a small one to warm up with."""
    rows = [json.dumps(row.fields) for source in find_sources(config.data) for row in source.rows()]
    drawn = np.linspace(0, len(rows) - 1, min(samples, len(rows))).astype(int)
    parts = [drawn[number::rounds] for number in range(rounds)]
    paths = []
    for number, part in enumerate([*parts, drawn[:: max(len(drawn) // 8, 1)]]):
        path = folder / f"part-{number}.jsonl"
        path.write_text("".join(rows[row] + "\n" for row in part))
        paths.append(path)
    return paths


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain-samples", type=int, default=96, help="samples a round of the plain recipe")
    parser.add_argument("--data", nargs="*", help="instead of the demo's corpus")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["DFLASH_HOME"] = str(folder / "home")
        config = replace(extract_config(Path(given.target), folder / "cache"), dtype=given.dtype)
        if given.data:
            config = replace(config, data=tuple(given.data))
        *parts, small = write_parts(config, given.samples, given.rounds, folder)
        bench, ways = Bench(config), ["forward", "dflash", "plain"]
        bench.plain_samples = given.plain_samples
        bench.round(small, folder, ways, count=False)
        for number, part in enumerate(parts):
            # Whichever comes second finds the machine as the first left it.
            order = ["dflash", "forward"] if number % 2 else ["forward", "dflash"]
            bench.round(part, folder, [*order, "plain"])
            print(f"round {number + 1} of {len(parts)}: {bench.result()}", flush=True)
        print(json.dumps(bench.result()))


if __name__ == "__main__":
    main()
