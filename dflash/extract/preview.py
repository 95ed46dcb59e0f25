"""`dflash extract --plan`: what a run will do and take, from the corpus and the target's configuration alone.

No weights are loaded, but by `probe`, which runs some of the batches for a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash.cache.codec_error import CODECS
from dflash.cache.sizes import ESTIMATED, bytes_per_token
from dflash.dist import device_of
from dflash.errors import ConfigError
from dflash.extract.corpus import load_corpus
from dflash.extract.plan import batches_of, pad_share, units_of
from dflash.extract.settings import ExtractConfig
from dflash.extract.space import TOKEN_BYTES, bytes_needed, free_space
from dflash.extract.token_store import TokenizedCorpus
from dflash.progress import format_seconds
from dflash.target import DTYPES, TruncatedTarget, load_config, load_tokenizer
from dflash.world import World

PLAIN_BATCH = 32
"""Samples of a batch in the plain recipe that padding is compared with."""
PROBE_SECONDS = 30.0
_MAX_BINS = 24
_BAR = 40
_EDGE_STEP = 32
"""Suggested edges are multiples of this: nobody remembers 1013."""


@dataclass(frozen=True)
class Speed:
    """What a probe found."""

    tokens_per_s: float
    """Of one process."""
    seconds: float
    """Of the probe."""
    device: str


@dataclass(frozen=True)
class Preview:
    """A planned extraction. N samples, B buckets."""

    config: ExtractConfig
    lengths: np.ndarray
    """int32 [N], in the order of the data."""
    supervised: int
    """Tokens that carry loss."""
    dropped: dict[str, int]
    taps: tuple[int, ...]
    hidden_size: int
    pad_share: float
    """Share of computed tokens that is padding."""
    free: int
    """Bytes at the destination."""
    speed: Speed | None = None

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def bytes_per_token(self) -> int:
        """Size of one token's hidden states in the codec that is asked for."""
        return self.in_codec(self.config.codec)

    def in_codec(self, codec: str) -> int:
        """Size of one token's hidden states in a codec."""
        return bytes_per_token(codec, len(self.taps), self.hidden_size, self.config.dtype)

    @property
    def bytes_needed(self) -> int:
        """Size of the cache."""
        return bytes_needed(self.lengths, self.bytes_per_token)

    def buckets(self) -> list[tuple[int, int, int]]:
        """Edge, samples and tokens of each bucket."""
        edges = np.asarray(self.config.edges)
        number = np.searchsorted(edges, self.lengths)
        samples = np.bincount(number, minlength=len(edges))
        tokens = np.bincount(number, weights=self.lengths, minlength=len(edges))
        return [(int(e), int(s), int(t)) for e, s, t in zip(edges, samples, tokens, strict=True)]

    def text(self) -> str:
        """The page for the terminal."""
        blocks = (self._corpus(), histogram(self.lengths), self._buckets(), self._costs())
        return "\n\n".join("\n".join(lines) for lines in blocks)

    def _corpus(self) -> list[str]:
        counts = [f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())]
        share = self.supervised / self.tokens
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        return [
            f"samples  {len(self.lengths):,} (rows left out: {', '.join(counts) or 'none'})",
            f"tokens   {self.tokens:,}, supervised {self.supervised:,} ({share:.0%})",
            f"lengths  {shortest:,} to {longest:,}, median {np.median(self.lengths):,.0f}",
        ]

    def _buckets(self) -> list[str]:
        rows = [
            f"  {edge:>7,}  {samples:>10,} samples  {tokens:>13,} tokens  {tokens / self.tokens:>4.0%}"
            for edge, samples, tokens in self.buckets()
        ]
        even = suggested_edges(self.lengths, len(self.config.edges), self.config.max_length)
        return [
            "buckets, up to",
            *rows,
            f"  of equal token mass: --bucket-edges {','.join(map(str, even))}",
        ]

    def _costs(self) -> list[str]:
        taps, plain = ",".join(map(str, self.taps)), plain_waste(self.lengths, PLAIN_BATCH)
        states = f"{len(self.taps)} taps ({taps}) x {self.hidden_size} in {self.config.dtype}"
        verdict = "" if self.bytes_needed <= self.free else "; NOT ENOUGH: the run will refuse to start"
        return [
            f"padding  {self.pad_share:.1%} of what is computed, none is stored",
            f"         (batches of {PLAIN_BATCH} in file order: {plain:.1%}, computed and stored)",
            f"cache    {states}",
            *(self._codec(codec) for codec in self._codecs()),
            f"disk     {_gigabytes(self.free)} free at {self.config.out}{verdict}",
            f"time     {self._time()}",
        ]

    def _codecs(self) -> tuple[str, ...]:
        return CODECS if self.config.dtype == "bfloat16" else ("raw",)

    def _codec(self, codec: str) -> str:
        per_token = self.in_codec(codec)
        size = _gigabytes(bytes_needed(self.lengths, per_token))
        notes = [", estimated"] if codec in ESTIMATED else []
        notes += ["  <- --codec"] if codec == self.config.codec else []
        return f"         {codec:<9}{per_token + TOKEN_BYTES:>8,} bytes/token, {size}{''.join(notes)}"

    def _time(self) -> str:
        if self.speed is None:
            return "not measured; add --probe"
        left = format_seconds(self.tokens / self.speed.tokens_per_s)
        return (
            f"{left} on one process ({self.speed.device}) at {self.speed.tokens_per_s:,.0f} tokens/s; "
            f"measured in {self.speed.seconds:.0f} s, without the disk"
        )


def preview(config: ExtractConfig, *, probe_seconds: float = 0.0) -> Preview:
    """Plan an extraction.

    Args:
        config: What is to be extracted; the destination is not touched.
        probe_seconds: How long to run the target on some of the batches; 0 leaves its weights alone.

    Raises:
        TargetError: the target cannot be found.
        CorpusError: the data cannot be used.
        ConfigError: the taps do not fit the target, or a probe is asked for where several ranks hold it.
    """
    if probe_seconds and config.tp > 1:
        raise ConfigError(
            f"--probe runs the target on one process, and --tp {config.tp} wants more; use --plan alone"
        )
    text = load_config(config.target, trust_remote_code=config.trust_remote_code).get_text_config()
    taps = config.taps_of(text.num_hidden_layers)
    tokenizer = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    corpus = load_corpus(config.corpus, tokenizer)
    batches = batches_of(corpus.lengths, corpus.ids, config.edges, config.tokens_per_batch)
    return Preview(
        config=config,
        lengths=corpus.lengths,
        supervised=int(corpus.mask.sum(dtype=np.int64)),
        dropped=corpus.dropped,
        taps=taps,
        hidden_size=text.hidden_size,
        pad_share=pad_share(units_of(batches, corpus.lengths, config.edges, 1)),
        free=free_space(config.out),
        speed=probe(config, taps, corpus, batches, probe_seconds) if probe_seconds else None,
    )


def probe(
    config: ExtractConfig,
    taps: tuple[int, ...],
    corpus: TokenizedCorpus,
    batches: Sequence[np.ndarray],
    seconds: float,
) -> Speed:
    """Run batches from all over the corpus for so many seconds at most, and measure.

    Raises:
        TargetError: the target cannot be loaded.
    """
    target = TruncatedTarget(
        config.target,
        taps,
        dtype=DTYPES[config.dtype],
        device=device_of(World()),
        trust_remote_code=config.trust_remote_code,
    )
    order = np.random.default_rng(0).permutation(len(batches))
    _capture(target, corpus, batches[order[0]])  # the first one also pays for whatever is set up once
    started, tokens, spent = time.perf_counter(), 0, 0.0
    for number in order:
        tokens += _capture(target, corpus, batches[number])
        spent = time.perf_counter() - started
        if spent >= seconds:
            break
    return Speed(tokens / spent, spent, str(target.device))


def _capture(target: TruncatedTarget, corpus: TokenizedCorpus, rows: np.ndarray) -> int:
    """Run one batch to its end; returns its tokens."""
    sequences = [corpus.example(int(row)).input_ids for row in rows]
    tokens = sum(len(ids) for ids in sequences)
    shape = (tokens, len(target.taps), target.hidden_size)
    states = torch.empty(shape, dtype=target.model.dtype, device=target.device)
    target.capture(sequences, states)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return tokens


def plain_waste(lengths: np.ndarray, batch: int) -> float:
    """Share of padding when samples int [N] are batched in the order they come in."""
    padded = sum(
        len(part) * int(part.max())
        for start in range(0, len(lengths), batch)
        for part in [lengths[start : start + batch]]
    )
    return 1 - int(lengths.sum(dtype=np.int64)) / padded


def suggested_edges(lengths: np.ndarray, count: int, max_length: int) -> tuple[int, ...]:
    """Bucket edges that give each bucket about the same number of tokens; fewer than `count` where they meet.

    Args:
        lengths: int [N], tokens of each sample.
        count: Number of buckets.
        max_length: The last edge.
    """
    ordered = np.sort(lengths)
    mass = np.cumsum(ordered, dtype=np.int64)
    places = np.searchsorted(mass, [int(mass[-1]) * part // count for part in range(1, count)])
    rounded = {-(-int(ordered[place]) // _EDGE_STEP) * _EDGE_STEP for place in places}
    return (*sorted(edge for edge in rounded if edge < max_length), max_length)


def histogram(lengths: np.ndarray) -> list[str]:
    """The length histogram as lines of text: at most 24 bins of one round width."""
    longest = int(lengths.max())
    width = next(w for e in range(10) for m in (1, 2, 5) if (w := m * 10**e) * _MAX_BINS > longest)
    counts = np.bincount(lengths // width)
    first = int(np.argmax(counts > 0))
    lines = [f"samples by length, in steps of {width:,} tokens"]
    for number, count in enumerate(counts[first:].tolist(), first):
        eighths = round(count / int(counts.max()) * _BAR * 8)
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        lines.append(f"  {number * width:>7,}  {count:>10,}  {bar or ('▏' if count else '')}".rstrip())
    return lines


def _gigabytes(count: int) -> str:
    return f"{count / 1e12:,.2f} TB" if count >= 1e12 else f"{count / 1e9:,.2f} GB"
