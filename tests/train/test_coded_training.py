"""Training from coded caches: states stay coded up to the device, and decode there to what a read gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import MASK, write_cache
from tiny_runs import LENGTHS, tiny_config

from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.reader import CacheReader
from dflash.cache.transcode import transcode
from dflash.train.batches import AnchorConfig, BlockShape, documents, pack
from dflash.train.loader import BlockPlan, DeviceFeed, StepLoader
from dflash.train.sampler import Corpus, Sampler, SamplerConfig
from dflash.train.trainer import train
from dflash.world import World

CPU = torch.device("cpu")
SHAPE = BlockShape(4, MASK)
ANCHORS = AnchorConfig(64, 0.5, seed=4)


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded-training")
    raw = write_cache(folder / "raw", LENGTHS)
    for codec in CODECS[1:]:
        transcode(raw, folder / codec, codec, 1)
    return folder


def packed(reader, rows, *, keep_coded):
    samples = reader.read(rows, keep_coded=keep_coded)
    docs = documents(samples, [0] * len(rows), [0] * len(rows), ANCHORS)
    if len(rows) > 1:  # a document without anchors packs to nothing
        docs[1] = replace(docs[1], anchors=docs[1].anchors[:0])
    return pack(docs, SHAPE)


@pytest.mark.parametrize("rows", [[0], [3, 1, 4, 1], [1, 0], list(range(len(LENGTHS)))])
@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_is_decoded_when_it_comes_to_the_device_and_not_before(caches, codec, rows):
    with CacheReader(caches / codec) as reader:
        batch, plain = packed(reader, rows, keep_coded=True), packed(reader, rows, keep_coded=False)
    assert (batch.coded is not None) == (codec in LOSSY_CODECS)
    if batch.coded is not None:
        assert batch.features.numel() == 0
        assert batch.coded.codes.dtype == torch.uint8
        assert len(batch.coded.codes) == len(plain.features)
    moved = batch.to(CPU)
    assert moved.coded is None
    assert torch.equal(moved.features, plain.features)
    assert moved.features.dtype == torch.bfloat16
    assert torch.equal(moved.labels, plain.labels)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_every_tensor_of_a_coded_batch_is_pinned_and_moved(caches, codec):
    with CacheReader(caches / codec) as reader:
        batch = packed(reader, [0, 1, 2], keep_coded=True)
    seen = []
    batch._map(lambda tensor: seen.append(tensor.shape) or tensor)
    coded = [value for value in vars(batch.coded).values() if value is not None]
    assert all(tensor.shape in seen for tensor in coded)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_the_loader_hands_on_coded_batches(caches, codec):
    with CacheReader(caches / codec) as reader:
        index, edges = reader.index, reader.manifest.identity.bucket_edges
        config = SamplerConfig(tokens_per_batch=64, batches_per_step=4, min_ready=1, max_ready=8)
        sampler = Sampler(Corpus(index.lengths, index.buckets, edges, index.digest()), config, epochs=1)
        with StepLoader(reader, sampler, BlockPlan(ANCHORS, SHAPE), World(), CPU) as loader:
            steps = list(loader)
    batches = [batch for step in steps for batch in step.batches]
    assert batches
    assert all((batch.coded is not None) == bool(batch.samples) for batch in batches)
    for batch in [batch for step in steps for batch in DeviceFeed(CPU).batches(step)]:
        assert batch.features.shape == (len(batch.context_positions), 64 if batch.samples else 0)
        assert bool(torch.isfinite(batch.features).all())


def test_a_drafter_trains_from_every_codec_to_about_the_same_loss(caches, tmp_path):
    losses = [train(tiny_config(caches / codec, tmp_path / codec), World()).loss for codec in CODECS]
    assert losses == pytest.approx([losses[0]] * len(CODECS), rel=0.05)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_teachers_rows_are_picked_out_of_coded_caches_too(caches, codec):
    with CacheReader(caches / codec) as reader:
        index, edges = reader.index, reader.manifest.identity.bucket_edges
        config = SamplerConfig(tokens_per_batch=64, batches_per_step=4, min_ready=1, max_ready=8)
        sampler = Sampler(Corpus(index.lengths, index.buckets, edges, index.digest()), config, epochs=1)
        blocks = BlockPlan(ANCHORS, SHAPE, teacher=True)
        with StepLoader(reader, sampler, blocks, World(), CPU) as loader:
            batches = [batch for step in loader for batch in step.batches if batch.samples]
    assert all(len(batch.teacher) and len(batch.features) for batch in batches)
