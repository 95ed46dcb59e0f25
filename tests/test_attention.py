"""Block attention: every implementation computes what the masked dense attention computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash import attention as attention_module
from dflash import grouped
from dflash.attention import (
    TILE,
    BlockLayout,
    KeyValue,
    dense_attention,
    flex_block_attention,
    lone_attention,
    visible,
)
from dflash.grouped import TILE_BLOCKS, TILE_WIDTH, Tiles, attention_for, grouped_attention


@dataclass
class Case:
    """Tensors of one packed micro-batch."""

    query: Tensor
    context: KeyValue
    block: KeyValue
    layout: BlockLayout

    def leaves(self) -> list[Tensor]:
        return [self.query, *self.context, *self.block]

    def run_flex(self, *, compiled: bool = False) -> Tensor:
        """Forward only: all that flex_attention can do on a CPU."""
        detached = [tensor.detach() for tensor in self.leaves()]
        return flex_block_attention(
            detached[0], KeyValue(*detached[1:3]), KeyValue(*detached[3:]), self.layout, compiled=compiled
        )

    def run(self, attention) -> Tensor:
        return attention(self.query, self.context, self.block, self.layout)


def make_case(
    anchors: list[list[int]],
    size: int = 3,
    heads: int = 4,
    groups: int = 2,
    *,
    seed: int = 0,
    asking: int | None = None,
    width: int = 8,
) -> Case:
    """Documents one after another, each given by its sorted anchors; its context ends at the last one."""
    starts, ends, rows = [], [], 0
    for of_document in anchors:
        starts += [rows] * len(of_document)
        ends += [rows + anchor for anchor in of_document]
        rows += max(of_document, default=0)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, width, generator=generator, requires_grad=True)

    blocks = len(starts)
    return Case(
        random(blocks, asking or size, heads),
        KeyValue(random(rows, groups), random(rows, groups)),
        KeyValue(random(blocks, size, groups), random(blocks, size, groups)),
        BlockLayout.build(starts, ends),
    )


def sorted_unique(top: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, top), min_size=0, max_size=most, unique=True).map(sorted)


LAYOUTS = st.lists(sorted_unique(80, 2 * TILE_BLOCKS[-1] + 3), min_size=1, max_size=4).filter(any)
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 2)])


@settings(max_examples=60, deadline=None)
@given(
    LAYOUTS, HEADS, st.integers(1, 5), st.integers(0, 4), st.integers(0, 99), st.sampled_from([0, 1 << 30])
)
def test_tiles_give_the_values_and_gradients_of_the_dense_oracle(anchors, heads, size, silent, seed, kept):
    case = make_case(anchors, size, *heads, seed=seed, asking=max(size - silent, 1))
    upstream = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(seed + 1))
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "KEPT_BYTES", kept)  # the backward pass has the weights, or computes them
        for attention in (dense_attention, grouped_attention):
            out = case.run(attention)
            gradients = torch.autograd.grad(out, case.leaves(), upstream, materialize_grads=True)
            results.append((out, *gradients))
    for oracle, ours in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, oracle, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("asking", [3, 4])
@pytest.mark.parametrize("anchors", [[[3, 9], [], [0, 1, 20]], [[0]], [list(range(20)), [140]]])
def test_flex_attention_gives_the_values_of_the_dense_oracle(anchors, heads, asking):
    case = make_case(anchors, 4, *heads, asking=asking)
    torch.testing.assert_close(case.run_flex(), case.run(dense_attention).detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_flex_mask_is_built_once_for_all_layers():
    case = make_case([[2, 5]])
    case.run_flex()
    mask = case.layout.memo["flex 3"]
    case.run_flex()
    assert case.layout.memo["flex 3"] is mask


LONG = st.lists(
    st.lists(st.integers(0, 500), min_size=0, max_size=40, unique=True).map(sorted), min_size=1, max_size=4
).filter(any)


def by_tiles(sees: Tensor) -> Tensor:
    """Bool `[queries, keys]` in tiles `[tiles, tiles, TILE * TILE]`, filled up with False."""
    rows, columns = (-(-length // TILE) * TILE for length in sees.shape)
    filled = torch.zeros(rows, columns, dtype=torch.bool)
    filled[: sees.shape[0], : sees.shape[1]] = sees
    return filled.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2).flatten(2)


@settings(max_examples=40, deadline=None)
@given(LONG, st.integers(1, 20), st.integers(0, 3), st.integers(0, 300), st.integers(0, 9))
def test_the_flex_mask_takes_the_tiles_in_which_anything_is_seen(
    anchors, size, silent, more_rows, more_blocks
):
    """Also behind rows and blocks of padding."""
    layout, asking = make_case(anchors, size).layout, max(size - silent, 1)
    used = max(layout.context_end.tolist())
    starts, ends = (
        [*part.tolist(), *[used] * more_blocks] for part in (layout.context_start, layout.context_end)
    )
    layout, rows = BlockLayout.build(starts, ends), used + more_rows
    tiles = by_tiles(visible(layout, rows, size, asking))
    mask = attention_module._flex_mask(layout, rows, (asking, size))
    assert torch.equal(mask.to_dense()[0, 0] > 0, tiles.any(-1))
    counts, places = mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0].tolist()
    for row, (count, order) in enumerate(zip(counts, places, strict=True)):
        assert tiles[row, order[:count]].all()
    queries, keys = (torch.arange(length) for length in mask.shape[-2:])
    by_score = mask.mask_mod(queries[:1], queries[:1], queries[:, None], keys)
    assert torch.equal(by_score, visible(layout, rows, size, asking))


def test_the_flex_mask_is_built_without_waiting_for_the_device():
    """Tensors on `meta` have no values that could be read."""
    layout = BlockLayout(*torch.zeros(2, 70, dtype=torch.int64, device="meta"))
    mask = attention_module._flex_mask(layout, 300, (15, 16))
    assert mask.kv_indices.device.type == "meta"
    assert mask.shape == (1, 1, 70 * 15, 300 + 70 * 16)


def test_compiled_flex_attention_meets_new_shapes_without_compiling_again(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend="eager")
    monkeypatch.setattr(attention_module, "_compiled_flex", lambda: compiled)
    graphs = []
    for anchors in ([list(range(40))], [[3, 9, 200], list(range(50))], [[*range(60, 120)], [1], [4, 80]]):
        for asking in (16, 15):
            case = make_case(anchors, 16, 4, 2, asking=asking, width=16)
            out = case.run_flex(compiled=True)
            torch.testing.assert_close(out, case.run(dense_attention).detach(), atol=2e-6, rtol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[0] == graphs[1] == graphs[2]


@pytest.mark.parametrize(("blocks", "width"), [(7, 16), (40, 8)])
def test_a_few_rows_and_small_heads_need_no_kernel(monkeypatch, blocks, width):
    monkeypatch.setattr(attention_module, "_compiled_flex", lambda: pytest.fail("compiled"))
    case = make_case([list(range(blocks))], 16, width=width)
    assert torch.equal(case.run(flex_block_attention), case.run(dense_attention))


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
@pytest.mark.parametrize("end", [0, 1, 17])
def test_a_lone_block_needs_no_mask(end, heads):
    case = make_case([[end]], 4, *heads)
    torch.testing.assert_close(case.run(lone_attention), case.run(dense_attention), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", [dense_attention, grouped_attention, lone_attention])
def test_a_block_without_any_context_sees_itself_and_is_finite(attention):
    case = make_case([[0]])
    out = case.run(attention)
    out.sum().backward()
    assert out.isfinite().all()
    assert case.query.grad.isfinite().all()


@given(LAYOUTS, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_a_query_sees_its_document_before_its_anchor_and_its_own_block(anchors, size):
    case = make_case(anchors, size)
    rows = case.context.key.shape[0]
    mask = visible(case.layout, rows, size)
    starts, ends = case.layout.context_start.tolist(), case.layout.context_end.tolist()
    expected = [
        {*range(start, end), *(rows + block * size + slot for slot in range(size))}
        for block, (start, end) in enumerate(zip(starts, ends, strict=True))
        for _ in range(size)
    ]
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask] == expected


@given(LAYOUTS, st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_tiles_hold_every_block_once_and_come_in_few_shapes(anchors, heads, size):
    layout = make_case(anchors).layout
    tiles = Tiles.of(layout, heads, size, 12)
    blocks = len(layout.context_start)
    assert tiles.order[tiles.places].tolist() == list(range(blocks * heads))
    assert sorted([*tiles.places.tolist(), *tiles.fillers.tolist()]) == list(range(len(tiles.order)))
    for tile in tiles.tiles:
        of_tile = tiles.order[tile.first * heads : tile.last * heads].unflatten(0, (heads, -1))
        assert (of_tile % heads == torch.arange(heads)[:, None]).all()
        inside = of_tile[0] // heads
        assert tile.last - tile.first == len(inside)
        assert len(inside) in TILE_BLOCKS
        assert (layout.context_start[inside] == tile.start).all()
        assert layout.context_end[inside].max() == tile.end
        assert tile.width % TILE_WIDTH == 0
        assert 0 <= tile.width - (tile.end - tile.start) - size < TILE_WIDTH


def test_no_blocks_at_all_pass_through():
    case = make_case([[]])
    assert case.run(grouped_attention).shape == (0, 3, 4, 8)


def test_training_uses_tiles_on_the_cpu_and_flex_attention_on_cuda():
    assert attention_for(torch.device("cpu")) is grouped_attention
    assert attention_for(torch.device("cuda")) is flex_block_attention
