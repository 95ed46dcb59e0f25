"""Stage 1: a frozen target runs once over a corpus, and its hidden states are committed to a cache.

1. The main rank tokenises the corpus, creates the cache or finds the same one to resume, and writes what
   training needs of the target: head, tokenizer, configuration.
2. Every rank plans the same batches, leaves out what is committed, and takes its units.
3. A batch runs through the truncated target; its taps go, without pads, to a thread that writes them. A unit
   is committed whole.
4. When all ranks are done, the main rank checks that nothing is missing and marks the cache complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.cache.index import load_index
from dflash.cache.manifest import TARGET_CONFIG_NAME, Identity, Manifest, create_cache, load_manifest
from dflash.cache.writer import CacheWriter, Sample, finalize, sweep_uncommitted
from dflash.dist import barrier, device_of, process_group, sum_over_ranks
from dflash.errors import CacheMismatch, ConfigError, CorpusError, TargetError
from dflash.extract.chat import template_digest, tokenizer_digest
from dflash.extract.conversation import Thinking
from dflash.extract.corpus import CorpusConfig, load_corpus
from dflash.extract.mask_token import find_mask_token
from dflash.extract.plan import Unit, batches_of, pad_share, plan_units, remaining, units_for
from dflash.extract.sink import Sink
from dflash.extract.token_store import TokenizedCorpus
from dflash.files import publish_json
from dflash.head import HEAD_NAME
from dflash.progress import Progress
from dflash.provenance import write_run_record
from dflash.taps import check_taps, default_taps
from dflash.target import DTYPES, TargetFacts, TruncatedTarget, inspect_target, load_head, load_tokenizer
from dflash.world import World

TOKENIZER_NAME = "tokenizer"
_DEFAULT_TAPS = 5
_FIRST_EDGE = 256
# Units are committed as they end, never by size in the middle of a batch: see `plan`.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class ExtractConfig:
    """What `dflash extract` is asked to do."""

    target: str
    """Folder or hub name."""
    data: tuple[str, ...]
    out: Path
    taps: tuple[int, ...] | None = None
    """0-based layers; five evenly spread ones when None."""
    max_length: int = 3072
    """Tokens a sample is cut at."""
    bucket_edges: tuple[int, ...] | None = None
    """Ascending, the last equal to `max_length`; 256, doubled up to `max_length`, when None."""
    min_supervised: int = 2
    tokens_per_batch: int = 8192
    """Tokens of one forward pass, padding included."""
    dtype: str = "bfloat16"
    shard_bytes: int = 256 << 20
    thinking: Thinking = "keep"
    last_turn_only: bool = False
    column_map: tuple[tuple[str, str], ...] = ()
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without the target.

        Raises:
            ConfigError: a value is out of its range; names it.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        edges = self.edges
        if list(edges) != sorted(set(edges)) or edges[0] < 1 or edges[-1] != self.max_length:
            raise ConfigError(
                f"--bucket-edges {','.join(map(str, edges))} must be ascending and end with "
                f"--max-length {self.max_length}"
            )
        if self.tokens_per_batch < 1 or self.shard_bytes < 1:
            raise ConfigError(
                f"--tokens-per-batch {self.tokens_per_batch} and the shard size {self.shard_bytes} "
                "must be at least 1"
            )
        self.corpus  # noqa: B018 - checks its own fields

    @classmethod
    def from_flags(cls, *, shard_mb: int = 256, **flags: Any) -> ExtractConfig:
        """The configuration for command-line flags; the shard size is given in MiB."""
        return cls(shard_bytes=shard_mb << 20, **flags)

    @property
    def edges(self) -> tuple[int, ...]:
        """The bucket edges, chosen or given."""
        if self.bucket_edges:
            return self.bucket_edges
        edges = [_FIRST_EDGE]
        while edges[-1] * 2 < self.max_length:
            edges.append(edges[-1] * 2)
        return (*(edge for edge in edges if edge < self.max_length), self.max_length)

    @property
    def corpus(self) -> CorpusConfig:
        """How the corpus is read and cut."""
        return CorpusConfig(
            self.data,
            self.max_length,
            self.min_supervised,
            self.thinking,
            self.last_turn_only,
            self.column_map,
        )


@dataclass(frozen=True)
class ExtractReport:
    """What the cache holds, and what this run did for it."""

    cache: Path
    samples: int
    """In the cache."""
    tokens: int
    """In the cache."""
    bytes: int
    """Of all shards."""
    new_tokens: int
    """Extracted by this run, on all ranks."""
    seconds: float
    """Of this run, from the first batch to the last commit."""
    pad_share: float
    """Share of this run's computed tokens that was padding."""
    disk_wait_share: float
    """Share of the seconds for which the main rank's target waited for the disk."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""

    @property
    def tokens_per_s(self) -> float:
        """Rate of this run over all ranks; 0 when it had nothing to do."""
        return self.new_tokens / self.seconds if self.new_tokens else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Size of the cache per token."""
        return self.bytes / self.tokens

    def text(self) -> str:
        """The summary for the terminal."""
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        run = (
            f"this run: {self.new_tokens:,} tokens at {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.pad_share:.1%} padding, {self.disk_wait_share:.0%} of the time waiting for the disk"
            if self.new_tokens
            else "this run: nothing left to do"
        )
        return (
            f"{self.cache}: {self.samples:,} samples, {self.tokens:,} tokens, {self.bytes / 1e9:,.2f} GB "
            f"({self.bytes_per_token:,.0f} bytes/token)\n{run}\nrows left out: {dropped}"
        )


def extract(config: ExtractConfig, world: World) -> ExtractReport:
    """Fill a cache, or finish one that an earlier run has begun.

    Args:
        config: What to extract.
        world: This process; all ranks call this with the same configuration.

    Raises:
        TargetError: the target cannot be loaded, or puts out NaN or Inf.
        CorpusError: the data cannot be used.
        CacheError: the cache folder holds something else or cannot be written.
        ConfigError: a setting does not fit the target, or the disk is too small.
    """
    with process_group(world):
        tokenizer = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
        if world.is_main:
            corpus = load_corpus(config.corpus, tokenizer)
            manifest = _prepare(config, tokenizer, corpus)
            barrier()
        else:
            barrier()  # the main rank has kept the tokens by now
            corpus = load_corpus(config.corpus, tokenizer, show=False)
            manifest = load_manifest(config.out)
            _check_same_corpus(corpus, manifest)
        return _run(config, world, corpus, manifest)


def _check_same_corpus(corpus: TokenizedCorpus, manifest: Manifest) -> None:
    if corpus.digest != manifest.identity.corpus_digest:
        raise CacheMismatch(
            f"this rank reads another corpus ({corpus.digest}) than the main rank "
            f"({manifest.identity.corpus_digest}); give every node the same data"
        )


def _prepare(config: ExtractConfig, tokenizer: Any, corpus: TokenizedCorpus) -> Manifest:
    """Everything that exists once: identity, manifest, and what training needs of the target."""
    facts = inspect_target(config.target, trust_remote_code=config.trust_remote_code)
    if int(corpus.tokens.max()) >= facts.vocab_size:
        raise CorpusError(
            f"the corpus has token id {int(corpus.tokens.max())}, the target's embedding "
            f"{facts.vocab_size} rows; the tokenizer is another model's"
        )
    identity = _identity(config, tokenizer, corpus, facts)
    manifest = create_cache(config.out, Manifest(identity, len(corpus), dropped=corpus.dropped))
    if manifest.complete:
        return manifest
    sweep_uncommitted(config.out)
    write_run_record(config.out, "extract", _plain(config))
    _save_target_parts(config, tokenizer, facts, corpus)
    return manifest


def _identity(config: ExtractConfig, tokenizer: Any, corpus: TokenizedCorpus, facts: TargetFacts) -> Identity:
    taps = config.taps or default_taps(facts.num_layers, _DEFAULT_TAPS)
    check_taps(taps, facts.num_layers)
    return Identity(
        target=facts.name,
        revision=facts.revision,
        config_digest=facts.config_digest,
        weights_digest=facts.weights_digest,
        tokenizer_digest=tokenizer_digest(tokenizer),
        template_digest=template_digest(tokenizer),
        taps=taps,
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=config.dtype,
        codec="raw",
        bucket_edges=config.edges,
        max_length=config.max_length,
        corpus_digest=corpus.digest,
    )


def _plain(config: ExtractConfig) -> dict[str, Any]:
    return asdict(config) | {"out": str(config.out), "bucket_edges": config.edges}


def _save_target_parts(
    config: ExtractConfig, tokenizer: Any, facts: TargetFacts, corpus: TokenizedCorpus
) -> None:
    mask = find_mask_token(tokenizer, facts.config, facts.vocab_size, corpus.tokens)
    publish_json(config.out / TARGET_CONFIG_NAME, {"config": facts.config, "mask_token_id": mask})
    if not (config.out / TOKENIZER_NAME).is_dir():
        part = config.out / f"{TOKENIZER_NAME}.part"
        shutil.rmtree(part, ignore_errors=True)
        tokenizer.save_pretrained(part)
        part.rename(config.out / TOKENIZER_NAME)
    if not (config.out / HEAD_NAME).is_file():
        head = load_head(config.target, DTYPES[config.dtype], trust_remote_code=config.trust_remote_code)
        head.save(config.out / HEAD_NAME)


def _run(config: ExtractConfig, world: World, corpus: TokenizedCorpus, manifest: Manifest) -> ExtractReport:
    units, started, waited = _units(config, world, corpus, manifest), time.perf_counter(), 0.0
    if units:
        waited = _run_units(config, world, corpus, manifest, units)
    barrier()
    seconds = time.perf_counter() - started
    totals = torch.tensor([sum(u.tokens for u in units), sum(u.padded_tokens for u in units)])
    new, padded = sum_over_ranks(totals.to(device_of(world))).tolist()
    if world.is_main:
        manifest = finalize(config.out)
    layouts = load_index(config.out, manifest).layouts
    return ExtractReport(
        cache=config.out,
        samples=sum(layout.samples for layout in layouts),
        tokens=sum(layout.tokens for layout in layouts),
        bytes=sum(layout.file_size for layout in layouts),
        new_tokens=new,
        seconds=seconds,
        pad_share=1 - new / padded if padded else 0.0,
        disk_wait_share=waited / seconds,
        dropped=manifest.dropped,
    )


def _units(config: ExtractConfig, world: World, corpus: TokenizedCorpus, manifest: Manifest) -> list[Unit]:
    """This rank's part of what is not yet committed."""
    committed = load_index(config.out, manifest).ids
    barrier()  # no rank may commit before all have looked
    edges, per_token = manifest.identity.bucket_edges, manifest.identity.bytes_per_token
    batches = remaining(
        batches_of(corpus.lengths, corpus.ids, edges, config.tokens_per_batch), corpus.ids, committed
    )
    needed = sum(int(corpus.lengths[batch].sum()) for batch in batches) * per_token
    free = shutil.disk_usage(config.out).free
    if needed > free:
        raise ConfigError(
            f"{config.out}: {needed / 1e9:,.1f} GB are still to be written, {free / 1e9:,.1f} GB are free; "
            "choose another disk, fewer taps or less data"
        )
    limit = max(config.shard_bytes // per_token, 1)
    return units_for(plan_units(batches, corpus.lengths, edges, limit, world), world)


def _run_units(
    config: ExtractConfig, world: World, corpus: TokenizedCorpus, manifest: Manifest, units: Sequence[Unit]
) -> float:
    """Extract units one after another; returns the seconds spent waiting for the disk."""
    target = TruncatedTarget(
        config.target,
        manifest.identity.taps,
        dtype=DTYPES[config.dtype],
        device=device_of(world),
        trust_remote_code=config.trust_remote_code,
    )
    share = "" if world.size == 1 else f" (rank 0 of {world.size})"
    progress = Progress(f"extract{share}", sum(unit.tokens for unit in units), enabled=world.is_main)
    note = f"{pad_share(units):.1%} padding"
    with CacheWriter(config.out, manifest, f"rank{world.rank}", _NO_LIMIT) as writer:
        with progress, Sink(writer) as sink:
            for unit in units:
                for rows in unit.batches:
                    sink.write(list(capture_batch(target, corpus, rows)))
                    progress.advance(int(corpus.lengths[rows].sum()), note)
                sink.commit()
        return sink.waited_s


def capture_batch(target: TruncatedTarget, corpus: TokenizedCorpus, rows: np.ndarray) -> Iterator[Sample]:
    """Hidden states of some samples, on the CPU, without padding.

    Raises:
        TargetError: one of them holds NaN or Inf; names sample, layer and position.
    """
    examples = [corpus.example(int(row)) for row in rows]
    lengths = [len(example.input_ids) for example in examples]
    states = torch.empty(
        (sum(lengths), len(target.taps), target.hidden_size), dtype=target.model.dtype, device=target.device
    )
    target.capture([example.input_ids for example in examples], states)
    _check_finite(states, np.repeat(rows, lengths), target.taps, corpus)
    parts = torch.split(states.cpu(), lengths)
    for example, hidden in zip(examples, parts, strict=True):
        yield Sample(example.id, example.input_ids, example.loss_mask, hidden)


def _check_finite(states: Tensor, rows: np.ndarray, taps: Sequence[int], corpus: TokenizedCorpus) -> None:
    """Refuse NaN and Inf in states [T, K, H]; `rows` int64 [T] are the corpus rows of its tokens."""
    bad = ~torch.isfinite(states).all(dim=-1)
    if not bad.any():
        return
    token, tap = (int(number) for number in bad.nonzero()[0])
    row = int(rows[token])
    position = token - int(np.argmax(rows == row))
    example = corpus.example(row)
    name = f" ({example.name})" if example.name else ""
    raise TargetError(
        f"sample {example.id}{name}: the output of layer {taps[tap]} at position {position}, token "
        f"{int(example.input_ids[position])}, holds NaN or Inf; try --dtype float32, or leave the sample out"
    )
