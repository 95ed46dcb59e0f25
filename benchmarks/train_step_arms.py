"""One training step, by our code or a peer's, on the same weights, tokens, anchors and loss positions.

Run by `train_step.py`, one process an arm: `train_step_arms.py ARM TOKENS`. It builds the arm, prints a line
of JSON, and then answers each line on its standard input with one: `step` is a whole step, `products` the
matrix products of our step alone, `parts` our step part by part, `memory` the peak so far.

Each arm computes in bfloat16 the way its own trainer does: ours and speculators with float32 weights under
autocast, SpecForge with bfloat16 weights and float32 masters in its own optimizer. On a processor without
bfloat16 products our trainer computes in float32, and so does its arm.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.bfloat16 import product_dtype
from dflash.cache.writer import Sample
from dflash.drafter import Drafter, DrafterConfig, init_weights
from dflash.grouped import attention_for
from dflash.head import HeadFacts, TargetHead
from dflash.train.batches import BlockShape, Document, pack
from dflash.train.memory import keep_memory
from dflash.train.objective import DraftingLoss, HeadCrossEntropy, ObjectiveConfig
from dflash.train.optim import OptimConfig, build_optimizer

HIDDEN, VOCAB, BLOCK, ANCHORS, SEQUENCES, GAMMA = 512, 32_000, 16, 128, 2, 7.0
MASK = VOCAB - 1
DTYPE = product_dtype(torch.bfloat16, torch.device("cpu"))
"""In which our trainer computes here: bfloat16 where the processor can multiply it."""
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=1536,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=VOCAB,
    block_size=BLOCK,
    mask_token_id=MASK,
    target_layer_ids=(1, 3, 5, 7, 9),
    num_target_layers=12,
)


class Job(NamedTuple):
    """What every arm trains on."""

    ids: Tensor
    """`[S, T]`."""
    states: Tensor
    """`[S, T, K, H]` bfloat16."""
    mask: Tensor
    """Supervised tokens, `[S, T]`."""
    anchors: Tensor
    """`[S, anchors]`, sorted; every block lies within its sequence."""
    embedding: Tensor
    lm_head: Tensor


def make_job(tokens: int) -> Job:
    """Random tokens and states; the first quarter of each sequence is a prompt."""
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    first = tokens // 4
    places = np.arange(first, tokens - BLOCK)
    anchors = [np.sort(rng.choice(places, ANCHORS, replace=False)) for _ in range(SEQUENCES)]
    shape = (SEQUENCES, tokens, len(CONFIG.target_layer_ids), HIDDEN)
    return Job(
        torch.from_numpy(rng.integers(0, MASK, (SEQUENCES, tokens))),
        torch.randn(shape, generator=generator).bfloat16(),
        (torch.arange(tokens) >= first).long().expand(SEQUENCES, tokens).contiguous(),
        torch.from_numpy(np.stack(anchors)),
        (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02).bfloat16(),
        (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05).bfloat16(),
    )


def our_weights() -> dict[str, Tensor]:
    """The same starting weights for every arm; all of them know these names."""
    drafter = Drafter(CONFIG)
    init_weights(drafter, 0)
    return drafter.state_dict()


class Arm(NamedTuple):
    """A trainer's step in two halves."""

    learn: Callable[[], float]
    """Forward and backward; gives sum(w CE) / sum(w)."""
    update: Callable[[], object]
    """Clip, optimizer, gradients to nothing."""
    parts: Callable[[], dict[str, float]] | None = None


def ours(job: Job) -> Arm:
    """This project's loss, clipping and optimizer, with memory kept as in a run."""
    keep_memory()
    drafter = Drafter(CONFIG)
    drafter.load_state_dict(our_weights())
    head = TargetHead(job.embedding, job.lm_head, torch.ones(HIDDEN).bfloat16(), HeadFacts())
    head = head.to(job.embedding.device, DTYPE)
    loss = DraftingLoss(drafter, head, ObjectiveConfig(BLOCK, gamma=GAMMA), 1)
    documents = [
        Document(Sample(row, ids.numpy().astype(np.int32), mask.numpy().astype(np.uint8), states), places, 0)
        for row, (ids, mask, states, places) in enumerate(
            zip(job.ids, job.mask, job.states, job.anchors.numpy(), strict=True)
        )
    ]
    batch = pack(documents, BlockShape(BLOCK, MASK))
    optimizer = build_optimizer(drafter, OptimConfig())

    def learn() -> float:
        sums = loss(batch)
        (sums.loss / sums.weight).backward()
        return float(sums.loss.detach() / sums.weight)

    def update() -> None:
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Arm(learn, update, lambda: parts(loss, batch))


def specforge(job: Job, dtype: torch.dtype = torch.bfloat16) -> Arm:
    """SpecForge's `OnlineDFlashModel` with `sdpa`, in bfloat16 with its own optimizer."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer

    config = _qwen3(block_size=BLOCK, num_target_layers=CONFIG.num_target_layers, dflash_config=_dflash())
    draft = DFlashDraftModel(config).to(dtype)
    draft.load_state_dict(our_weights())
    lm_head, embedding = _frozen(nn.Linear(HIDDEN, VOCAB, bias=False), nn.Embedding(VOCAB, HIDDEN))
    lm_head.weight.data, embedding.weight.data = job.lm_head.to(dtype), job.embedding.to(dtype)

    class Same(OnlineDFlashModel):
        def _sample_anchor_positions(self, *_arguments: Any) -> tuple[Tensor, Tensor]:
            return job.anchors, torch.ones_like(job.anchors, dtype=torch.bool)

    model = Same(
        draft,
        lm_head,
        embedding,
        mask_token_id=MASK,
        block_size=BLOCK,
        attention_backend="sdpa",
        num_anchors=ANCHORS,
        loss_decay_gamma=GAMMA,
    )
    optimizer = BF16Optimizer(draft, lr=6e-4, max_grad_norm=1.0)
    features = job.states.flatten(2).to(dtype)

    def learn() -> float:
        loss, _, _ = model(job.ids, features, job.mask.float())
        loss.backward()
        return float(loss.detach())

    return Arm(learn, optimizer.step)


def speculators(job: Job) -> Arm:
    """The `DFlashDraftModel` of speculators with `sdpa` and cross-entropy, packed, under autocast.

    It takes labels from the target's last hidden states: rows of the `lm_head` that point at the next tokens.
    """
    core = importlib.import_module("speculators.models.dflash.core")
    ce_eager = importlib.import_module("speculators.losses.eager").ce_loss  # the fused one wants Triton
    model = core.DFlashDraftModel(_speculators_config())
    weights = our_weights() | {f"{name}.weight": job.lm_head for name in ("lm_head", "verifier_lm_head")}
    weights |= {"embed_tokens.weight": job.embedding, "verifier_norm.weight": torch.ones(HIDDEN)}
    model.load_state_dict(weights, strict=False)
    tokens = job.ids.shape[1]
    flat = (job.anchors + torch.arange(SEQUENCES)[:, None] * tokens).flatten()
    core.select_anchors = lambda *_arguments: (flat, torch.ones_like(flat, dtype=torch.bool))
    ids = job.ids.reshape(1, -1)
    last = job.lm_head[ids.roll(-1, 1)[0]][None]
    inputs = {
        "hidden_states": job.states.flatten(2).reshape(1, ids.shape[1], -1),
        "input_ids": ids,
        "loss_mask": job.mask.reshape(1, -1),
        "verifier_last_hidden_states": last,
        "document_ids": torch.arange(SEQUENCES).repeat_interleave(tokens)[None],
        "position_ids": torch.arange(tokens).repeat(SEQUENCES)[None],
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4)
    by_count = BLOCK - 1
    weight = float(ObjectiveConfig(BLOCK, gamma=GAMMA).slot_weights().sum())

    def learn() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _ = model(
                **inputs, loss_config={"ce": (ce_eager, 1.0)}, gamma=GAMMA, max_anchors=len(flat)
            )
        loss.backward()
        return float(loss.detach()) * by_count / weight  # it divides by positions, we by weights

    def update() -> None:
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Arm(learn, update)


def _qwen3(**extra: Any) -> Any:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_hidden_layers,
        num_attention_heads=CONFIG.num_attention_heads,
        num_key_value_heads=CONFIG.num_key_value_heads,
        head_dim=CONFIG.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        rms_norm_eps=CONFIG.rms_norm_eps,
        **extra,
    )
    config._attn_implementation = "sdpa"  # noqa: SLF001
    return config


def _dflash() -> dict[str, Any]:
    return {"target_layer_ids": list(CONFIG.target_layer_ids), "mask_token_id": MASK}


def _speculators_config() -> Any:
    from speculators.models.dflash import DFlashSpeculatorConfig

    return DFlashSpeculatorConfig(
        transformer_layer_config=_qwen3(),
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(CONFIG.target_layer_ids),
        mask_token_id=MASK,
    )


def _frozen(*modules: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(module.requires_grad_(False) for module in modules)


class Products(TorchDispatchMode):
    """Records every matrix product that runs inside it."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep two empty factors of its shape if it is a product."""
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            factors = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self.calls.append((name.replace("add", "").replace("bb", "b"), [_alike(x) for x in factors]))
        return func(*args, **(kwargs or {}))

    def seconds(self, names: tuple[str, ...]) -> float:
        """Time of all recorded products of these kinds, one after another."""
        product = {"mm": torch.mm, "bmm": torch.bmm}
        started = time.perf_counter()
        for name, factors in self.calls:
            if name in names:
                product[name](*factors)
        return time.perf_counter() - started


def _alike(tensor: Tensor) -> Tensor:
    # the same shape, strides and dtype: what is timed is the product alone
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(0.01)


def parts(loss: DraftingLoss, batch: Any) -> dict[str, float]:
    """Seconds of each part's forward and backward by itself, at the shapes of the step."""
    drafter, head = loss.drafter, loss.head
    layer, rows = drafter.layers[0], batch.block_ids.shape
    states = torch.randn(*rows, HIDDEN, requires_grad=True)
    context = torch.randn(len(batch.context_positions), HIDDEN).to(DTYPE).requires_grad_()
    cos_sin, context_turn = (drafter.rotary(p) for p in (batch.block_positions, batch.context_positions))
    with torch.no_grad(), _computing():
        query, own = layer.self_attn.query_key_value(layer.input_layernorm(states), cos_sin, 0)
        seen = layer.self_attn.key_value(context, context_turn)
    leaves = [x.detach().requires_grad_() for x in (query, *seen, *own)]
    positions = torch.randn(int(batch.counted.sum()), HIDDEN, requires_grad=True)
    labels = batch.labels[batch.counted]

    def projections() -> tuple[Tensor, ...]:
        asked, kept = layer.self_attn.query_key_value(layer.input_layernorm(states), cos_sin, 0)
        return asked, *kept, layer.self_attn.o_proj(leaves[0].flatten(2))

    def attention() -> tuple[Tensor]:
        pair = type(seen)
        return (attention_for(states.device)(leaves[0], pair(*leaves[1:3]), pair(*leaves[3:]), batch.layout),)

    layers = CONFIG.num_hidden_layers
    jobs: dict[str, tuple[int, Callable[[], tuple[Tensor, ...]]]] = {
        "embedding": (1, lambda: (head.embed(batch.block_ids).float(),)),
        "fc": (1, lambda: (drafter.fuse(batch.features.to(DTYPE)),)),
        "context keys and values": (layers, lambda: (*layer.self_attn.key_value(context, context_turn),)),
        "block projections": (layers, projections),
        "attention": (layers, attention),
        "mlp": (layers, lambda: (states + layer.mlp(layer.post_attention_layernorm(states)),)),
        "lm_head and loss": (1, lambda: HeadCrossEntropy.apply(positions, head.lm_head, labels, None)[:1]),
    }
    return {name: times * _timed(work) for name, (times, work) in jobs.items()}


def _computing() -> AbstractContextManager[Any]:
    return nullcontext() if torch.float32 == DTYPE else torch.autocast("cpu", DTYPE)


def _timed(work: Callable[[], tuple[Tensor, ...]]) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        with _computing():
            outputs = [out for out in work() if out.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        best = min(best, time.perf_counter() - started)
    return best


def _memory(kind: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{kind}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def answer(command: str, arm: Arm, before: int) -> dict[str, Any]:
    """Do what a line asks."""
    if command == "memory":
        return {"bytes": _memory("VmHWM") - before}
    if command == "parts":
        return arm.parts() if arm.parts else {}
    if command == "products":
        with Products() as products:
            arm.learn()
        arm.update()
        products.seconds(("mm", "bmm"))
        return {"weights": products.seconds(("mm",)), "all": products.seconds(("mm", "bmm"))}
    started = time.perf_counter()
    loss = arm.learn()
    learnt = time.perf_counter()
    arm.update()
    return {"learn": learnt - started, "update": time.perf_counter() - learnt, "loss": loss}


ARMS = {
    "ours": ours,
    "specforge": specforge,
    "speculators": speculators,
    "specforge-float32": partial(specforge, dtype=torch.float32),
}


def main() -> None:
    """Build the arm, then answer until the input ends."""
    warnings.simplefilter("ignore")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    name, tokens = sys.argv[1], int(sys.argv[2])
    job = make_job(tokens)
    if name != "ours":
        importlib.import_module("speculators.losses" if name == "speculators" else "specforge.optimizer")
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    arm = ARMS[name](job)
    print(json.dumps({"dtype": str(DTYPE)}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip(), arm, before)), file=replies, flush=True)


if __name__ == "__main__":
    main()
