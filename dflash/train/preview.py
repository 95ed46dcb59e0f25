"""What settings of the sampler would do with a cache, from its index alone: the work of `dflash sample`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from dflash.cache.index import CacheIndex, load_index
from dflash.cache.manifest import Manifest, load_manifest
from dflash.cache.speeds import load_speeds
from dflash.errors import CacheError, ConfigError
from dflash.train.compare import FloatArray, MixFigures, Spread, Trace, figures, simulate
from dflash.train.holdout import HoldoutConfig, split
from dflash.train.mix import bucket_weights, epoch_passes
from dflash.train.mixplot import Panel, check_plot, plot_mix
from dflash.train.producer import arrange, thin
from dflash.train.runs import bucket_losses
from dflash.train.sampler import Corpus
from dflash.train.variants import DEFAULT_TEXTS, Variant, parse_variant


@dataclass(frozen=True)
class PreviewConfig:
    """What is compared, and on what."""

    cache: Path
    settings: tuple[str, ...] = DEFAULT_TEXTS
    """Each as `parse_variant` reads it."""
    holdout: HoldoutConfig = field(default_factory=HoldoutConfig)
    """What training leaves out."""
    ranks: int = 8
    draws: int = 2000
    """Micro-batches to simulate for each setting."""
    producer: str = "corpus"
    """How a live target would deliver: see `dflash.train.producer`."""
    losses: Path | None = None
    """A run whose loss by bucket predicts how rough the loss will be."""
    plot: Path | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: nothing to compare, more settings than letters, no draws or ranks, or more ranks.
        """
        if not 1 <= len(self.settings) <= len(ascii_uppercase):
            raise ConfigError(f"{len(self.settings)} --settings; 1 to {len(ascii_uppercase)} can be compared")
        if not 1 <= self.ranks <= self.draws:
            raise ConfigError(
                f"--ranks {self.ranks} with --draws {self.draws}: every rank needs at least one draw, so "
                "ranks must be at least 1 and at most the draws"
            )


@dataclass(frozen=True)
class Preview:
    """The comparison."""

    header: str
    edges: tuple[int, ...]
    rows: tuple[tuple[str, MixFigures], ...]
    """Each setting as given, and its figures."""
    passes: tuple[tuple[float, ...], ...]
    """How often each bucket's samples are drawn in an epoch of each setting, `[settings][buckets]`."""

    def table(self) -> str:
        """For a terminal: a row a setting."""
        titles = ("30 draws", "90 draws", "30 steps", "1 step", "run", "oldest", "rank cost", "fill", "pad")
        table: list[tuple[str, ...]] = [("", *titles, "tokens/step", "roughness")]
        table += [
            (letter, *self._cells(found))
            for letter, (_, found) in zip(ascii_uppercase, self.rows, strict=False)
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        legend = [
            f"{letter}  {label}" for letter, (label, _) in zip(ascii_uppercase, self.rows, strict=False)
        ]
        first = "total variation from the quota, mean/max, over"
        parts = [self.header, "", *legend, "", f"   {first}", *map(str.rstrip, lines)]
        return "\n".join([*parts, *self._repeats()])

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON-ready value."""
        rows = [
            {"settings": label, **found.to_json(), "passes_by_bucket": list(each)}
            for (label, found), each in zip(self.rows, self.passes, strict=True)
        ]
        return {"header": self.header, "bucket_edges": list(self.edges), "rows": rows}

    def _repeats(self) -> list[str]:
        """How often each bucket is gone through in an epoch, for settings where that is not once."""
        lines = [
            f"{letter}  " + "  ".join(f"{edge:,}: {n:.2f}" for edge, n in zip(self.edges, each, strict=True))
            for letter, each in zip(ascii_uppercase, self.passes, strict=False)
            if any(n not in (0.0, 1.0) for n in each)
        ]
        return (
            ["", "   an epoch draws each bucket's samples so many times, reshuffled", *lines] if lines else []
        )

    def _cells(self, found: MixFigures) -> tuple[str, ...]:
        spreads = (found.tv30_draws, found.tv90_draws, found.tv30_steps, found.tv1_step)
        return (
            *map(_spread, spreads),
            str(found.longest_run),
            f"{found.oldest_age} ({self.edges[found.oldest_bucket]})",
            f"{found.rank_cost:.3f}",
            f"{found.fill:.3f}",
            f"{found.padding:.1%}",
            f"{found.step_tokens:,.0f} ± {found.step_tokens_spread:,.0f}",
            "" if found.roughness is None else f"{found.roughness:.4f}",
        )


def preview(config: PreviewConfig) -> Preview:
    """Simulate every setting on the cache's samples, and draw the picture if one is asked for.

    Raises:
        ConfigError: a setting is wrong or does not suit the cache, or the picture cannot be written.
        CacheError: the folder is no cache, holds no samples, or is damaged.
    """
    variants = [parse_variant(text) for text in config.settings]
    if config.plot is not None:
        check_plot(config.plot)
    manifest = load_manifest(config.cache)
    whole = open_index(config.cache, manifest)
    corpus = trained_corpus(whole, manifest, config.holdout)
    losses = None if config.losses is None else bucket_losses(config.losses, corpus.bucket_edges)
    speeds = load_speeds(config.cache, corpus.bucket_edges)
    rows, panels, passes = [], [], []
    for variant in variants:
        wanted = thin(corpus, config.draws * variant.config.tokens_per_batch)
        found, quota = _simulate(variant, arrange(wanted, config.producer, speeds), config)
        rows.append((variant.label, figures(found, quota, losses)))
        panels.append(Panel(variant.label, found.draws, quota))
        passes.append(_passes(variant, corpus))
    if config.plot is not None:
        plot_mix(config.plot, panels, corpus.bucket_edges)
    header = _header(config, manifest, corpus, len(whole), speeds)
    return Preview(header, corpus.bucket_edges, tuple(rows), tuple(passes))


def open_index(cache: Path, manifest: Manifest) -> CacheIndex:
    """The samples of a cache, which may be incomplete, but not empty.

    Raises:
        CacheError: the cache holds no samples yet.
        CacheCorrupt: the index is damaged.
    """
    index = load_index(cache, manifest)
    if not len(index):
        raise CacheError(f"{cache} holds no samples yet; run `dflash extract` first")
    return index


def trained_corpus(whole: CacheIndex, manifest: Manifest, holdout: HoldoutConfig) -> Corpus:
    """The samples that a training with this share held out would draw, as its sampler sees them.

    Raises:
        ConfigError: nothing is left to train on.
    """
    index = whole.select(split(whole.ids, holdout)[0])
    return Corpus(index.lengths, index.buckets, manifest.identity.bucket_edges, index.digest())


def _simulate(variant: Variant, corpus: Corpus, config: PreviewConfig) -> tuple[Trace, FloatArray]:
    try:
        return simulate(corpus, variant.config, draws=config.draws, ranks=config.ranks)
    except ConfigError as error:
        raise ConfigError(f"--settings {variant.label}: {error}") from error


def _passes(variant: Variant, corpus: Corpus) -> tuple[float, ...]:
    tokens = corpus.tokens_by_bucket
    weights = bucket_weights(variant.config.mix, corpus.bucket_edges, tokens)
    return tuple(epoch_passes(weights, tokens, variant.config.epoch_size))


def _header(
    config: PreviewConfig, manifest: Manifest, corpus: Corpus, samples: int, speeds: list[float] | None
) -> str:
    out = f" ({samples - len(corpus):,} held out)" if config.holdout.share else ""
    state = "" if manifest.complete else " so far (INCOMPLETE: what will come is not counted)"
    model = "speeds as extracted" if speeds else "speeds by the cost model"
    producer = f"{config.producer}, {model}" if config.producer == "mixed" else config.producer
    return (
        f"{config.cache}: {len(corpus):,} samples{out}, {sum(corpus.tokens_by_bucket):,} tokens{state}; "
        f"{config.draws:,} draws on {config.ranks} ranks, arrival: {producer}"
    )


def _spread(found: Spread | None) -> str:
    return "-" if found is None else f"{found.mean:.4f}/{found.worst:.4f}"
