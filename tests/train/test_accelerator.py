"""A training step where there is an accelerator: nothing on two devices, and the host waits for none of it.

flex_attention refuses the device that stands for it here. Its block mask is built all the same; the oracle of
attention takes its place.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from accelerator import META, Passing, recording, tensors_in
from hypothesis import given
from hypothesis import strategies as st
from support import MASK, VOCAB, drafter_config, write_cache
from test_objective import SHAPE, make_documents
from tiny_runs import LENGTHS, tiny_config
from torch import Tensor
from torch.utils import _foreach_utils

from dflash.attention import BlockLayout, KeyValue, _flex_mask, dense_attention
from dflash.cache.codec_error import LOSSY_CODECS
from dflash.cache.reader import CacheReader
from dflash.cache.transcode import transcode
from dflash.drafter import Drafter
from dflash.head import HeadFacts, TargetHead
from dflash.train.batches import AnchorConfig, BlockShape, PackedBatch, documents, pack
from dflash.train.candidates import candidates
from dflash.train.chunks import ON_CUDA
from dflash.train.loader import DeviceFeed, LoadedStep
from dflash.train.objective import DraftingLoss, HeadCrossEntropy, ObjectiveConfig
from dflash.train.optim import OptimConfig, build_optimizer, clipped_mean
from dflash.train.padding import Multiples, padded
from dflash.train.parallel import recompute_layers
from dflash.train.run import Run
from dflash.train.teacher import HeadDivergence, with_teacher
from dflash.train.walk import walk_samples
from dflash.world import World

LOSSES = {
    "ce": ObjectiveConfig(4),
    "dpace": ObjectiveConfig(4, loss="dpace"),
    "kd": ObjectiveConfig(4, loss="kd"),
    "sampled softmax": ObjectiveConfig(4, sampled_softmax=50),
}


def attend(query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout) -> Tensor:
    """What is done on a GPU, but for flex_attention itself."""
    mask = _flex_mask(layout, len(context.key), (query.shape[1], block.key.shape[1]))
    assert mask.kv_indices.device == query.device
    return dense_attention(query, context, block, layout)


@pytest.fixture(autouse=True)
def _accelerated(monkeypatch) -> None:
    for module in ("dflash.drafter", "dflash.train.parallel"):
        monkeypatch.setattr(f"{module}.attention_for", lambda _device: attend)
    # kernels over many tensors, and an update in one piece, are kept from devices that are not listed
    for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
        devices = [*getattr(_foreach_utils, name)(), "meta"]
        for module in (_foreach_utils, import_module("torch.optim.optimizer")):
            monkeypatch.setattr(module, name, lambda devices=devices: devices)


def make_batch(kind: str = "plain", lengths: tuple[int, ...] = (12, 20, 7, 16)) -> PackedBatch:
    """A batch with everything that any loss reads: `plain`, `padded` or `empty`."""
    docs = make_documents(*(lengths if kind != "empty" else ()))
    batch = with_teacher(pack(docs, SHAPE), docs)
    drawn = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:50]
    batch = replace(batch, candidates=candidates(batch.targets, drawn, VOCAB))
    return padded(batch, Multiples(64, 32)) if kind == "padded" else batch


def make_loss(config: ObjectiveConfig, softcap: float | None = None) -> DraftingLoss:
    head = TargetHead(*torch.ones(2, VOCAB, 32), torch.ones(32), HeadFacts(logit_softcap=softcap))
    return DraftingLoss(Drafter(drafter_config()).to(META), head.to(META), config, buckets=3)


def batch_for(kind: str, config: ObjectiveConfig) -> PackedBatch:
    batch = make_batch(kind)
    return batch if config.sampled_softmax else replace(batch, candidates=None)


READS = {
    "a number": lambda x: x.sum().item(),
    "a copy": lambda x: x.cpu(),
    "rows by a mask": lambda x: x[x > 0],
    "values by a mask": lambda x: x.index_put_((x > 0,), x),
}


@pytest.mark.parametrize("name", READS)
def test_the_device_of_these_tests_sees_what_is_read(name):
    with Passing() as passing:
        READS[name](torch.zeros(3, device=META))
    assert (passing.reads, passing.waits) == (1, 0)


@pytest.mark.parametrize("work", [torch.nonzero, torch.unique, lambda x: x.masked_select(x > 0)])
def test_the_device_of_these_tests_has_no_shape_that_depends_on_values(work):
    with Passing(), pytest.raises((NotImplementedError, RuntimeError)):
        work(torch.zeros(3, device=META))


@pytest.mark.parametrize("work", [torch.add, torch.Tensor.copy_, lambda x, y: x[y.long()]])
def test_the_device_of_these_tests_refuses_operations_on_two_devices(work):
    with Passing(), pytest.raises(AssertionError, match="of tensors on"):
        work(torch.zeros(3, device=META), torch.zeros(3))


@pytest.mark.parametrize(
    ("work", "waits"),
    [
        (lambda x: x.to(META), 1),
        (lambda x: x.to(META, non_blocking=True), 0),
        (lambda x: torch.tensor(x.tolist(), device=META), 1),
    ],
)
def test_the_device_of_these_tests_sees_copies_that_the_host_waits_for(work, waits):
    with Passing() as passing:
        work(torch.zeros(3))
    assert (passing.reads, passing.waits) == (0, waits)


@contextmanager
def nothing_passes():
    with Passing() as passing:
        yield
    assert (passing.reads, passing.waits) == (0, 0)


@pytest.mark.parametrize("kind", ["plain", "padded", "empty"])
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_micro_batch_goes_forward_and_back_without_a_wait(name, recompute, softcap, kind):
    loss, batch = make_loss(LOSSES[name], softcap), batch_for(kind, LOSSES[name])
    recompute_layers(loss.drafter, wanted=recompute)
    with nothing_passes():
        sums = loss(batch.to(META))
        sums.loss.backward()
        metrics = sums.metrics()
    assert (metrics.device, metrics.shape) == (META, (2 + 2 * 3 + 4 * 3,))
    assert all(p.grad is not None and p.grad.device == META for p in loss.drafter.parameters())


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("loss", [HeadCrossEntropy, HeadDivergence])
def test_a_bfloat16_head_gives_loss_and_gradient_without_a_wait(loss, softcap):
    """Without autocast, which there is none of for this device: the drafter is left out."""
    hidden = torch.zeros(ON_CUDA.rows + 3, 32, device=META, requires_grad=True)
    lm_head = torch.zeros(VOCAB, 32, device=META, dtype=torch.bfloat16)
    labels = torch.zeros(len(hidden), device=META, dtype=torch.int64)
    teacher = [lm_head.new_zeros(hidden.shape)] if loss is HeadDivergence else []
    with nothing_passes():
        ce, hit = loss.apply(hidden, *teacher, lm_head, labels, softcap)
        ce.sum().backward()
    assert (ce.dtype, hit.dtype, hidden.grad.dtype) == (torch.float32, torch.bool, torch.float32)
    assert {one.device for one in (ce, hit, hidden.grad)} == {META}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_clipping_and_an_update_wait_for_nothing(optimizer):
    loss, batch = make_loss(LOSSES["ce"]), batch_for("plain", LOSSES["ce"])
    chosen = build_optimizer(loss.drafter, OptimConfig(optimizer=optimizer))
    for _ in range(2):  # the first one makes the moments
        with nothing_passes():
            sums = loss(batch.to(META))
            sums.loss.backward()
            norm = clipped_mean(loss.drafter, sums.metrics()[1], 1, 1.0)
            chosen.step()
            chosen.zero_grad(set_to_none=True)
        assert (norm.device, norm.shape) == (META, ())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("accelerator") / "cache", LENGTHS)


@pytest.mark.parametrize("changes", [{}, {"sampled_softmax": 50}, {"loss": "dpace"}])
def test_a_step_reads_from_the_device_once(cache, tmp_path, monkeypatch, changes):
    """Loss, norm and all figures of the step at once, behind its last micro-batch."""
    monkeypatch.setattr("dflash.train.run.device_of", lambda _world: META)
    config = tiny_config(cache, tmp_path, precision="float32", objective=ObjectiveConfig(4, **changes))
    run = Run.open(config, World())
    with run.loader() as loader:
        loaded = next(iter(loader))
        with Passing() as passing:
            run.step(loaded)
    assert len(loaded.batches) == 2
    assert (passing.reads, passing.waits) == (1, 0)
    assert run.done == 1


def test_a_walk_reads_once_a_slot_and_once_at_the_end(cache):
    loss = make_loss(LOSSES["ce"])
    with CacheReader(cache) as reader, Passing() as passing:
        walked = list(walk_samples(loss.drafter, loss.head, reader, [0, 1, 2], META))
    assert passing.reads == SHAPE.size - 1 + 1
    assert [one.row for one in walked] == [0, 1, 2]


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_coded_states_are_decoded_on_the_device_without_a_wait(cache, tmp_path, codec):
    transcode(cache, tmp_path / codec, codec, 1)
    with CacheReader(tmp_path / codec) as reader:
        docs = documents(reader.read([0, 1], keep_coded=True), [0, 0], [0, 0], AnchorConfig(density=0.5))
    batch = padded(pack(docs, BlockShape(4, MASK)), Multiples(64, 8))
    with nothing_passes():
        moved = batch.to(META)
    assert moved.coded is None
    assert (moved.features.device, moved.features.dtype) == (META, torch.bfloat16)
    assert moved.features.shape == (len(batch.context_positions), 2 * 32)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}


def full_batch(cache, tmp_path) -> PackedBatch:
    """A batch that has every tensor a batch can have, coded states among them, and a layout in use."""
    transcode(cache, tmp_path / "int8", "int8", 1)
    with CacheReader(tmp_path / "int8") as reader:
        docs = documents(reader.read([0, 1], keep_coded=True), [0, 0], [0, 0], AnchorConfig())
    batch = replace(make_batch(), coded=pack(docs, BlockShape(4, MASK)).coded)
    batch.layout.memo["used"] = torch.zeros(3)
    return batch


def test_every_tensor_of_a_batch_is_moved_and_pinned(cache, tmp_path, monkeypatch):
    """However it is held: one that is forgotten would be on the wrong device, or waited for."""
    batch = full_batch(cache, tmp_path)
    assert all(value is not None for value in vars(batch).values())
    held = [tensor for tensor in tensors_in(batch) if tensor is not batch.layout.memo["used"]]
    assert len(held) > len(vars(batch))
    pinned = list[Tensor]()
    monkeypatch.setattr(Tensor, "pin_memory", recording(pinned))
    again = batch.pin()
    for noted in (pinned, tensors_in(again)):
        assert {id(tensor) for tensor in noted} == {id(tensor) for tensor in held}
    moved = replace(batch, coded=None).to(META)
    assert {tensor.device for tensor in tensors_in(moved)} == {META}
    assert moved.samples == batch.samples
    assert not moved.layout.memo


CUDA = torch.device("cuda", 0)


class Stream:
    """Work of a GPU that is done in order; knows which work of other streams is done before its next."""

    def __init__(self, _device: object = None) -> None:
        self.done: dict[Stream, int] = {}

    def work(self) -> int:
        """Ask for more; its number."""
        self.done[self] = self.done.get(self, 0) + 1
        return self.done[self]

    def wait_stream(self, other: Stream) -> None:
        for stream, number in other.done.items():
            self.done[stream] = max(number, self.done.get(stream, 0))

    def waits_for(self, stream: Stream, number: int) -> bool:
        """Whether that work is done before the next of this stream."""
        return self.done.get(stream, 0) >= number


class Memory:
    """Room for one batch on the GPU: who wrote to it last, and who has read from it."""

    def __init__(self) -> None:
        self.written: tuple[Stream, int] | None = None
        self.read: list[tuple[Stream, int]] = []


class Gpu:
    """Streams, and memory that is given out again as soon as the host no longer holds what is in it."""

    def __init__(self) -> None:
        self.main = self.now = Stream()
        self.streams: list[Stream] = []
        self.all: list[Memory] = []
        self.free: list[Memory] = []

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", self.new_stream)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda _device: self.now)

    def new_stream(self, _device: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def allocate(self) -> Memory:
        if not self.free:
            self.free.append(Memory())
            self.all += self.free
        return self.free.pop()


class Here:
    """A batch on the GPU."""

    def __init__(self, source: There) -> None:
        gpu = source.gpu
        self.source, self.memory = source, gpu.allocate()
        assert all(gpu.now.waits_for(*reading) for reading in self.memory.read), "it is still being read"
        self.memory.written, self.memory.read = (gpu.now, gpu.now.work()), []
        source.copies += 1

    def use(self) -> None:
        gpu = self.source.gpu
        assert self.memory.written is not None
        assert gpu.now.waits_for(*self.memory.written), "it is not there yet"
        self.memory.read.append((gpu.now, gpu.now.work()))

    def __del__(self) -> None:
        self.source.gpu.free.append(self.memory)


class There:
    """A batch in host memory."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.copies = gpu, 0

    def to(self, _device: object) -> Here:
        return Here(self)


def run_steps(gpu: Gpu, steps: list[list[There]], ready: list[bool]) -> None:
    """As a run does it; `ready` says for each step whether the next one is, when its last batch is used."""
    feed = DeviceFeed(CUDA)
    for number, batches in enumerate(steps):
        behind = steps[number + 1][0] if ready[number] and number + 1 < len(steps) else None
        loaded = LoadedStep(batches, None, None, following=lambda behind=behind: behind)
        coming = [*batches[1:], behind]
        for batch, following in zip(feed.batches(loaded), coming, strict=True):
            assert batch.source.copies == 1
            assert following is None or following.copies == 1  # beside what this one is used for
            batch.use()
        gpu.main.work()  # the update


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6))
def test_batches_are_copied_beside_the_computation_and_never_over_what_is_being_read(shape):
    """Each once, on one stream, one ahead of its use, also over the end of a step; in room for three."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu()
        gpu.stand_in(patch)
        steps = [[There(gpu) for _ in range(count)] for count, _ in shape]
        run_steps(gpu, steps, [ready for _, ready in shape])
    assert all(batch.copies == 1 for batches in steps for batch in batches)
    assert len(gpu.streams) == 1
    assert len(gpu.all) <= 3
