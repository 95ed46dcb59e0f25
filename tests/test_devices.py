"""What a GPU computes is what a CPU computes: one set of tests for both.

In the suite they run on the CPU. `make cuda-test` runs them, and those that only a GPU can run, on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from overfit import answered, random_prompts
from support import EOS, MASK, VOCAB, drafter_config, random_sample, write_cache, write_target
from test_attention import make_case
from torch import Tensor

from dflash.attention import BlockLayout, KeyValue, dense_attention
from dflash.cache.codec_error import CODECS
from dflash.cache.reader import CacheReader
from dflash.cache.transcode import transcode
from dflash.decode.batched import generate_batch
from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.drafter import Drafter, init_weights
from dflash.extract.capture import Capturer
from dflash.extract.token_store import corpus_from
from dflash.grouped import attention_for
from dflash.head import HeadFacts, TargetHead
from dflash.target import Target, TruncatedTarget
from dflash.train.batches import AnchorConfig, BlockShape, PackedBatch, documents, pack
from dflash.train.config import TrainConfig
from dflash.train.holdout import HoldoutConfig
from dflash.train.loader import BlockPlan, DeviceFeed, StepLoader
from dflash.train.network import NetworkConfig
from dflash.train.objective import DraftingLoss, ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.padding import ON_CPU, padded
from dflash.train.record import METRICS_NAME
from dflash.train.sampler import Corpus, Sampler, SamplerConfig
from dflash.train.teacher import with_teacher
from dflash.train.trainer import train
from dflash.train.walk import walk_samples
from dflash.world import World

CPU = torch.device("cpu")
HIDDEN = 64
"""With four heads each has 16 channels, the least that flex_attention's kernels take."""
LENGTHS = [40, 64, 20, 33, 57, 12, 61, 25, 48, 64, 31, 18]
SHAPE = BlockShape(4, MASK)


def relative(found: Tensor, expected: Tensor) -> float:
    """Error of a tensor by its norm."""
    found, expected = found.detach().cpu().float(), expected.detach().cpu().float()
    assert found.isfinite().all()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def graphs() -> int:
    """What torch has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


LAYOUTS = {
    "several documents": [list(range(0, 150, 7)), [], [3, 4, 200]],
    "no context": [[0]] * 40,
    "long": [[*range(5, 40)], [*range(0, 700, 35)]],
}
HEADS = [(4, 2, 64), (3, 3, 16), (6, 1, 96), (4, 2, 128)]
"""Of queries, of keys and values, and their channels; not all are powers of two."""
KINDS = [(16, torch.float32, 5e-5), (15, torch.float32, 5e-5), (15, torch.bfloat16, 3e-2)]
"""Slots that ask, dtype and largest error."""


@pytest.mark.parametrize(("asking", "dtype", "most"), KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_in_training_has_the_values_and_gradients_of_the_dense_oracle(
    device, layout, heads, asking, dtype, most
):
    case = make_case(LAYOUTS[layout], 16, *heads[:2], asking=asking, width=heads[2])
    starts, ends = case.layout.context_start, case.layout.context_end
    upstream = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for where, kind, attention in (
        (CPU, torch.float32, dense_attention),
        (device, dtype, attention_for(device)),
    ):
        query, *rest = (leaf.detach().to(where, kind).requires_grad_() for leaf in case.leaves())
        layout_there = BlockLayout(starts.to(where), ends.to(where))
        out = attention(query, KeyValue(*rest[:2]), KeyValue(*rest[2:]), layout_there)
        leaves = [leaf for leaf in (query, *rest) if leaf.numel()]
        results.append((out, *torch.autograd.grad(out, leaves, upstream.to(where, kind))))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == dtype
        assert relative(found, expected) < most


def make_loss(kind: str, device: torch.device, dtype: torch.dtype) -> DraftingLoss:
    generator = torch.Generator().manual_seed(1)
    head = TargetHead(*torch.randn(2, VOCAB, HIDDEN, generator=generator), torch.ones(HIDDEN), HeadFacts())
    drafter = Drafter(drafter_config(hidden_size=HIDDEN, head_dim=16))
    init_weights(drafter, seed=2)
    return DraftingLoss(drafter.to(device), head.to(device, dtype), ObjectiveConfig(4, loss=kind), buckets=3)


def make_batch() -> PackedBatch:
    rng = np.random.default_rng(3)
    samples = [random_sample(rng, number, length, HIDDEN) for number, length in enumerate(LENGTHS)]
    for sample in samples:  # two layers are the drafter's, the last one the teacher's
        sample.hidden_states = torch.cat([sample.hidden_states, sample.hidden_states[:, :1]], dim=1)
    docs = documents(samples, [0] * 12, [n % 3 for n in range(12)], AnchorConfig(density=0.5))
    return padded(with_teacher(pack(docs, SHAPE), docs), ON_CPU)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("kind", ["ce", "dpace", "kd"])
def test_loss_and_gradient_are_those_in_float32_on_a_cpu(device, kind, dtype, most):
    batch, results = make_batch(), []
    for where, compute in ((CPU, torch.float32), (device, dtype)):
        loss = make_loss(kind, where, compute)
        sums = loss(batch.to(where))
        sums.loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in loss.drafter.parameters()])
        results.append((sums.loss[None], sums.bucket_loss, gradient))
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) < most


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The same states in every codec."""
    folder = tmp_path_factory.mktemp("devices")
    raw = write_cache(folder / CODECS[0], LENGTHS, hidden=HIDDEN)
    for codec in CODECS[1:]:
        transcode(raw, folder / codec, codec, 1)
    return folder


def steps(reader: CacheReader, device: torch.device) -> list[list[PackedBatch]]:
    """All micro-batches of an epoch, read back from the device when later ones have been copied."""
    index, edges = reader.index, reader.manifest.identity.bucket_edges
    corpus = Corpus(index.lengths, index.buckets, edges, index.digest())
    config = SamplerConfig(tokens_per_batch=96, batches_per_step=4, min_ready=1, max_ready=8)
    plan = BlockPlan(AnchorConfig(64, 0.5), SHAPE)
    found, feed = [], DeviceFeed(device)
    with StepLoader(reader, Sampler(corpus, config, epochs=2), plan, World(), device) as loader:
        for loaded in loader:
            step = []
            for batch in feed.batches(loaded):
                if device.type == "cuda":
                    torch.cuda._sleep(20_000_000)  # the step takes longer than the next batch's copy
                step.append(replace(batch, features=batch.features * 1, labels=batch.labels * 1))
                del batch
            found.append(step)
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_what_comes_to_the_device_is_what_the_cache_holds(caches, device, codec):
    """Copied beside the computation, from memory that is used again, and decoded there."""
    with CacheReader(caches / codec) as reader:
        expected, found = steps(reader, CPU), steps(reader, device)
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.samples == other.samples
            rows = int(other.layout.context_end.max())
            blocks = min(mine.blocks, other.blocks)
            assert torch.equal(mine.features[:rows].cpu(), other.features[:rows])
            assert torch.equal(mine.labels[:blocks].cpu(), other.labels[:blocks])
            assert not mine.features[rows:].any()


def run_config(cache, out, **changes) -> TrainConfig:
    parts = {
        "network": NetworkConfig(2, 4),
        "anchors": AnchorConfig(64, 0.5),
        "objective": ObjectiveConfig(4),
        "sampler": SamplerConfig(tokens_per_batch=96, batches_per_step=2, min_ready=1, max_ready=4),
        "optim": OptimConfig(lr=1e-3),
        "holdout": HoldoutConfig(0.2),
        "epochs": None,
        "max_steps": 6,
        "eval_every": 3,
    }
    return TrainConfig(cache, out, **(parts | changes))


def losses(out) -> list[float]:
    lines = [json.loads(line) for line in (out / METRICS_NAME).read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def expected_losses(caches, tmp_path_factory):
    """The curve in float32 on the CPU, by optimizer."""
    curves = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for optimizer in ("adamw", "muon"):
            out = tmp_path_factory.mktemp("runs") / optimizer
            config = run_config(
                caches / "raw", out, precision="float32", optim=OptimConfig(optimizer, lr=1e-3)
            )
            train(config, World())
            curves[optimizer] = losses(out)
    return curves


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_has_the_curve_of_one_in_float32_on_a_cpu(
    caches, tmp_path, device, precision, optimizer, expected_losses
):
    optim = OptimConfig(optimizer, lr=1e-3)
    train(run_config(caches / "raw", tmp_path / "run", precision=precision, optim=optim), World())
    close = 1e-3 if precision == "float32" else 1e-2
    assert losses(tmp_path / "run") == pytest.approx(expected_losses[optimizer], rel=close)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_that_goes_on_from_its_checkpoint_has_the_same_curve(caches, tmp_path, device, recompute):
    whole = run_config(caches / "raw", tmp_path / "whole", activation_checkpointing=recompute)
    train(whole, World())
    parted = replace(whole, out=tmp_path / "parted", save_every=3, max_minutes=1e-9)
    assert train(parted, World()).stopped == "--max-minutes"
    train(replace(parted, max_minutes=None, resume=True), World())
    assert losses(parted.out) == pytest.approx(losses(whole.out), rel=0 if device == CPU else 1e-3)


def test_steps_of_another_order_and_walks_compile_nothing_new(caches, tmp_path, device):
    counts = []
    for seed in range(2):
        train(run_config(caches / "raw", tmp_path / str(seed), seed=seed), World())
        counts.append(graphs())
    assert counts[1] == counts[0]


def test_compiled_layers_train_the_same(caches, tmp_path, gpu, expected_losses):
    train(run_config(caches / "raw", tmp_path / "run", compile=True), World())
    assert losses(tmp_path / "run") == pytest.approx(expected_losses["adamw"], rel=2e-2)
    count = graphs()
    train(run_config(caches / "raw", tmp_path / "other", compile=True, seed=1), World())
    assert graphs() == count


def test_the_walk_accepts_what_it_accepts_on_a_cpu(caches, device):
    loss = make_loss("ce", CPU, torch.float32)
    reader, rows = CacheReader(caches / "raw"), range(len(LENGTHS))
    walked = [
        list(walk_samples(loss.drafter.to(where), loss.head.to(where), reader, rows, where))
        for where in (CPU, device)
    ]
    for expected, found in zip(*walked, strict=True):
        assert found.row == expected.row
        assert np.array_equal(found.accepted, expected.accepted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("devices") / "target", hidden=HIDDEN)


def sequences(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("lengths", [(7,), (300, 260, 200), (40, 40)])
def test_extracted_states_are_those_of_a_cpu_packed_or_padded(folder, device, dtype, most, lengths):
    ids, states = sequences(*lengths), []
    for where, kind in ((CPU, torch.float32), (device, dtype)):
        target = TruncatedTarget(str(folder), (1, 3), dtype=kind, device=where)
        for packed in {False, target.packed}:
            target.packed = packed
            out = torch.empty(sum(lengths), 2, HIDDEN, dtype=kind, device=where)
            target.capture(ids, out)
            states.append(out)
    for found in states[1:]:
        assert relative(found, states[0]) < most


def corpus_of(ids: list[np.ndarray]):
    return corpus_from(
        [(n, row, np.ones(len(row), np.uint8), None, None) for n, row in enumerate(ids)], {}, {}
    )


def test_states_come_to_the_host_whole_while_later_batches_run(folder, device):
    ids = sequences(*range(200, 80, -1))
    target, corpus = TruncatedTarget(str(folder), (1, 3), dtype=torch.float32, device=device), corpus_of(ids)
    alone = TruncatedTarget(str(folder), (1, 3), dtype=torch.float32, device=CPU)
    capturer, flights, samples = Capturer(target, corpus), [], []
    for rows in np.array_split(np.arange(len(ids)), 12):
        flights += capturer.start(rows)
        if len(flights) > 3:
            samples += capturer.finish(flights.pop(0)).samples
    for flight in flights:
        samples += capturer.finish(flight).samples
    assert [sample.id for sample in samples] == list(range(len(ids)))
    for sample, row in zip(samples, ids, strict=True):
        expected = torch.empty(len(row), 2, HIDDEN)
        alone.capture([row], expected)
        assert relative(sample.hidden_states, expected) < 1e-4


class Hungry:
    """A target that takes a mebibyte a token."""

    taps, hidden_size = (0,), 4

    def __init__(self, device: torch.device) -> None:
        self.device, self.model = device, torch.zeros(1)

    def computed_tokens(self, lengths):
        return len(lengths) * max(lengths)

    def capture(self, sequences, out):
        tokens = self.computed_tokens([len(ids) for ids in sequences])
        torch.empty(tokens << 20, dtype=torch.uint8, device=self.device)
        out[:] = torch.from_numpy(np.concatenate(sequences)).to(out)[:, None, None]


def test_a_batch_that_the_gpu_has_no_room_for_is_halved_until_it_has(gpu):
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(gpu)
    torch.cuda.set_per_process_memory_fraction((held + (300 << 20)) / total, gpu)
    try:
        ids = sequences(*[100] * 8)
        capturer = Capturer(Hungry(gpu), corpus_of(ids))
        samples = [one for flight in capturer.start(np.arange(8)) for one in capturer.finish(flight).samples]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert capturer.halved == 2
    assert [sample.id for sample in samples] == list(range(8))
    for sample, row in zip(samples, ids, strict=True):
        assert torch.equal(sample.hidden_states[:, 0, 0], torch.from_numpy(row).float())


@pytest.mark.parametrize("changes", [{}, {"draft": "tree"}, {"temperature": 1.0}])
def test_speculative_decoding_gives_what_plain_decoding_gives(folder, device, changes):
    target = Target(str(folder), (1, 3), dtype=torch.float32, device=device)
    drafter = Drafter(drafter_config(hidden_size=HIDDEN, head_dim=16, eos_token_id=EOS)).to(device)
    init_weights(drafter.cpu(), seed=1)
    drafter = drafter.to(device).requires_grad_(False)
    prompts = random_prompts([5, 30, 12])
    config = DecodeConfig(24, ignore_stop=True, measure_anchors=True, **changes)
    for prompt in prompts:
        found = generate(target, drafter, prompt, config)
        assert len(found.tokens) == 24
        if not config.temperature:
            assert found.tokens == generate(target, None, prompt, config).tokens
    if not changes:
        plain = [generate(target, None, prompt, config).tokens for prompt in prompts]
        together = generate_batch(target, drafter, prompts, replace(config, measure_anchors=False))
        assert [one.tokens for one in together] == plain


def test_a_targets_own_answer_can_be_stored_from_the_device(folder, device):
    target = Target(str(folder), (1, 3), dtype=torch.float32, device=device)
    (prompt,) = random_prompts([9])
    sample = answered(target, prompt, 8)
    assert sample.hidden_states.shape == (len(sample.input_ids), 2, HIDDEN)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_gpus_train_as_one_cpu_does(caches, tmp_path, gpu, parallel, optimizer, expected_losses):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is visible; ranks need one each")
    given = {"cache": caches / "raw", "out": tmp_path / "run", "layers": 2, "block-size": 4, "anchors": 64}
    given |= {"anchor-density": 0.5, "tokens-per-batch": 96, "batches-per-step": 2, "min-ready": 1}
    given |= {"max-ready": 4, "lr": 1e-3, "holdout": 0.2, "max-steps": 6, "eval-every": 3}
    given |= {"precision": "float32", "parallel": parallel, "optimizer": optimizer, "nproc": 2}
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "dflash", "train", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "run") == pytest.approx(expected_losses[optimizer], rel=1e-3)
