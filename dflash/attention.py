"""How the blocks of a packed micro-batch look at their context and at themselves.

A micro-batch holds the context of several documents one after another. Block i starts at an anchor inside one
document; it sees the context rows `[context_start[i], context_end[i])` (its document, strictly before its
anchor) and all B slots of its own, and nothing else.

Dimensions: T context rows, A blocks, B slots a block, Q of them that ask (all, or all but the
first ones), h query heads, g key/value heads, d head size.

Implementations of the same function:
- `dense_attention`: one masked attention over everything; the oracle of the tests.
- `dflash.grouped.grouped_attention`: tile by tile. For CPUs, where flex_attention has no backward.
- `flex_block_attention`: compiled flex_attention with a block mask. For CUDA.
- `lone_attention`: one block that sees everything. For decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 128
"""Rows and columns of scores that flex_attention takes or leaves together."""
COMPILATIONS = 64
"""Most of one function; training needs few: with and without gradients, for all slots and for most."""
FLEX_HEAD = 16
"""Smallest head that its kernels take."""


@dataclass(frozen=True)
class BlockLayout:
    """Which context rows each block sees."""

    context_start: Tensor
    """int64 `[A]`."""
    context_end: Tensor
    """int64 `[A]`; the packed row of the anchor."""
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What an implementation derives from the layout once and uses in every layer; a copy has none yet."""

    @classmethod
    def build(
        cls, starts: Sequence[int], ends: Sequence[int], device: torch.device | None = None
    ) -> BlockLayout:
        """Layout of blocks given in order of document, then anchor.

        Args:
            starts: First context row of each block's document, non-decreasing.
            ends: Packed row of each block's anchor, non-decreasing.
            device: Where the tensors live.
        """
        return cls(
            torch.tensor(starts, dtype=torch.int64, device=device),
            torch.tensor(ends, dtype=torch.int64, device=device),
        )


class KeyValue(NamedTuple):
    """Keys and values of one layer."""

    key: Tensor
    value: Tensor


BlockAttention = Callable[[Tensor, KeyValue, KeyValue, BlockLayout], Tensor]
"""`(query [A, Q, h, d], context [T, g, d], block [A, B, g, d], layout) -> [A, Q, h, d]`."""


def visible(layout: BlockLayout, context_rows: int, block_size: int, queries: int | None = None) -> Tensor:
    """Bool `[A*Q, T + A*B]`: what each query row sees of `[context | all blocks]`; Q is B unless told."""
    blocks = layout.context_start.shape[0]
    device = layout.context_start.device
    row = torch.arange(context_rows, device=device)
    context = (row >= layout.context_start[:, None]) & (row < layout.context_end[:, None])
    own = torch.eye(blocks, dtype=torch.bool, device=device)
    # per block [A, T + A*B], then repeated for its query rows
    per_block = torch.cat([context, own.repeat_interleave(block_size, dim=1)], dim=1)
    return per_block.repeat_interleave(queries or block_size, dim=0)


def _joined(context: KeyValue, block: KeyValue) -> KeyValue:
    # [T, g, d] and [A, B, g, d] -> [T + A*B, g, d]
    return KeyValue(
        torch.cat([context.key, block.key.flatten(0, 1)]),
        torch.cat([context.value, block.value.flatten(0, 1)]),
    )


def _sdpa(query: Tensor, keys: KeyValue, mask: Tensor | None) -> Tensor:
    """Attention of rows `[R, h, d]` over keys and values `[S, g, d]` under bool `[R, S]`: `[R, h, d]`."""
    repeat = query.shape[1] // keys.key.shape[1]
    # heads first: [1, h, R, d]; each key/value head serves `repeat` query heads
    key = keys.key.transpose(0, 1).repeat_interleave(repeat, dim=0)
    value = keys.value.transpose(0, 1).repeat_interleave(repeat, dim=0)
    out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], key[None], value[None], attn_mask=mask)
    return out[0].transpose(0, 1)


def dense_attention(query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout) -> Tensor:
    """One masked attention over all context and all blocks: simple, exact, quadratic."""
    mask = visible(layout, context.key.shape[0], block.key.shape[1], query.shape[1])
    return _sdpa(query.flatten(0, 1), _joined(context, block), mask).view_as(query)


def lone_attention(query: Tensor, context: KeyValue, block: KeyValue, _layout: BlockLayout) -> Tensor:
    """One block behind its whole context, as in decoding: everything is visible, so there is no mask."""
    keys = _joined(context, block)
    q, k, v = (x.transpose(0, 1)[None] for x in (query[0], *keys))  # [1, heads, rows, d]
    gqa = query.shape[2] != keys.key.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)[0].transpose(0, 1)[None]


def allow_compilations() -> None:
    """Let torch compile flex_attention for as many kinds of shapes and masks as there are.

    It allows 8 of one function, to which Transformers' masks for layers with and without a window come, and
    goes on without the compiler then, with all scores in memory.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    allow_compilations()
    # whole or not at all: an error is better than attention without the compiler
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def flex_block_attention(
    query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout, *, compiled: bool = True
) -> Tensor:
    """The same with flex_attention, whose block mask skips tiles that nothing sees.

    The mask depends on the layout alone, so it is built once a micro-batch and serves every layer. Compiled,
    fewer rows than a tile, or heads for which there are no kernels, are attended to densely.
    """
    from torch.nn.attention import flex_attention as flex

    blocks, asking = query.shape[:2]
    if compiled and (blocks * asking < TILE or query.shape[-1] < FLEX_HEAD):
        return dense_attention(query, context, block, layout)
    attend = _compiled_flex() if compiled else flex.flex_attention
    mask = _flex_mask(layout, context.key.shape[0], (asking, block.key.shape[1]))
    joined = _joined(context, block)
    # [A*Q, h, d] -> [1, h, A*Q, d]
    heads_first = [x.transpose(0, 1)[None] for x in (query.flatten(0, 1), *joined)]
    out = attend(*heads_first, block_mask=mask, enable_gqa=query.shape[2] != joined.key.shape[1])
    return out[0].transpose(0, 1).reshape(blocks, asking, *query.shape[2:])  # type: ignore[no-any-return]


def _flex_mask(layout: BlockLayout, rows: int, slots: tuple[int, int]) -> Any:
    """The block mask for `(Q, B)` slots a block: one for all layers but the last, one for the last.

    torch's `create_block_mask` looks at every score, A*Q by T + A*B of them, and holds them all where it is
    not compiled. What blocks see is a stretch of rows, so whole tiles of it are found from its ends.
    """
    from torch.nn.attention.flex_attention import BlockMask

    asking, size = slots
    key = f"flex {asking}"
    if key not in layout.memo:
        blocks = len(layout.context_start)
        seen, whole = _tiles(layout, rows, slots)
        layout.memo[key] = BlockMask.from_kv_blocks(
            *_in_order(seen & ~whole),
            *_in_order(whole),
            BLOCK_SIZE=TILE,
            mask_mod=_sees(layout, rows, slots),
            seq_lengths=(blocks * asking, rows + blocks * size),
        )
    return layout.memo[key]


def _sees(layout: BlockLayout, rows: int, slots: tuple[int, int]) -> Callable[..., Tensor]:
    """Whether a query sees a key. It knows tensors alone: numbers would be compiled into it."""
    asking, size = slots
    start, end = (_each(part.int(), asking) for part in (layout.context_start, layout.context_end))
    blocks = torch.arange(len(layout.context_start), dtype=torch.int32, device=start.device)
    of_query = _each(blocks, asking)
    of_key = torch.cat([blocks.new_full((rows,), -1), _each(blocks, size)])  # -1: context, of no block

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv >= start[q]) & (kv < end[q])) | (of_key[kv] == of_query[q])

    return sees


def _each(x: Tensor, times: int) -> Tensor:
    """`[n]`, each so many times in a row."""
    return x[:, None].expand(-1, times).flatten()


def _tiles(layout: BlockLayout, rows: int, slots: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Tiles in which some query sees some key, and those in which all see all, bool `[tiles, tiles]`.

    Nothing here waits for the device.
    """
    asking, size = slots
    start, end = layout.context_start[:, None], layout.context_end[:, None]
    blocks = len(start)
    queries, keys = blocks * asking, rows + blocks * size
    own = rows + size * torch.arange(blocks, device=start.device)[:, None]
    left = torch.arange(0, keys, TILE, device=start.device)
    # what each block sees: two stretches of columns, by tiles of keys [A, tiles]
    stretches = ((start, end), (own, own + size))
    touched = [(first < left + TILE) & (last > left) & (first < last) for first, last in stretches]
    covered = [(first <= left) & (last >= left + TILE) for first, last in stretches]
    # tiles of queries hold the rows of blocks first .. last - 1
    top = torch.arange(0, queries, TILE, device=start.device)
    first, last = top // asking, (top + TILE - 1).clamp_max(queries - 1) // asking + 1

    def count(by_block: list[Tensor]) -> Tensor:
        sums = F.pad((by_block[0] | by_block[1]).cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
        return sums[last] - sums[first]

    complete = top + TILE <= queries
    return count(touched) > 0, (count(covered) == (last - first)[:, None]) & complete[:, None]


def _in_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row of tiles are marked, int32 `[1, 1, n]`, and their places, others behind them."""
    places = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32)[None, None], places.int()[None, None]
