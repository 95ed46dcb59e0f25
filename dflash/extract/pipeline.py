"""Stage 1: a frozen target runs once over a corpus, and its hidden states are committed to a cache.

1. The main rank tokenises the corpus, creates the cache or finds the same one to resume, and writes what
   training needs of the target: head, tokenizer, configuration.
2. Every rank plans the same units of work and leaves out what is committed. Whoever is free takes the next.
3. A batch runs through the truncated target; its taps go, without pads, to a thread that writes them. A unit
   is committed whole; when a signal asks for a stop, what was captured so far is committed.
4. When all ranks are done, the main rank checks that nothing is missing and marks the cache complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dflash.board import Board
from dflash.cache.index import load_index
from dflash.cache.manifest import BadSample, Manifest, bucket_of, load_manifest
from dflash.cache.mirror import Mirror, mirror_of
from dflash.cache.planned import PLANNED_NAME, Planned, save_planned
from dflash.cache.sizes import bytes_per_token
from dflash.cache.speeds import save_speeds
from dflash.cache.writer import CacheWriter
from dflash.dist import device_of
from dflash.errors import CacheMismatch, RankFailed, TargetError
from dflash.extract.capture import Capturer, InFlight
from dflash.extract.corpus import load_corpus
from dflash.extract.plan import Unit, batches_of, mixed_order, pad_share, plan_units, remaining
from dflash.extract.prepare import prepare
from dflash.extract.remote import claim_of, finalized, may_write, writer_name
from dflash.extract.replica import Replica, ReplicaTarget
from dflash.extract.report import ExtractReport
from dflash.extract.settings import ExtractConfig
from dflash.extract.sink import Sink
from dflash.extract.space import check_space
from dflash.extract.token_store import TokenizedCorpus
from dflash.lifeline import Lifeline, lifeline
from dflash.progress import Progress
from dflash.stopping import StopFlag, stop_signals
from dflash.target import DTYPES, TruncatedTarget, load_tokenizer
from dflash.world import World

__all__ = ["ExtractConfig", "ExtractReport", "extract"]

# Units are committed as they end, never by size in the middle of a batch: see `plan`.
_NO_LIMIT = 1 << 62
_PATIENCE_S = 10.0
"""How long ranks that were asked to stop may take for their last batch."""
_AGAIN = "run the same command again to go on"
MAX_BAD_SAMPLES = 1 << 16
"""The manifest lists them."""


def extract(config: ExtractConfig, world: World) -> ExtractReport:
    """Fill a cache, finish one that an earlier run has begun, or add data to a finished one.

    Args:
        config: What to extract.
        world: This process; all ranks call this with the same configuration.

    Raises:
        TargetError: the target cannot be loaded, or puts out NaN or Inf for too many samples.
        CorpusError: the data cannot be used.
        CacheError: the cache folder holds something else or cannot be written.
        ConfigError: a setting does not fit the target or the number of ranks, or the disk is too small.
        RankFailed: another rank failed, and its own error says why; or it is gone, stopped or stuck.
    """
    replica = Replica(world, config.tp)
    mirror = mirror_of(config.out)
    with (
        replica.joined("extract") as board,
        board.telling_failure(),
        lifeline(board, advice=_AGAIN) as line,
        may_write(mirror, board, append=config.append),
    ):
        corpus, manifest = _prepared(config, mirror, line)
        units = _units(config, corpus, manifest, mirror, line)
        with stop_signals() as stop:
            run = _Run(config, corpus, manifest, mirror, line, stop, replica)
            return _conclude(run, units, _work(run, units))


def _prepared(
    config: ExtractConfig, mirror: Mirror | None, line: Lifeline
) -> tuple[TokenizedCorpus, Manifest]:
    board = line.board
    line.at(
        "reading the corpus" if board.world.is_main else "waiting for the first rank to prepare the cache"
    )
    tokenizer = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    if board.world.is_main:
        corpus = load_corpus(config.corpus, tokenizer)
        line.at("preparing the cache", part=True)
        manifest = prepare(config, tokenizer, corpus)
        if mirror is not None and not manifest.complete:
            mirror.push_parts()
        board.shared("prepared", lambda: claim_of(mirror))
        return corpus, manifest
    claim = board.shared("prepared", lambda: 0)  # the main rank has kept the tokens by now
    line.at("reading the corpus", part=True)
    if mirror is not None:
        mirror.join(claim)
    corpus, manifest = load_corpus(config.corpus, tokenizer, show=False), load_manifest(config.out)
    if corpus.digest not in manifest.corpora:
        raise CacheMismatch(
            f"this rank reads another corpus ({corpus.digest}) than the main rank "
            f"({manifest.corpora[-1]}); give every node the same data"
        )
    return corpus, manifest


def _units(
    config: ExtractConfig, corpus: TokenizedCorpus, manifest: Manifest, mirror: Mirror | None, line: Lifeline
) -> list[Unit]:
    """What is not yet committed; the same on every rank."""
    board = line.board
    line.at("planning what is left to do")
    index = load_index(config.out, manifest)
    done = np.concatenate([index.ids, np.array([bad.id for bad in manifest.bad], np.uint64)])
    identity = manifest.identity
    edges, shape = identity.bucket_edges, (len(identity.taps), identity.hidden_size)
    per_token = bytes_per_token(identity.codec, *shape, identity.dtype)
    batches = batches_of(corpus.lengths, corpus.ids, edges, config.tokens_per_batch)
    batches = remaining(batches, corpus.ids, done)
    if board.world.is_main and batches:
        owed = corpus.lengths[np.concatenate(batches)]
        if mirror is None:  # a mirror keeps within its bound by itself
            check_space(config.out, owed, per_token, force=config.force)
        save_planned(config.out, Planned.of(np.concatenate([index.lengths, owed]), edges))
        if mirror is not None:
            mirror.push_file(PLANNED_NAME)
    board.meet("planned")  # no rank may commit before all have looked
    limit = max(config.shard_bytes // per_token, 1)
    units = plan_units(batches, corpus.lengths, edges, limit, board.world.size // config.tp)
    return mixed_order(units, corpus.lengths, edges) if config.order == "mixed" else units


class _Patience:
    """Runs out some seconds after it is first asked for."""

    def __init__(self) -> None:
        self._end: float | None = None

    def exhausted(self) -> bool:
        now = time.monotonic()
        self._end = self._end or now + _PATIENCE_S
        return now > self._end


@dataclass
class _Run:
    """What a rank works with."""

    config: ExtractConfig
    corpus: TokenizedCorpus
    manifest: Manifest
    mirror: Mirror | None
    line: Lifeline
    stop: StopFlag
    replica: Replica

    @property
    def board(self) -> Board:
        """That of all ranks."""
        return self.line.board

    def asked_to_stop(self) -> bool:
        """Whether a signal has come to any rank; one that came to this rank is passed on.

        Raises:
            RankFailed: another rank failed.
        """
        self.board.check()
        if self.stop.name is not None:
            self.board.ask_to_stop(self.stop.name)
        return self.board.stop_asked() is not None

    def wait_for_others(self, show: Callable[[], None]) -> None:
        """Wait until every rank has done its part, passing a signal on meanwhile.

        Raises:
            RankFailed: another rank failed, is stuck, or does not answer a request to stop.
        """
        patience = _Patience()

        def meanwhile() -> None:
            self.line.at("the end, with nothing left to do")  # counted as here by now
            show()
            self.line.check()
            if self.asked_to_stop() and patience.exhausted():
                raise RankFailed(
                    f"stopped by {self.board.stop_asked()}, but another rank has not answered for "
                    f"{_PATIENCE_S:.0f} s and may be dead; {_AGAIN}"
                )

        self.board.meet("worked", meanwhile)

    def check_bad(self, bad: Sequence[BadSample]) -> None:
        """Count bad samples of all ranks.

        Raises:
            TargetError: they are more than `max_bad` allows; tells of the last one.
        """
        if not bad:
            return
        count, expected = self.board.add("bad", len(bad)), self.manifest.expected_samples
        if count > self.config.max_bad * expected or count > MAX_BAD_SAMPLES:
            raise TargetError(
                f"{bad[-1].text()}; {count:,} of {expected:,} samples are bad, more than --max-bad "
                f"{self.config.max_bad:g}; try --dtype float32, or allow more"
            )


@dataclass
class _Done:
    """What one rank did."""

    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    halved: int = 0
    waited: float = 0.0
    """Seconds of waiting for the disk."""
    seconds: float = 0.0
    """From the first batch, the target loaded, until all ranks were done."""
    bad: list[BadSample] = field(default_factory=list)
    laps: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Tokens and seconds by the edge of their bucket."""

    def lap(self, edge: int, tokens: int, seconds: float) -> None:
        """Count a batch of one bucket."""
        before = self.laps.get(str(edge), (0, 0.0))
        self.laps[str(edge)] = (before[0] + tokens, before[1] + seconds)


def _work(run: _Run, units: Sequence[Unit]) -> _Done:
    """Take units until none is left or a stop is asked for, then wait for the other ranks."""
    done, board = _Done(), run.board
    run.line.at("loading the target")
    target = _loaded(run) if units else None
    started = time.perf_counter()
    label = "extract" if board.world.size == 1 else f"extract on {board.world.size} ranks"
    with Progress(label, sum(u.tokens for u in units), enabled=board.world.is_main) as progress:

        def show(note: str = "") -> None:
            progress.advance(board.add("tokens", 0) - progress.done, note)

        run.line.at("taking its first batch")
        if target is not None:
            _take_part(run, target, units, show, done)
        run.wait_for_others(show)
    done.seconds = time.perf_counter() - started
    return done


def _loaded(run: _Run) -> TruncatedTarget:
    options: dict[str, Any] = {
        "dtype": DTYPES[run.config.dtype],
        "device": device_of(run.board.world),
        "trust_remote_code": run.config.trust_remote_code,
    }
    name, taps = run.config.target, run.manifest.identity.taps
    if run.replica.size > 1:
        return ReplicaTarget(name, taps, replica=run.replica, line=run.line, **options)
    return TruncatedTarget(name, taps, **options)


def _take_part(
    run: _Run,
    target: TruncatedTarget,
    units: Sequence[Unit],
    show: Callable[[str], None],
    done: _Done,
) -> None:
    """The first rank of a replica takes units; the others run the batches that it hands on."""
    if not isinstance(target, ReplicaTarget):
        _extract_units(run, target, units, show, done)
    elif run.replica.is_first:
        _extract_units(run, target, units, show, done)
        target.dismiss()
    else:
        target.follow(run.asked_to_stop)


def _extract_units(
    run: _Run,
    target: TruncatedTarget,
    units: Sequence[Unit],
    show: Callable[[str], None],
    done: _Done,
) -> None:
    mirror = run.mirror
    name = writer_name(mirror, run.board.world.rank)
    handover = None if mirror is None else mirror.commits
    capturer = Capturer(target, run.corpus)
    note = "packed" if target.packed else f"{pad_share(units):.1%} padding"
    with (
        CacheWriter(run.config.out, run.manifest, name, _NO_LIMIT, handover) as writer,
        Sink(writer) as sink,
    ):

        def settle(flights: Sequence[InFlight], *, commit: bool) -> None:
            for flight in flights:
                captured = capturer.finish(flight)
                sink.write(captured.samples)
                done.bad += captured.bad
                run.check_bad(captured.bad)
                done.samples += len(captured.samples)
                done.tokens += sum(len(sample.input_ids) for sample in captured.samples)
                run.board.add("tokens", sum(flight.lengths))
            if commit:
                sink.commit()
            show(note)

        before: tuple[list[InFlight], bool] = ([], False)
        edges = run.manifest.identity.bucket_edges
        for rows, ends_unit in _batches_in_turn(run, units):
            started = time.perf_counter()
            flights = capturer.start(rows)
            settle(before[0], commit=before[1])  # while the device is busy with the next one
            before = (flights, ends_unit)
            lengths = run.corpus.lengths[rows]  # all of one bucket, as most likely those before them
            edge = edges[bucket_of(int(lengths[0]), edges)]
            done.lap(edge, int(lengths.sum()), time.perf_counter() - started)
        run.line.at("writing its last batches", part=True)
        settle(before[0], commit=True)
    done.padded_tokens, done.halved, done.waited = capturer.padded_tokens, capturer.halved, sink.waited_s


def _batches_in_turn(run: _Run, units: Sequence[Unit]) -> Iterator[tuple[np.ndarray, bool]]:
    """Batches of the units that this rank takes, and whether one is the last of its unit."""
    while (number := run.board.add("unit") - 1) < len(units):
        batches = units[number].batches
        for place, rows in enumerate(batches):
            if run.asked_to_stop():
                return
            run.line.at(f"batch {place + 1} of unit {number + 1}", part=True)
            yield rows, place == len(batches) - 1


def _conclude(run: _Run, units: Sequence[Unit], done: _Done) -> ExtractReport:
    """Put together what all ranks did; the main rank completes the cache."""
    config, board = run.config, run.board
    run.line.at("putting together what all did")
    board.post("done", asdict(done))
    posted = board.collect("done", run.line.check)
    ranks = [
        _Done(**{**one, "bad": [BadSample(**bad) for bad in one["bad"]]})
        for one in posted[:: run.replica.size]  # the others of a replica write nothing
    ]
    bad = [sample for one in ranks for sample in one.bad]
    owed = sum(len(rows) for unit in units for rows in unit.batches)
    stopped = board.stop_asked() if sum(one.samples for one in ranks) + len(bad) < owed else None
    run.line.at("completing the cache")
    if not board.world.is_main:
        run.line.at("waiting for the complete cache")  # a stage further than the one that completes it

    def finish() -> dict[str, Any]:
        manifest = load_manifest(config.out) if stopped else finalized(config.out, run.mirror, bad)
        save_speeds(config.out, _speeds(ranks))
        layouts = load_index(config.out, manifest).layouts
        return {
            "samples": sum(layout.samples for layout in layouts),
            "tokens": sum(layout.tokens for layout in layouts),
            "bytes": sum(layout.file_size for layout in layouts),
            "dropped": manifest.dropped,
            "bad": len(manifest.bad),
            "expected": manifest.expected_samples,
        }

    new, padded = sum(one.tokens for one in ranks), sum(one.padded_tokens for one in ranks)
    return ExtractReport(
        cache=config.out,
        new_tokens=new,
        seconds=max(one.seconds for one in ranks),
        pad_share=1 - new / padded if padded else 0.0,
        disk_wait_share=sum(one.waited for one in ranks) / sum(one.seconds for one in ranks),
        halved=sum(one.halved for one in ranks),
        stopped=stopped,
        **board.shared("cache", finish),
    )


def _speeds(ranks: Sequence[_Done]) -> dict[int, float]:
    """A rank's tokens a second in each bucket, by edge, averaged over the ranks that met it."""
    speeds = {}
    for edge in sorted({edge for one in ranks for edge in one.laps}, key=int):
        laps = [one.laps[edge] for one in ranks if edge in one.laps]
        speeds[int(edge)] = sum(tokens for tokens, _ in laps) / sum(seconds for _, seconds in laps)
    return speeds
