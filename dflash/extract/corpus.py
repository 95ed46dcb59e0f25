"""Training text to tokens: read, render, tokenise, cut, drop and count, number, and never do it twice.

1. `formats` reads rows, `conversation` brings them to one of three forms, `chat` renders and marks them.
2. `encode_rows` tokenises a chunk and cuts each sample: at `max_length`, and after its last supervised token,
   since nothing reads what comes later. What keeps too few supervised tokens is dropped and counted.
3. `load_corpus` runs chunks in order, over processes where that pays, drops exact duplicates, and keeps the
   result under a key made of the content of everything that decides it.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash.errors import ConfigError, CorpusError
from dflash.extract.chat import ChatRenderer, Rendered, template_digest, tokenise, tokenizer_digest
from dflash.extract.conversation import Conversation, PlainText, Thinking, Tokens, Unusable, parse_row
from dflash.extract.formats import Row, Source, find_sources
from dflash.extract.token_store import TokenizedCorpus, corpus_from, load_tokens, save_tokens
from dflash.files import digest_json
from dflash.progress import Progress

_FORMAT = 1
"""Raised when the same input gives other tokens than before, so that kept tokens are not used."""
_CHUNK_ROWS = 256
# Below this a worker's start, an import of transformers, takes longer than the work.
_PARALLEL_BYTES = 64 << 20


@dataclass(frozen=True)
class CorpusConfig:
    """What to train on, and how it is cut."""

    data: tuple[str, ...]
    """Files, folders, glob patterns, or names of Hugging Face data sets (`NAME[:SPLIT]`)."""
    max_length: int = 3072
    """Tokens a sample is cut at."""
    min_supervised: int = 2
    """Samples with fewer supervised tokens are dropped. An anchor needs two."""
    thinking: Thinking = "keep"
    """Whether the assistant's reasoning stays where the template shows it, or is removed first."""
    last_turn_only: bool = False
    """Whether only the last assistant turn of a conversation is supervised."""
    column_map: tuple[tuple[str, str], ...] = ()
    """Fields of a row that are taken under another name, as (old, new)."""
    processes: int = 0
    """Processes that tokenise; 0 chooses by the amount of data."""
    reuse: bool = True
    """Whether tokens are taken from an earlier run and kept (`$DFLASH_HOME`, else `~/.cache/dflash`)."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: a number is out of its range, `thinking` is no choice, or two columns get one name.
        """
        if self.max_length < 2 or self.min_supervised < 1 or self.processes < 0:
            raise ConfigError(
                f"max_length {self.max_length} must be at least 2, "
                f"min_supervised {self.min_supervised} at least 1, processes {self.processes} at least 0"
            )
        if self.thinking not in ("keep", "strip"):
            raise ConfigError(f"--thinking {self.thinking!r}: choose keep or strip")
        names = [new for _, new in self.column_map]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"--column-map gives several columns the name {twice[0]!r}; give each its own")

    def settings(self) -> dict[str, Any]:
        """The fields that decide the tokens."""
        return {
            "format": _FORMAT,
            "max_length": self.max_length,
            "min_supervised": self.min_supervised,
            "thinking": self.thinking,
            "last_turn_only": self.last_turn_only,
        }


@dataclass(frozen=True)
class Encoded:
    """One sample on its way into the corpus."""

    input_ids: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """uint8 [T]"""
    kind: str | None
    name: str | None


@dataclass
class Chunk:
    """What became of some rows."""

    samples: list[Encoded] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    refusal: str = ""
    """Where and why the template first refused a row; empty if it did not."""
    read: int = 0
    """Bytes read from all sources up to the last of these rows."""


def load_corpus(config: CorpusConfig, tokenizer: Any, *, show: bool = True) -> TokenizedCorpus:
    """Tokenise a corpus, or take its tokens from an earlier run over the same content with the same settings.

    Args:
        config: What to read and how to cut it.
        tokenizer: The target's (fast) tokenizer.
        show: Whether to show progress.

    Raises:
        CorpusError: data is missing or malformed, the template gives no exact mask, or nothing is left.
    """
    sources = find_sources(config.data)
    key = _key(config, sources, tokenizer) if config.reuse else ""
    kept = load_tokens(key) if key else None
    if kept is not None:
        return kept
    corpus = _tokenise_all(config, sources, tokenizer, show=show)
    if key:
        save_tokens(key, corpus)
    return corpus


def _key(config: CorpusConfig, sources: Sequence[Source], tokenizer: Any) -> str:
    return digest_json(
        {
            "sources": [source.digest() for source in sources],
            "tokenizer": tokenizer_digest(tokenizer),
            "template": template_digest(tokenizer),
            "settings": config.settings(),
            "columns": sorted(config.column_map),
        }
    )


def _tokenise_all(
    config: CorpusConfig, sources: Sequence[Source], tokenizer: Any, *, show: bool
) -> TokenizedCorpus:
    collected = _Collected()
    rows = _all_rows(sources)
    chunks = iter(lambda: list(itertools.islice(rows, _CHUNK_ROWS)), [])
    size = sum(source.size for source in sources)
    # In bytes: how many rows a file holds is known only when it has been read.
    with Progress("tokenise", size, "bytes", enabled=show) as progress:
        for chunk in _encode_chunks(config, chunks, tokenizer, size):
            collected.add(chunk)
            progress.advance(max(chunk.read - progress.done, 0), f"{len(collected.samples):,} samples")
    if not collected.samples:
        raise CorpusError(collected.nothing_left(", ".join(config.data)))
    return corpus_from(
        [(identity, e.input_ids, e.loss_mask, e.kind, e.name) for identity, e in collected.samples],
        dict(sorted(collected.dropped.items())),
        config.settings(),
    )


def _all_rows(sources: Sequence[Source]) -> Iterator[Row]:
    before = 0
    for source in sources:
        size = source.size
        for row in source.rows():
            yield replace(row, read=min(row.read, size) + before)
        before += size


class _Collected:
    """Samples in the order of the data, without duplicates."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, Encoded]] = []
        self.dropped: Counter[str] = Counter()
        self.refusal = ""
        self._row_of: dict[int, int] = {}

    def add(self, chunk: Chunk) -> None:
        self.dropped.update(chunk.dropped)
        self.refusal = self.refusal or chunk.refusal
        for sample in chunk.samples:
            self._add(sample)

    def _add(self, sample: Encoded) -> None:
        for occurrence in itertools.count():
            identity = sample_id(sample.input_ids, sample.loss_mask, occurrence)
            row = self._row_of.setdefault(identity, len(self.samples))
            if row == len(self.samples):
                self.samples.append((identity, sample))
                return
            if _same(self.samples[row][1], sample):
                self.dropped["duplicate"] += 1
                return
            # Two different samples share 64 bits: the later one gets another number.

    def nothing_left(self, names: str) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        refusal = f"; the template first refused {self.refusal}" if self.refusal else ""
        return f"{names}: nothing is left to train on (dropped: {reasons or 'none'}){refusal}"


def _same(one: Encoded, other: Encoded) -> bool:
    return np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.loss_mask, other.loss_mask)


def sample_id(input_ids: np.ndarray, loss_mask: np.ndarray, occurrence: int = 0) -> int:
    """Stable uint64 of a sample's content.

    Args:
        input_ids: int32 [T].
        loss_mask: uint8 [T].
        occurrence: Number of other samples that had the same id before; 0 but for a collision.
    """
    state = hashlib.blake2b(digest_size=8)
    state.update(np.asarray([len(input_ids), occurrence], dtype="<i8").tobytes())
    state.update(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    state.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return int.from_bytes(state.digest(), "little")


# Tokenising over processes. A worker builds its renderer once and keeps it.

_worker: tuple[CorpusConfig, Any, ChatRenderer] | None = None


def _start_worker(config: CorpusConfig, tokenizer: Any) -> None:
    global _worker  # noqa: PLW0603 - the one place a pool's initialiser can leave something for its tasks
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = (config, tokenizer, ChatRenderer(tokenizer))


def _work(rows: list[Row]) -> Chunk:
    if _worker is None:
        raise RuntimeError("a tokenising process was not initialised")
    return encode_rows(rows, *_worker)


def _encode_chunks(
    config: CorpusConfig, chunks: Iterable[list[Row]], tokenizer: Any, size: int
) -> Iterator[Chunk]:
    """Encoded chunks in the order given, however many processes there are."""
    processes = config.processes or (len(os.sched_getaffinity(0)) if size > _PARALLEL_BYTES else 1)
    if processes == 1:
        renderer = ChatRenderer(tokenizer)
        for rows in chunks:
            yield encode_rows(rows, config, tokenizer, renderer)
        return
    # Spawned, not forked: the tokenizer's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_worker, (config, tokenizer)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for rows in chunks:
                waiting.append(pool.submit(_work, rows))
                if len(waiting) > 2 * processes:  # bounds the rows in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def encode_rows(rows: Sequence[Row], config: CorpusConfig, tokenizer: Any, renderer: ChatRenderer) -> Chunk:
    """Tokenise and cut rows.

    Raises:
        CorpusError: a row is malformed, or its mask cannot be told exactly.
    """
    chunk = Chunk(read=rows[-1].read if rows else 0)
    pending: list[tuple[Row, Rendered | Tokens]] = []
    for row in rows:
        try:
            pending.append((row, _prepared(row, config, tokenizer, renderer)))
        except Unusable as reason:  # noqa: PERF203 - a verdict on one row must not end the others
            chunk.dropped[str(reason)] += 1
            if reason.__cause__ is not None and not chunk.refusal:
                chunk.refusal = f"{row.where}: {' '.join(str(reason.__cause__).split())}"
    texts = iter(tokenise(tokenizer, [item for _, item in pending if isinstance(item, Rendered)]))
    for row, item in pending:
        ids, mask = (item.input_ids, item.loss_mask) if isinstance(item, Tokens) else next(texts)
        ids, mask = cut(ids, mask, config.max_length)
        if int(mask.sum()) < config.min_supervised:
            chunk.dropped["too_few_supervised"] += 1
        else:
            chunk.samples.append(Encoded(ids, mask, _label(row, "kind"), _label(row, "id")))
    return chunk


def _prepared(row: Row, config: CorpusConfig, tokenizer: Any, renderer: ChatRenderer) -> Rendered | Tokens:
    sample = parse_row(renamed(row, config.column_map), config.thinking)
    if isinstance(sample, Conversation):
        return renderer.render_marked(sample, row.where, last_only=config.last_turn_only)
    if isinstance(sample, PlainText):
        ids = tokenizer(sample.text, return_attention_mask=False, verbose=False)["input_ids"]
        mask = np.ones(len(ids), dtype=np.uint8)
        # Nothing predicts the token that begins every text.
        mask[:1] = 0 if ids and ids[0] == tokenizer.bos_token_id else 1
        return Tokens(np.asarray(ids, dtype=np.int32), mask)
    _check_vocabulary(sample, row.where, tokenizer)
    return sample


def renamed(row: Row, columns: Sequence[tuple[str, str]]) -> Row:
    """The row with its columns renamed; a column it lacks is left to the search for a shape to report."""
    moved = {new: row.fields[old] for old, new in columns if old in row.fields}
    if not moved:
        return row
    old_names = {old for old, _ in columns}
    kept = {name: value for name, value in row.fields.items() if name not in old_names}
    return replace(row, fields=kept | moved)


def _check_vocabulary(sample: Tokens, where: str, tokenizer: Any) -> None:
    size = len(tokenizer)
    if sample.input_ids.size and sample.input_ids.max() >= size:
        raise CorpusError(
            f"{where}: token id {sample.input_ids.max()} is outside the tokenizer's vocabulary of {size}; "
            "these rows were tokenised for another target"
        )


def cut(input_ids: np.ndarray, loss_mask: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut int32 [T] and uint8 [T] at `max_length`, then after the last supervised token."""
    supervised = np.flatnonzero(loss_mask[:max_length])
    length = int(supervised[-1]) + 1 if supervised.size else 0
    return input_ids[:length], loss_mask[:length]


def _label(row: Row, name: str) -> str | None:
    value = row.fields.get(name)
    return None if value is None else str(value)
