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


@lru_cache(maxsize=1)
def _compiled_flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def flex_block_attention(
    query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout, *, compiled: bool = True
) -> Tensor:
    """The same with flex_attention, whose block mask skips tiles that nothing sees.

    The mask depends on the layout alone, so it is built once a micro-batch and serves every layer.
    """
    from torch.nn.attention import flex_attention as flex

    blocks, asking = query.shape[:2]
    attend, make_mask = _compiled_flex() if compiled else (flex.flex_attention, flex.create_block_mask)
    mask = _flex_mask(layout, context.key.shape[0], (asking, block.key.shape[1]), make_mask)
    joined = _joined(context, block)
    # [A*Q, h, d] -> [1, h, A*Q, d]
    heads_first = [x.transpose(0, 1)[None] for x in (query.flatten(0, 1), *joined)]
    out = attend(*heads_first, block_mask=mask, enable_gqa=query.shape[2] != joined.key.shape[1])
    return out[0].transpose(0, 1).reshape(blocks, asking, *query.shape[2:])  # type: ignore[no-any-return]


def _flex_mask(layout: BlockLayout, rows: int, slots: tuple[int, int], make_mask: Any) -> Any:
    """The block mask for `(Q, B)` slots a block: one for all layers but the last, one for the last."""
    asking, size = slots
    key = f"flex {asking}"
    if key in layout.memo:
        return layout.memo[key]
    start, end = layout.context_start, layout.context_end
    blocks = start.shape[0]

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = q // asking
        in_context = (kv < rows) & (kv >= start[own]) & (kv < end[own])
        in_block = (kv >= rows) & ((kv - rows) // size == own)
        return in_context | in_block

    layout.memo[key] = make_mask(sees, None, None, blocks * asking, rows + blocks * size, device=start.device)
    return layout.memo[key]
