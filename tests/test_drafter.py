"""The drafter network: what a block may see, a plain reimplementation, and its config."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import MASK, VOCAB, drafter_config, random_sample
from torch import Tensor
from torch.nn import functional as F

from dflash.attention import BlockLayout, dense_attention, lone_attention
from dflash.drafter import Drafter, init_weights, rms_norm, rotary, rotate
from dflash.errors import ConfigError
from dflash.train.batches import BlockShape, Document, pack

LENGTHS = (14, 6, 19)
ANCHORS = ([0, 3, 4, 9], [2], [1, 7, 8, 17])
BLOCKS = [(number, anchor) for number, anchors in enumerate(ANCHORS) for anchor in anchors]


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    drafter = Drafter(drafter_config())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # larger than at the start of training, so that attention is far from uniform
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    return drafter.requires_grad_(False)


@pytest.fixture(scope="module")
def table() -> Tensor:
    return torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(4))


def make_documents(only: int | None = None) -> list[Document]:
    rng = np.random.default_rng(5)
    made = [random_sample(rng, number, length) for number, length in enumerate(LENGTHS)]
    for sample in made:
        sample.hidden_states = sample.hidden_states.float()
    docs = [Document(sample, np.array(ANCHORS[i], np.int64), 0) for i, sample in enumerate(made)]
    return docs if only is None else [docs[only]]


def predict(drafter: Drafter, table: Tensor, docs: list[Document]) -> Tensor:
    """Output states `[A, B, H]` by the whole way of training: packed, embedded, attended."""
    batch = pack(docs, BlockShape(drafter.config.block_size, MASK))
    blocks = F.embedding(batch.distinct_ids, table)
    return drafter(blocks, batch.block_positions, batch.features, batch.context_positions, batch.layout)


def changed_blocks(before: Tensor, after: Tensor) -> set[tuple[int, int]]:
    """The (document, anchor) of each block whose prediction is another."""
    differs = (before - after).abs().flatten(1).amax(1) > 1e-6
    return {block for block, changed in zip(BLOCKS, differs.tolist(), strict=True) if changed}


PLACES = [(number, place) for number, length in enumerate(LENGTHS) for place in range(length)]


def test_a_token_reaches_only_the_block_whose_anchor_it_is(drafter, table):
    before = predict(drafter, table, make_documents())
    for number, place in PLACES:
        docs = make_documents()
        ids = docs[number].sample.input_ids
        ids[place] = (ids[place] + 1) % VOCAB
        assert changed_blocks(before, predict(drafter, table, docs)) == {(number, place)} & set(BLOCKS)


def test_a_hidden_state_reaches_exactly_the_later_anchors_of_its_document(drafter, table):
    before = predict(drafter, table, make_documents())
    for number, place in PLACES:
        docs = make_documents()
        docs[number].sample.hidden_states[place] += 1.0
        expected = {(number, anchor) for anchor in ANCHORS[number] if anchor > place}
        assert changed_blocks(before, predict(drafter, table, docs)) == expected


def test_a_block_predicts_the_same_alone_as_among_other_blocks_and_documents(drafter, table):
    together = predict(drafter, table, make_documents())
    for index, (number, anchor) in enumerate(BLOCKS):
        (document,) = make_documents(only=number)
        alone = predict(drafter, table, [Document(document.sample, np.array([anchor]), 0)])
        torch.testing.assert_close(alone[0], together[index], atol=1e-5, rtol=1e-5)


def plain_forward(drafter: Drafter, block: Tensor, features: Tensor) -> Tensor:
    """Contract section 1 for one block `[B, H]` behind its context `[T, K*H]`, head by head."""
    c, weights = drafter.config, drafter.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, first: int) -> Tensor:
        half = c.head_dim // 2
        place = torch.arange(first, first + len(x))[:, None]
        angle = place / c.rope_theta ** (torch.arange(half) * 2 / c.head_dim)
        low, high = x[:, :half], x[:, half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], 1)

    rows = len(features)
    context = norm(features @ weights["fc.weight"].T, "hidden_norm")
    x = block
    for i in range(c.num_hidden_layers):
        at = f"layers.{i}."
        normed = norm(x, at + "input_layernorm")
        q, k, v = (weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
        heads = []
        for head in range(c.num_attention_heads):
            shared = head // (c.num_attention_heads // c.num_key_value_heads)
            cut = slice(head * c.head_dim, (head + 1) * c.head_dim)
            kv_cut = slice(shared * c.head_dim, (shared + 1) * c.head_dim)
            query = turned(norm(normed @ q[cut].T, at + "self_attn.q_norm"), rows)
            sources = torch.cat([context, normed])
            key = turned(norm(sources @ k[kv_cut].T, at + "self_attn.k_norm"), 0)
            heads.append(torch.softmax(query @ key.T / c.head_dim**0.5, -1) @ (sources @ v[kv_cut].T))
        x = x + torch.cat(heads, 1) @ weights[at + "self_attn.o_proj.weight"].T
        normed = norm(x, at + "post_attention_layernorm")
        gate, up, down = (weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return norm(x, "norm")


def test_the_packed_forward_is_the_contract_written_out_block_by_block(drafter, table):
    together = predict(drafter, table, make_documents())
    docs = make_documents()
    for index, (number, anchor) in enumerate(BLOCKS):
        sample = docs[number].sample
        ids = torch.full((drafter.config.block_size,), MASK)
        ids[0] = int(sample.input_ids[anchor])
        expected = plain_forward(drafter, table[ids], sample.hidden_states[:anchor].flatten(1))
        torch.testing.assert_close(together[index], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize(("layers", "size"), [(1, 4), (2, 2), (3, 5)])
def test_what_equal_slots_share_gives_and_learns_what_whole_blocks_do(
    table, layers, size, first_slot, recompute
):
    drafter = Drafter(drafter_config(num_hidden_layers=layers, block_size=size))
    init_weights(drafter, 1)
    for layer in drafter.layers:
        layer.recompute = recompute
    batch = pack(make_documents(), BlockShape(size, MASK))
    upstream = torch.randn(batch.blocks, size - first_slot, 32, generator=torch.Generator().manual_seed(6))
    results = []
    for ids in (batch.block_ids, batch.distinct_ids):
        blocks = F.embedding(ids, table).requires_grad_()
        where = batch.block_positions, batch.features, batch.context_positions, batch.layout
        out = drafter(blocks, *where, first_slot=first_slot)
        results.append([out, *torch.autograd.grad(out, [*drafter.parameters(), blocks], upstream)])
    whole = results[0].pop()  # of blocks [A, B, H]; each mask of them adds to the gradient of the one
    results[0].append(torch.cat([whole[:, 0], whole[:, 1:].sum((0, 1))[None]]))
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", [lone_attention, dense_attention])
@pytest.mark.parametrize("split", [0, 1, 8])
def test_a_context_fed_in_parts_drafts_as_one_fed_at_once(drafter, table, split, attention):
    features = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    block, positions = table[torch.tensor([[7, MASK, MASK, MASK]])], torch.arange(9, 13)[None]
    parts = [
        drafter.context_key_values(features[rows], torch.arange(9)[rows])
        for rows in (slice(split), slice(split, 9))
    ]
    context = [
        type(a)(torch.cat([a.key, b.key]), torch.cat([a.value, b.value])) for a, b in zip(*parts, strict=True)
    ]
    out = drafter.denoise(block, positions, context, BlockLayout.build([0], [9]), attention)
    torch.testing.assert_close(out[0], plain_forward(drafter, block[0], features), atol=1e-5, rtol=1e-5)


def test_the_same_seed_gives_the_same_weights_and_norms_start_at_one():
    first, second, other = (Drafter(drafter_config()) for _ in range(3))
    for module, seed in ((first, 1), (second, 1), (other, 2)):
        init_weights(module, seed)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        if parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            assert not torch.equal(parameter, other.get_parameter(name))


def test_rope_depends_on_the_distance_alone():
    x, y = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))

    def product(i: int, j: int) -> Tensor:
        turned = [rotate(v, rotary(torch.tensor(p), 8, 1e4)) for v, p in ((x, i), (y, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 10), product(103, 110), atol=1e-4, rtol=1e-4)
    assert (product(3, 10) - product(3, 11)).abs() > 1e-3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"mask_token_id": VOCAB},
            rf"mask token id {VOCAB} is outside the target's embedding rows 0\.\.{VOCAB - 1}",
        ),
        ({"mask_token_id": -1}, "mask token id -1 is outside"),
        ({"mask_token_id": 2}, "mask token id 2 is the target's end-of-sequence token"),
        (
            {"mask_token_id": 9, "eos_token_id": (2, 9)},
            "mask token id 9 is the target's end-of-sequence token",
        ),
        ({"mask_token_id": 0}, "mask token id 0 is the target's padding token"),
        ({"block_size": 1}, "block size 1 drafts nothing"),
        ({"num_attention_heads": 3}, "3 query heads cannot share 2 key/value heads"),
        ({"target_layer_ids": (1, 6)}, "tap 6 is outside"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_its_value(changes, text):
    with pytest.raises(ConfigError, match=text):
        drafter_config(**changes)


def test_the_norm_has_the_values_and_gradients_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 3, 16), (16,))
    )
    upstream = torch.randn(5, 3, 16, generator=generator)

    def formula(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    results = []
    for function, dtype in ((formula, torch.float64), (lambda x, w: rms_norm(x, w, 1e-6), torch.float32)):
        leaves = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    for oracle, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle.float(), atol=2e-6, rtol=2e-5)


def test_the_rotation_has_the_values_and_gradients_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(2, 7, 3, 8, generator=generator) for _ in range(2))
    cos, sin = rotary(torch.arange(14).view(2, 7), 8, 10000.0)
    results = []
    for function in (lambda x: rotate(x, (cos, sin)), lambda x: x * cos + _half_turned(x) * sin):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        results.append((out, *torch.autograd.grad(out, leaf, upstream)))
    for ours, oracle in zip(*results, strict=True):
        torch.testing.assert_close(ours, oracle)


def _half_turned(x):
    low, high = x.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


@pytest.mark.parametrize("first_slot", [1, 2])
def test_slots_that_are_not_wanted_change_nothing_of_the_others(table, first_slot):
    drafter = Drafter(drafter_config())
    init_weights(drafter, seed=1)
    batch = pack(make_documents(), BlockShape(drafter.config.block_size, MASK))
    blocks = F.embedding(batch.block_ids, table)
    inputs = (blocks, batch.block_positions, batch.features, batch.context_positions, batch.layout)
    whole = drafter(*inputs)[:, first_slot:]
    part = drafter(*inputs, first_slot=first_slot)
    torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-5)
    parameters = list(drafter.parameters())
    oracle = torch.autograd.grad(whole.square().sum(), parameters)
    for ours, expected in zip(torch.autograd.grad(part.square().sum(), parameters), oracle, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
