"""Small identities, samples and caches for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash.cache.manifest import Identity, Manifest
from dflash.cache.reader import CacheReader
from dflash.cache.writer import CacheWriter, Sample, create_cache, finalize

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = Identity(
    target="toy",
    revision=None,
    config_digest="c0",
    weights_digest="w0",
    tokenizer_digest="t0",
    template_digest="p0",
    taps=(0, 2),
    num_target_layers=4,
    hidden_size=4,
    vocab_size=100,
    dtype="bfloat16",
    codec="raw",
    bucket_edges=(4, 8, 16),
    max_length=16,
    corpus_digest="d0",
)


def make_sample(number: int, identity: Identity = IDENTITY, length: int | None = None) -> Sample:
    """A sample that is a pure function of its number; its length runs through all buckets."""
    random = np.random.default_rng(number)
    sample_id = int(random.integers(0, 1 << 64, dtype=np.uint64))
    length = length or 1 + number * 7 % identity.max_length
    shape = (length, len(identity.taps), identity.hidden_size)
    bits = random.integers(0, 1 << 16, (*shape, 2 if identity.dtype == "float32" else 1), dtype=np.uint16)
    dtype = torch.float32 if identity.dtype == "float32" else torch.bfloat16
    return Sample(
        id=sample_id,
        input_ids=random.integers(0, identity.vocab_size, length).astype(np.int32),
        loss_mask=random.integers(0, 2, length).astype(np.uint8),
        hidden_states=torch.from_numpy(bits).view(torch.uint8).view(dtype).reshape(shape),
    )


def make_samples(count: int, identity: Identity = IDENTITY) -> list[Sample]:
    return [make_sample(number, identity) for number in range(count)]


def make_manifest(count: int, identity: Identity = IDENTITY) -> Manifest:
    return Manifest(identity, expected_samples=count, created="2026-01-01T00:00:00+00:00")


def write_cache(
    cache: Path,
    samples: list[Sample],
    identity: Identity = IDENTITY,
    *,
    writers: int = 1,
    shard_bytes: int = 400,
) -> Path:
    """A finished cache, its samples dealt to the writers in turn."""
    manifest = create_cache(cache, make_manifest(len(samples), identity))
    for rank in range(writers):
        with CacheWriter(cache, manifest, f"rank{rank}", shard_bytes) as writer:
            for sample in samples[rank::writers]:
                writer.write(sample)
    finalize(cache)
    return cache


def read_all(cache: Path, **settings: bool) -> list[Sample]:
    with CacheReader(cache, **settings) as reader:
        return reader.read(range(len(reader.index)))


def bits(sample: Sample) -> tuple[int, bytes, bytes, bytes, str]:
    """Everything in a sample, so that two can be compared bit for bit."""
    states = sample.hidden_states.contiguous()
    raw = states.reshape(-1).view(torch.uint8).numpy().tobytes()
    return sample.id, sample.input_ids.tobytes(), sample.loss_mask.tobytes(), raw, str(states.dtype)


def same_samples(one: list[Sample], other: list[Sample]) -> bool:
    """Whether both hold the same samples, whatever the order."""
    return sorted(map(bits, one)) == sorted(map(bits, other))


def renamed(identity: Identity = IDENTITY) -> Identity:
    """The same target in another folder."""
    return replace(identity, target="elsewhere/toy", revision="abc")
