"""The losses beside plain cross-entropy, each against its formula written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overfit import answered, open_target, random_prompts
from support import MASK, VOCAB, drafter_config, write_cache, write_target
from tiny_runs import LENGTHS, run_ranks, same, tiny_config, trained
from torch import Tensor
from torch.nn import functional as F

from dflash.cache.reader import CacheReader
from dflash.drafter import Drafter, init_weights
from dflash.errors import ConfigError
from dflash.head import HeadFacts, TargetHead
from dflash.pretrained import load_drafter
from dflash.train.batches import AnchorConfig, BlockShape, Document, PackedBatch, documents, pack
from dflash.train.chunks import ON_CPU
from dflash.train.dpace import dpace_weights
from dflash.train.loader import StepLoader
from dflash.train.objective import DraftingLoss, LossSums, ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.run import Run
from dflash.train.runs import load_run
from dflash.train.sampler import SamplerConfig
from dflash.train.teacher import HeadDivergence, drafter_taps, teacher_states, with_teacher
from dflash.train.trainer import train
from dflash.world import World

SHAPE = BlockShape(4, MASK)


def test_dpace_weights_by_hand() -> None:
    """With alpha 0.5 and q = 0.6, 0.2, 1.0: s = 0.8, 0.6, 1.0, products 0.8, 0.48, 0.48, and their sums."""
    ce = -torch.tensor([[0.6, 0.2, 1.0]]).log()
    weights = dpace_weights(ce, torch.ones(1, 3, dtype=torch.bool), 0.5)
    torch.testing.assert_close(weights, torch.tensor([[1.76, 0.96, 0.48]]))


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), min_size=1, max_size=15), st.floats(0, 1))
def test_dpace_weights_are_those_of_the_definition(slots: list[tuple[float, bool]], alpha: float) -> None:
    ce, counted = torch.tensor([[c for c, _ in slots]]), torch.tensor([[n for _, n in slots]])
    weights = dpace_weights(ce, counted, alpha)[0].tolist()
    for j, (_, here) in enumerate(slots):
        expected = 0.0
        for m in range(j, len(slots)):
            factors = [(1 - alpha) * np.exp(-c) + alpha for c, n in slots[: m + 1] if n]
            expected += float(np.prod(factors)) if slots[m][1] else 0.0
        assert weights[j] == pytest.approx(expected if here else 0.0, rel=1e-4, abs=1e-6)


def test_unsmoothed_dpace_weights_are_the_derivative_of_the_expected_acceptance() -> None:
    log_q = torch.tensor([[-0.3, -1.2, -0.1, -2.0]], requires_grad=True)
    log_q.cumsum(dim=1).exp().sum().backward()  # expected accepted drafts: sum of q_1 ... q_m
    weights = dpace_weights(-log_q, torch.ones(1, 4, dtype=torch.bool), 0.0)
    torch.testing.assert_close(weights, log_q.grad)
    assert not weights.requires_grad


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("rows", [0, 1, ON_CPU.rows + 3])
def test_the_divergence_is_that_of_torch_in_value_and_gradient(rows: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, teacher = torch.randn(2, rows, 16, generator=generator)
    lm_head = torch.randn(50, 16, generator=generator)
    labels = torch.randint(50, (rows,), generator=generator)
    upstream = torch.rand(rows, generator=generator)
    ours, oracle = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, correct = HeadDivergence.apply(ours, teacher, lm_head, labels, softcap)

    def capped(x: Tensor) -> Tensor:
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    drafted, wanted = capped(oracle @ lm_head.T), capped(teacher @ lm_head.T)
    expected = F.kl_div(drafted.log_softmax(-1), wanted.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(correct, drafted.argmax(-1) == labels)
    (loss * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, oracle.grad, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory) -> tuple[Path, object]:
    """A cache that taps the last layer too, in float32, and the target that it comes from."""
    folder = tmp_path_factory.mktemp("kd")
    target = open_target(write_target(folder / "target"), (1, 3, 5))
    samples = [answered(target, prompt, 20) for prompt in random_prompts([5, 9, 12, 3, 7])]
    samples = [replace(sample, id=number) for number, sample in enumerate(samples, 1)]
    cache = write_cache(folder / "cache", samples, dtype="float32", taps=(1, 3, 5), head=target.head)
    return cache, target


def test_the_teacher_is_the_target_itself(distilled) -> None:
    """Teacher logits behind each counted slot are the target's own at the position before its token."""
    cache, target = distilled
    samples = CacheReader(cache).read(range(5))
    docs = documents(samples, [0] * 5, [0] * 5, AnchorConfig(density=0.4))
    batch = with_teacher(pack(docs, SHAPE), docs)
    logits = target.head.logits(teacher_states(batch, target.head))
    counted = iter(range(len(logits)))
    block = 0
    for doc in docs:
        ids = torch.tensor(doc.sample.input_ids, dtype=torch.long)
        own, _ = target.forward(ids, target.new_cache(), keep_logits=len(ids))
        for anchor in doc.anchors.tolist():
            for k in (1, 2, 3):
                if batch.counted[block, k - 1]:
                    said = logits[next(counted)]
                    torch.testing.assert_close(said, own[anchor + k - 1], atol=1e-4, rtol=1e-4)
            block += 1
    assert next(counted, None) is None


def test_a_drafter_that_says_what_the_target_says_has_no_divergence_left(distilled) -> None:
    cache, target = distilled
    docs = documents(CacheReader(cache).read([0]), [0], [0], AnchorConfig(density=1.0))
    batch = with_teacher(pack(docs, SHAPE), docs)
    states = teacher_states(batch, target.head)
    loss, correct = HeadDivergence.apply(states, states, target.head.lm_head, batch.targets, None)
    assert loss.abs().max() < 1e-5
    assert correct.all()  # the answers are the target's own greedy ones


def test_the_drafter_of_a_distillation_does_not_read_the_teachers_layer(distilled, tmp_path) -> None:
    cache, _ = distilled
    config = tiny_config(
        cache,
        tmp_path / "run",
        objective=ObjectiveConfig(4, loss="kd"),
        optim=OptimConfig(lr=3e-3),
        max_steps=30,
        precision="float32",
    )
    result = train(config, World())
    assert load_drafter(result.checkpoint).config.target_layer_ids == (1, 3)
    losses = [step["loss"] for step in load_run(config.out).steps]
    assert losses[-1] < 0.7 * losses[0]


def test_a_cache_without_the_last_state_cannot_teach(tmp_path) -> None:
    cache = write_cache(tmp_path / "cache", LENGTHS[:3])
    text = r"needs the target's last hidden state, but the cache holds layers 1,3 of 0\.\.5; extract with"
    with pytest.raises(ConfigError, match=text):
        train(tiny_config(cache, tmp_path / "run", objective=ObjectiveConfig(4, loss="kd")), World())
    assert drafter_taps(CacheReader(cache).manifest.identity, "ce") == (1, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": "kd", "sampled_softmax": 5}, "cannot go with --sampled-softmax"),
        ({"loss": "dpace", "dpace_alpha": 1.5}, r"--dpace-alpha 1.5 must be in \[0, 1\]"),
        ({"loss": "mse"}, "--loss 'mse' is unknown; use ce, dpace, kd"),
    ],
)
def test_losses_that_make_no_sense_are_refused(change, text) -> None:
    with pytest.raises(ConfigError, match=text):
        ObjectiveConfig(**change)


def sums_of(batches: list[PackedBatch], loss: DraftingLoss) -> tuple[Tensor, list[LossSums]]:
    loss.drafter.zero_grad()
    sums = [loss(batch) for batch in batches]
    for part in sums:
        part.loss.backward()
    weight = sum(part.weight for part in sums)
    return torch.cat([p.grad.flatten() for p in loss.drafter.parameters()]) / weight, sums


@pytest.mark.parametrize("kind", ["dpace", "kd"])
@settings(max_examples=6, deadline=None)
@given(slots=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_any_division_into_micro_batches_gives_the_same_gradient(distilled, kind, slots) -> None:
    cache, target = distilled
    drafter = Drafter(drafter_config())
    init_weights(drafter, 2)
    loss = DraftingLoss(drafter, target.head, ObjectiveConfig(4, loss=kind), 3)
    docs = documents(CacheReader(cache).read(range(5)), [0] * 5, [0] * 5, AnchorConfig(density=0.5))

    def packed(part: list[Document]) -> PackedBatch:
        return with_teacher(pack(part, SHAPE), part)

    whole, _ = sums_of([packed(docs)], loss)
    parts = [[doc for doc, slot in zip(docs, slots, strict=True) if slot == number] for number in range(4)]
    split, _ = sums_of([packed(part) for part in parts], loss)
    assert float((split - whole).norm() / whole.norm()) < 1e-5


def gradient_of_a_step(rank: int, size: int, cache: Path, out: Path) -> dict[str, Tensor]:
    """The gradient that the first update of a run sees on this rank, by loss and way to deal anchors."""
    found: dict[str, Tensor] = {}
    for kind, sampling in (("dpace", "stratified"), ("kd", "uniform")):
        config = tiny_config(
            cache,
            out / f"{kind}-{size}-{rank}",
            objective=ObjectiveConfig(4, loss=kind),
            anchors=AnchorConfig(64, 0.5, sampling=sampling),
            sampler=SamplerConfig(tokens_per_batch=64, batches_per_step=6, min_ready=1, max_ready=8),
            optim=OptimConfig(lr=1e-3, clip=1e9),
            precision="float32",
        )
        run = Run.open(config, World(rank, size))
        with StepLoader(run.reader, run.sampler, run.blocks, World(rank, size), run.device) as loader:
            loaded = next(iter(loader))
        totals, _ = run._backward(loaded)
        grads: list[Tensor] = []
        run.optimizer.step = lambda run=run, grads=grads: grads.extend(
            p.grad.clone().flatten() for p in run.drafter.parameters()
        )
        run._update(totals, 1e-3)
        found |= {kind: torch.cat(grads), f"{kind}-totals": totals}
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_has_the_same_gradient_on_any_number_of_ranks(distilled, tmp_path, size) -> None:
    cache, _ = distilled
    alone = gradient_of_a_step(0, 1, cache, tmp_path)
    for ours in run_ranks(tmp_path / "ranks", size, gradient_of_a_step, cache, tmp_path):
        for name, expected in alone.items():
            assert float((ours[name] - expected).norm() / expected.norm()) < 1e-5, name


def test_dpace_resumes_bit_for_bit(tmp_path, monkeypatch) -> None:
    cache = write_cache(tmp_path / "cache", LENGTHS)
    spread = AnchorConfig(64, 0.5, sampling="stratified")
    parts = {"objective": ObjectiveConfig(4, loss="dpace"), "anchors": spread}
    config = tiny_config(cache, tmp_path / "whole", save_every=3, max_steps=6, **parts)
    whole = train(config, World())
    halves = replace(config, out=tmp_path / "halves")
    train(halves, World())
    for path in (halves.out / "checkpoints").glob("step-000006*"):
        path.rename(path.with_name("gone"))
    assert same(trained(whole.checkpoint), trained(train(replace(halves, resume=True), World()).checkpoint))


def test_a_document_without_a_valid_anchor_adds_nothing_to_any_loss(distilled) -> None:
    cache, target = distilled
    sample = CacheReader(cache).read([0])[0]
    bare = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    for kind in ("ce", "dpace", "kd"):
        drafter = Drafter(drafter_config())
        init_weights(drafter, 2)
        loss = DraftingLoss(drafter, target.head, ObjectiveConfig(4, loss=kind), 3)
        docs = documents([sample], [0], [0], AnchorConfig())
        more = documents([bare, sample, bare], [0] * 3, [0] * 3, AnchorConfig())
        alone, _ = sums_of([with_teacher(pack(docs, SHAPE), docs)], loss)
        beside, _ = sums_of([with_teacher(pack(more, SHAPE), more)], loss)
        assert torch.equal(alone, beside)
        nothing = loss(with_teacher(pack(more[:1], SHAPE), more[:1]))
        assert (nothing.loss, nothing.weight) == (0, 0)


@pytest.mark.parametrize("offset", [False, True])
def test_the_final_norm_is_that_of_the_target(offset: bool) -> None:
    weight = torch.rand(8)
    table = torch.rand(VOCAB, 8)
    head = TargetHead(table, table, weight, HeadFacts(norm_eps=1e-3, norm_unit_offset=offset))
    x = torch.randn(5, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + offset)
    torch.testing.assert_close(head.normed(x), expected)
