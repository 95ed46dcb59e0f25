"""Stage 1: a frozen target runs once over a corpus, and its hidden states are committed to a cache.

1. The main rank tokenises the corpus, creates the cache or finds the same one to resume, and writes what
   training needs of the target: head, tokenizer, configuration.
2. Every rank plans the same batches, leaves out what is committed, and takes its units.
3. A batch runs through the truncated target; its taps go, without pads, to a thread that writes them. A unit
   is committed whole.
4. When all ranks are done, the main rank checks that nothing is missing and marks the cache complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.cache.index import load_index
from dflash.cache.manifest import Manifest, load_manifest
from dflash.cache.writer import CacheWriter, Sample, finalize
from dflash.dist import barrier, device_of, process_group, sum_over_ranks
from dflash.errors import CacheMismatch, TargetError
from dflash.extract.corpus import load_corpus
from dflash.extract.plan import Unit, batches_of, pad_share, plan_units, remaining, units_for
from dflash.extract.prepare import prepare
from dflash.extract.report import ExtractReport
from dflash.extract.settings import ExtractConfig
from dflash.extract.sink import Sink
from dflash.extract.space import check_space
from dflash.extract.token_store import TokenizedCorpus
from dflash.progress import Progress
from dflash.target import DTYPES, TruncatedTarget, load_tokenizer
from dflash.world import World

__all__ = ["ExtractConfig", "ExtractReport", "capture_batch", "extract"]

# Units are committed as they end, never by size in the middle of a batch: see `plan`.
_NO_LIMIT = 1 << 62


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
            manifest = prepare(config, tokenizer, corpus)
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
    check_space(
        config.out, corpus.lengths[np.concatenate(batches)] if batches else [], per_token, force=config.force
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
