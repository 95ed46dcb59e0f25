"""How well samplers mix sequence lengths: ours, and those of other projects, on the same lengths.

    .venv/bin/python benchmarks/mixing.py [PICTURE.png]

17,457 log-normal lengths (median 600, sigma 0.9, 16 to 4,096 tokens) in 8 buckets of equal width, 8 ranks,
one micro-batch of at most 16,384 tokens for each rank a step, one epoch. Total variation from the corpus's
mix is weighted by tokens and shown as mean/max: over 30 steps, within one (`tv1` in the JSON of the last
line), over 30 draws. A draw is one micro-batch, a step eight. `tv30` is over 30 steps for mixed composition
and for the peers; `tv30_bucketed` is over 30 draws, the stricter of the two, which `tv30_draws_<name>` gives
for everyone. (30 mixed draws hold about 490,000 tokens. Four of the longest samples are 3 % of that, and
since samples are whole, no order of them can come near .002 there.) `cost` is the busiest rank's work over
the mean, `pad` what padding would add, `most` the largest micro-batch over the budget, which peers that count
samples exceed.

The peers live in `.venv-bench` (see `peers_env.py`), which is made on the first run. A peer that cannot be
installed or run is left out with the reason. The picture shows settings of ours on the same lengths when the
longest samples arrive first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mixing_peers import PEERS
from peers_env import STREAMING, bench_python, last_line

from dflash.train.compare import FloatArray, MixFigures, Trace, figures, simulate, trace
from dflash.train.mixplot import Panel, plot_mix
from dflash.train.producer import arrange
from dflash.train.sampler import Corpus, SamplerConfig
from dflash.train.variants import parse_variant

HERE = Path(__file__).resolve().parent
RANKS = 8
SAMPLES = 17_457
PICTURED = (
    "sampler=fifo,compose=bucketed,min-ready=10,max-ready=60",
    "sampler=shuffle,compose=bucketed,min-ready=30,max-ready=90",
    "sampler=stratified,compose=mixed,min-ready=30,max-ready=90",
)
PACKAGES = {
    "lhotse": ["lhotse==1.33.0"],
    "speculators": ["speculators==0.9.0"],
    "mosaicml-streaming": [STREAMING],
    "what lhotse imports": [
        *("soundfile", "cffi", "pycparser", "audioread", "cytoolz", "toolz"),
        *("intervaltree", "sortedcontainers", "tabulate", "pyyaml"),
    ],
}


def log_normal() -> Corpus:
    """The lengths of the sampling guide's table."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(600), 0.9, SAMPLES)).astype(np.int32).clip(16, 4096)
    edges = tuple(range(512, 4097, 512))
    buckets = np.array([bisect_left(edges, length) for length in lengths], np.int16)
    return Corpus(lengths, buckets, edges, "log-normal")


class Row(NamedTuple):
    """What a sampler did with the lengths."""

    figures: MixFigures
    most: float
    """Tokens of the largest micro-batch over the budget."""


def run_peer(name: str, corpus: Corpus, config: SamplerConfig, folder: Path) -> Row | str:
    """A peer's figures, or why there are none."""
    job, out = folder / "job.json", folder / f"{name}.json"
    columns = {"lengths": corpus.lengths.tolist(), "buckets": corpus.buckets.tolist()}
    job.write_text(json.dumps({**columns, "ranks": RANKS, "tokens": config.tokens_per_batch}))
    done = subprocess.run(
        [bench_python(PACKAGES), HERE / "mixing_peers.py", name, job, out],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        return last_line(done.stderr)
    steps = json.loads(out.read_text())
    return row_of(trace(steps, corpus, config.packing, RANKS), natural_mix(corpus))


def natural_mix(corpus: Corpus) -> FloatArray:
    """Share of the tokens of each bucket."""
    tokens: FloatArray = np.array(corpus.tokens_by_bucket, np.float64)
    return np.divide(tokens, tokens.sum())


def row_of(found: Trace, quota: FloatArray) -> Row:
    """The figures of a trace."""
    return Row(figures(found, quota), int(found.draws.sum(axis=1).max()) * RANKS / found.capacity)


def run_ours(corpus: Corpus, compose: str) -> Row:
    """Our figures over one epoch's full steps."""
    config = SamplerConfig(compose=compose)
    epoch = int(corpus.lengths.sum()) // config.tokens_per_batch
    return row_of(*simulate(corpus, config, draws=epoch // RANKS * RANKS, ranks=RANKS))


def plot(path: Path, corpus: Corpus) -> None:
    """Draw what two settings of a live queue, and ours, make of a source that delivers the longest first."""
    arriving = arrange(corpus, "longest-first")
    panels = []
    for text in PICTURED:
        found, quota = simulate(arriving, parse_variant(text).config, draws=900, ranks=RANKS)
        panels.append(Panel(text, found.draws, quota))
    plot_mix(path, panels, corpus.bucket_edges)


def line(name: str, row: Row | str) -> str:
    """A row of the table."""
    if isinstance(row, str):
        return f"{name:<22} left out: {row}"
    found = row.figures
    spreads = [found.tv30_steps, found.tv1_step, found.tv30_draws]
    cells = " ".join(
        f"{spread.mean:.4f}/{spread.worst:.4f}" if spread else f"{'-':>13}" for spread in spreads
    )
    rest = f"{found.longest_run:>4} {found.rank_cost:>6.3f} {found.fill:>6.3f} {found.padding:>6.1%}"
    return f"{name:<22} {cells} {rest} {row.most:>5.2f}"


def main() -> None:
    """Print the table and the JSON line."""
    corpus, config = log_normal(), SamplerConfig()
    print(f"{'':<22} {'30 steps':>13} {'1 step':>13} {'30 draws':>13}  run   cost   fill    pad  most")
    rows: dict[str, Row | str] = {}
    for compose in ("mixed", "bucketed"):
        rows[compose] = run_ours(corpus, compose)
        print(line(f"ours, {compose}", rows[compose]))
    with tempfile.TemporaryDirectory() as folder:
        for name in PEERS:
            rows[name] = run_peer(name, corpus, config, Path(folder))
            print(line(name, rows[name]), flush=True)
    if len(sys.argv) > 1:
        plot(Path(sys.argv[1]), corpus)
    print(json.dumps(result(rows)))


def result(rows: dict[str, Row | str]) -> dict[str, float | None]:
    """The JSON of the last line; None for a peer that was left out."""
    found = {name: row.figures for name, row in rows.items() if isinstance(row, Row)}
    mixed, bucketed = found["mixed"], found["bucketed"]
    return {
        "tv1_mixed": _mean(mixed.tv1_step),
        "longest_run_bucketed": bucketed.longest_run,
        "fill_mixed": round(mixed.fill, 4),
        "rank_cost_mixed": round(mixed.rank_cost, 4),
        "fill_bucketed": round(bucketed.fill, 4),
        "rank_cost_bucketed": round(bucketed.rank_cost, 4),
        **{f"tv30_draws_{name}": _mean(found[name].tv30_draws) if name in found else None for name in rows},
        **{f"tv30_{name}": _mean(found[name].tv30_steps) if name in found else None for name in rows},
        "tv30_bucketed": _mean(bucketed.tv30_draws),
    }


def _mean(spread: tuple[float, float] | None) -> float | None:
    return None if spread is None else round(spread[0], 5)


if __name__ == "__main__":
    main()
