"""One batch through the target: too little memory, values that are not finite, the way to the host.

1. `start` runs the target and begins the copy to the host. A batch that does not fit into the device's memory
   is halved, and so are later ones of that size.
2. `finish` waits for the copy, looks for NaN and infinity, runs a sample that has any alone once more, and
   gives what can be written.

Between the two the next batch is started, so that a GPU never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dflash.cache.manifest import BadSample
from dflash.cache.shard import Sample
from dflash.errors import TargetError, lacks_memory
from dflash.extract.token_store import TokenizedCorpus
from dflash.target import TruncatedTarget


@dataclass(frozen=True)
class InFlight:
    """Samples whose states are on their way to the host. T tokens together, K taps, H channels."""

    rows: np.ndarray
    """int64, rows of the corpus."""
    lengths: list[int]
    """Tokens of each sample."""
    states: Tensor
    """[T, K, H] on the host; valid after `wait`."""
    sums: Tensor
    """[T, K] on the host, sums over H: not finite where any value is not; valid after `wait`."""
    wait: Callable[[], None]


@dataclass
class Captured:
    """What became of a batch."""

    samples: list[Sample] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)


_ToHost = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Callable[[], None]]]
"""States and sums on the device to the same on the host, and how to wait for them."""


class Capturer:
    """Runs batches of a corpus.

    Args:
        target: Where they run.
        corpus: What rows refer to.
    """

    def __init__(self, target: TruncatedTarget, corpus: TokenizedCorpus) -> None:
        self._target, self._corpus = target, corpus
        self._most: int | None = None
        self._to_host: _ToHost = _PinnedCopies(target.device) if target.device.type == "cuda" else _stay
        self.halved = 0
        """Times that a batch did not fit into the device's memory."""
        self.padded_tokens = 0
        """Tokens computed, padding included."""

    def start(self, rows: np.ndarray) -> list[InFlight]:
        """Run samples; one entry for each forward pass that they took.

        Raises:
            TargetError: the device's memory does not suffice for one sample alone.
        """
        waiting, done = [rows], []
        while waiting:
            part, *rest = self._pieces(waiting.pop())
            waiting += reversed(rest)
            flight = self._attempt(part)
            if flight is None:
                self._halve(part)
                waiting.append(part)
            else:
                done.append(flight)
        return done

    def finish(self, flight: InFlight) -> Captured:
        """Wait for a batch and tell its samples from its bad ones."""
        flight.wait()
        captured = Captured()
        finite = torch.isfinite(flight.sums)
        whole = bool(finite.all())
        parts = zip(
            flight.rows.tolist(),
            torch.split(flight.states, flight.lengths),
            torch.split(finite, flight.lengths),
            strict=True,
        )
        for row, states, good in parts:
            if whole or bool(good.all()):
                captured.samples.append(self._sample(row, states))
            else:
                self._retry(row, captured)
        return captured

    def _retry(self, row: int, captured: Captured) -> None:
        """Run a sample alone: what another one of its batch, or a fault, has spoilt comes out right then."""
        (flight,) = self.start(np.asarray([row]))
        flight.wait()
        good = torch.isfinite(flight.sums)
        if bool(good.all()):
            captured.samples.append(self._sample(row, flight.states))
            return
        position, tap = (int(number) for number in (~good).nonzero()[0])
        example = self._corpus.example(row)
        token = int(example.input_ids[position])
        captured.bad.append(BadSample(example.id, example.name, self._target.taps[tap], position, token))

    def _sample(self, row: int, states: Tensor) -> Sample:
        example = self._corpus.example(row)
        return Sample(example.id, example.input_ids, example.loss_mask, states)

    def _attempt(self, rows: np.ndarray) -> InFlight | None:
        try:
            return self._forward(rows)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            return None  # and with the traceback the tensors of the failed pass go

    def _forward(self, rows: np.ndarray) -> InFlight:
        target = self._target
        sequences = [self._corpus.example(int(row)).input_ids for row in rows]
        lengths = [len(ids) for ids in sequences]
        shape = (sum(lengths), len(target.taps), target.hidden_size)
        states = torch.empty(shape, dtype=target.model.dtype, device=target.device)
        target.capture(sequences, states)
        host, sums, wait = self._to_host(states, states.sum(dim=-1, dtype=torch.float32))
        self.padded_tokens += target.computed_tokens(lengths)
        return InFlight(rows, lengths, host, sums, wait)

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows in parts that fit what the memory has held so far."""
        if self._most is None:
            return [rows]
        count = max(self._most // int(self._corpus.lengths[rows].max()), 1)
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def _halve(self, rows: np.ndarray) -> None:
        longest = int(self._corpus.lengths[rows].max())
        if len(rows) == 1:
            raise TargetError(
                f"the memory of {self._target.device} does not suffice for one sample of {longest} tokens; "
                "set a lower --max-length"
            )
        self.halved += 1
        self._most = longest * (len(rows) // 2)
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()


def _stay(states: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """On the CPU the states are where they have to be."""
    return states, sums, lambda: None


class _PinnedCopies:
    """Copies from a GPU on a stream of their own into pinned memory, beside the next forward pass.

    torch keeps freed pinned blocks and gives them out again: after the first batches nothing is pinned anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, states: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Callable[[], None]]:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            hosts = [self._copy(tensor) for tensor in (states, sums)]
            copied.record(self._stream)
        return hosts[0], hosts[1], copied.synchronize

    def _copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given out before the copy is done
        return host
