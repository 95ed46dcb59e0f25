"""A model of the live target that would fill a queue: which sample arrives when.

- `corpus`: in the order of the cache's rows. They are sorted by a hash, so this is a random order.
- `longest-first`, `shortest-first`: one producer works through an epoch sorted by length.
- `mixed`: each bucket has a producer of its own, all start together, and each works through its samples in
  the order of the rows at the speed of its bucket. The fast ones fill the queue and run out first.

Speeds are tokens a second for each bucket. Where the extraction recorded none, a bucket whose samples have L
tokens on average runs at a speed proportional to 1 / (a + b * L), the sampler's cost of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash.errors import ConfigError
from dflash.train.sampler import Corpus, SamplerConfig

PRODUCERS = ("corpus", "longest-first", "shortest-first", "mixed")


def thin(corpus: Corpus, tokens: int) -> Corpus:
    """A corpus of about `tokens` tokens with the same mix, or all of it when it holds no more.

    Every bucket keeps the same share of its samples, evenly spread over its rows, and at least one.
    """
    share = tokens / sum(corpus.tokens_by_bucket)
    if share >= 1:
        return corpus
    kept = []
    for rows in corpus.rows_by_bucket:
        count = max(round(len(rows) * share), min(1, len(rows)))
        kept.append(rows[np.arange(count, dtype=np.int64) * len(rows) // max(count, 1)])
    return select(corpus, np.sort(np.concatenate(kept)), f"{tokens} tokens")


def arrange(corpus: Corpus, producer: str, speeds: Sequence[float] | None = None) -> Corpus:
    """The corpus with its rows in the order in which this producer delivers them.

    Args:
        corpus: The samples.
        producer: One of `PRODUCERS`.
        speeds: Tokens a second of each bucket, `[buckets]`, for `mixed`; None takes the cost model's.

    Raises:
        ConfigError: an unknown producer.
    """
    if producer == "corpus":
        return corpus
    return select(corpus, arrival_order(corpus, producer, speeds), producer)


def arrival_order(
    corpus: Corpus, producer: str, speeds: Sequence[float] | None = None
) -> npt.NDArray[np.int64]:
    """Rows of the corpus in the order in which this producer delivers them, int64 `[N]`; see `arrange`."""
    lengths = corpus.lengths.astype(np.int64)
    if producer == "corpus":
        return np.arange(len(corpus))
    if producer == "longest-first":
        return np.argsort(-lengths, kind="stable")
    if producer == "shortest-first":
        return np.argsort(lengths, kind="stable")
    if producer == "mixed":
        return np.argsort(_finish_times(corpus, speeds or cost_speeds(corpus)), kind="stable")
    raise ConfigError(f"--producer {producer} is not one of {', '.join(PRODUCERS)}")


def select(corpus: Corpus, rows: npt.NDArray[np.int64], what: str) -> Corpus:
    """A corpus of some rows of another, in this order; `what` tells its digest apart."""
    return Corpus(corpus.lengths[rows], corpus.buckets[rows], corpus.bucket_edges, f"{corpus.digest}, {what}")


def cost_speeds(corpus: Corpus) -> list[float]:
    """Relative tokens a second of each bucket by the sampler's default cost of a sample, `[buckets]`."""
    config = SamplerConfig()
    means = [
        tokens / max(len(rows), 1)
        for tokens, rows in zip(corpus.tokens_by_bucket, corpus.rows_by_bucket, strict=True)
    ]
    return [1 / (config.cost_linear + config.cost_quadratic * mean) for mean in means]


def _finish_times(corpus: Corpus, speeds: Sequence[float]) -> npt.NDArray[np.float64]:
    times = np.empty(len(corpus), np.float64)
    for rows, speed in zip(corpus.rows_by_bucket, speeds, strict=True):
        times[rows] = np.cumsum(corpus.lengths[rows], dtype=np.float64) / speed
    return times
