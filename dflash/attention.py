"""How the blocks of a packed micro-batch look at their context and at themselves.

A micro-batch holds the context of several documents one after another. Block i starts at an anchor inside one
document; it sees the context rows `[context_start[i], context_end[i])` (its document, strictly before its
anchor) and all B slots of its own, and nothing else.

Dimensions: T context rows, A blocks, B slots a block, Q of them that ask (all, or all but the
first ones), h query heads, g key/value heads, d head size.

Implementations of the same function:
- `dense_attention`: one masked attention over everything; the oracle of the tests.
- `grouped_attention`: blocks of one document in groups, each reading only the context that its last block
  sees. For CPUs, where flex_attention has no backward.
- `flex_block_attention`: compiled flex_attention with a block mask. For CUDA.
- `lone_attention`: one block that sees everything. For decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP_BLOCKS = 16
"""Blocks that `grouped_attention` takes at once: enough rows for the matrix product, little masked work."""


class Group(NamedTuple):
    """Neighbouring blocks of one document, in order of their anchors."""

    first: int
    """First block."""
    last: int
    """One past the last block."""
    start: int
    """First context row of the document."""
    end: int
    """One past the last context row that any of these blocks sees."""


@dataclass(frozen=True)
class BlockLayout:
    """Which context rows each block sees."""

    context_start: Tensor
    """int64 `[A]`."""
    context_end: Tensor
    """int64 `[A]`; the packed row of the anchor."""
    groups: tuple[Group, ...]
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What an implementation derives from the layout once and uses in every layer."""

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
            tuple(_groups(starts, ends)),
        )


def _groups(starts: Sequence[int], ends: Sequence[int]) -> list[Group]:
    groups: list[Group] = []
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        previous = groups[-1] if groups else None
        if previous and previous.start == start and previous.last - previous.first < GROUP_BLOCKS:
            groups[-1] = Group(previous.first, block + 1, start, end)
        else:
            groups.append(Group(block, block + 1, start, end))
    return groups


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


def grouped_attention(query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout) -> Tensor:
    """The same, group by group; work grows with what is visible, not with the micro-batch."""
    return _Grouped.apply(query, *context, *block, layout) if layout.groups else query  # type: ignore[no-untyped-call]


class _Heads(NamedTuple):
    """Tensors with key/value heads first: a group is a strided slice, and each step one batched product.

    R = Q * (h / g) rows a block: the query slots of all heads that share a key/value head.
    """

    query: Tensor
    """`[g, A, R, d]`."""
    context: KeyValue
    """`[g, T, d]`."""
    block: KeyValue
    """`[g, A, B, d]`."""

    def rows(self, tensor: Tensor, group: Group) -> Tensor:
        """`[g, A, R, x]` to the group's `[g, n*R, x]`, without a copy."""
        return tensor[:, group.first : group.last].flatten(1, 2)

    def own(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Products of each block's rows `[g, A, R, x]` with its own `[g, A, x, y]`: `[g, A, R, y]`."""
        return torch.unflatten(torch.bmm(rows.flatten(0, 1), keys.flatten(0, 1)), 0, rows.shape[:2])

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.query.shape[-1] ** -0.5)


class _Grouped(torch.autograd.Function):
    """Scores of a row are `[its group's context | its own block]`; other blocks are never multiplied.

    The weights of one group exist at a time, in one reused buffer; the backward pass computes them again.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, *tensors: Any) -> Tensor:
        """`(query, context key, context value, block key, block value, layout) -> [A, Q, h, d]`."""
        *kv, layout = tensors
        with torch.autocast(query.device.type, enabled=False):
            heads = _heads_first(query, KeyValue(*kv[:2]), KeyValue(*kv[2:]))
            own = heads.own(heads.query, heads.block.key.mT).mul_(heads.scale)
            out = torch.empty_like(heads.query)
            for group, weights in _group_weights(heads, own, layout):
                seen = heads.context.value[:, group.start : group.end]
                torch.bmm(weights[..., : seen.shape[1]], seen, out=heads.rows(out, group))
                heads.rows(own, group).copy_(weights[..., seen.shape[1] :])  # scores become weights
            out += heads.own(own, heads.block.value)
        ctx.save_for_backward(heads.query, *heads.context, *heads.block)
        ctx.layout, ctx.shape = layout, query.shape
        return _slots_first(out, query.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Gradients of all five tensors."""
        query, *kv = ctx.saved_tensors
        heads = _Heads(query, KeyValue(*kv[:2]), KeyValue(*kv[2:]))
        given = _rows_first(upstream[0].to(query.dtype), query.shape[0])
        d_query, d_context = torch.empty_like(query), _Summed.like(heads.context)
        own = heads.own(query, heads.block.key.mT).mul_(heads.scale)
        d_own = heads.own(given, heads.block.value.mT)
        spare: Tensor | None = None
        for group, weights in _group_weights(heads, own, ctx.layout):
            width = group.end - group.start
            seen = [tensor[:, group.start : group.end] for tensor in heads.context]
            rows, above = heads.rows(query, group), heads.rows(given, group)
            spare = torch.empty_like(weights) if spare is None or spare.numel() < weights.numel() else spare
            slope = spare.view(-1)[: weights.numel()].view_as(weights)
            torch.bmm(above, seen[1].mT, out=slope[..., :width])
            slope[..., width:] = heads.rows(d_own, group)
            d_context.value[..., group.start : group.end] += above.mT @ weights[..., :width]
            slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype).mul_(heads.scale)  # noqa: SLF001
            torch.bmm(slope[..., :width], seen[0], out=heads.rows(d_query, group))
            d_context.key[..., group.start : group.end] += rows.mT @ slope[..., :width]
            heads.rows(own, group).copy_(weights[..., width:])
            heads.rows(d_own, group).copy_(slope[..., width:])
        d_query += heads.own(d_own, heads.block.key)
        d_block = heads.own(d_own.mT, query), heads.own(own.mT, given)
        return (
            _slots_first(d_query, ctx.shape),
            *d_context.tokens_first(query.dtype),
            *(x.permute(1, 2, 0, 3) for x in d_block),
            None,
        )


class _Summed(NamedTuple):
    """Gradients of the context's keys and values, summed over groups in float32, `[g, d, T]`."""

    key: Tensor
    value: Tensor

    @classmethod
    def like(cls, context: KeyValue) -> _Summed:
        g, rows, size = context.key.shape
        return cls(*(context.key.new_zeros(g, size, rows, dtype=torch.float32) for _ in range(2)))

    def tokens_first(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """`[T, g, d]`."""
        return tuple(tensor.to(dtype).permute(2, 0, 1) for tensor in self)


def _rows_first(x: Tensor, kv_heads: int) -> Tensor:
    # [A, Q, h, d] -> [g, A, Q * h/g, d]
    return torch.unflatten(x, 2, (kv_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous()


def _slots_first(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    # [g, A, Q * h/g, d] -> [A, Q, h, d]
    return torch.unflatten(x, 2, (shape[1], -1)).permute(1, 2, 0, 3, 4).reshape(shape)


def _heads_first(query: Tensor, context: KeyValue, block: KeyValue) -> _Heads:
    return _Heads(
        _rows_first(query, context.key.shape[1]),
        KeyValue(*(x.transpose(0, 1).contiguous() for x in context)),
        KeyValue(*(x.permute(2, 0, 1, 3).contiguous() for x in block)),
    )


def _group_weights(heads: _Heads, own: Tensor, layout: BlockLayout) -> Iterator[tuple[Group, Tensor]]:
    """Attention weights `[g, n*R, C + B]` of each group over `[its context | own block]`.

    All are views of one buffer, so each is gone when the next one comes.

    Args:
        heads: Queries and keys.
        own: Scaled scores within the blocks, `[g, A, R, B]`.
        layout: What each block sees.
    """
    kv_heads, _, rows, size = own.shape
    largest = max((last - first) * (end - start + size) for first, last, start, end in layout.groups)
    buffer = own.new_empty(kv_heads * rows * largest)
    nothing = own.new_zeros(())
    for group, hidden in zip(layout.groups, _hidden(layout), strict=True):
        blocks, width = group.last - group.first, group.end - group.start
        shape = (kv_heads, blocks * rows, width + size)
        scores = buffer[: math.prod(shape)].view(shape)
        keys, queries = heads.context.key[:, group.start : group.end], heads.rows(heads.query, group)
        context = scores[..., :width]
        torch.baddbmm(nothing, queries, keys.mT, beta=0, alpha=heads.scale, out=context)
        scores[..., width:] = heads.rows(own, group)
        tail = torch.unflatten(context[..., width - hidden.shape[1] :], 1, (blocks, rows))
        tail.masked_fill_(hidden[None, :, None, :], -math.inf)
        yield group, torch.softmax(scores, dim=-1, out=scores)


def _hidden(layout: BlockLayout) -> list[Tensor]:
    """Which of each group's last context rows its blocks do not see, bool `[n, rows]`.

    All see the rows before its first anchor. Every layer uses the same.
    """
    if "hidden" not in layout.memo:
        ends = layout.context_end
        layout.memo["hidden"] = [
            torch.arange(int(ends[first]), end, device=ends.device) >= ends[first:last, None]
            for first, last, _, end in layout.groups
        ]
    return layout.memo["hidden"]  # type: ignore[no-any-return]


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


def attention_for(device: torch.device) -> BlockAttention:
    """The implementation that trains fastest on this kind of device."""
    return flex_block_attention if device.type == "cuda" else grouped_attention
