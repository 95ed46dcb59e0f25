"""Attention of blocks on a CPU: tile by tile, so that work grows with what is visible.

A tile is a few neighbouring blocks of one document and the context that the last of them sees; other blocks
are never multiplied. What takes the time besides the products is avoided:

- Few shapes occur. Kernels are compiled for each new one (oneDNN, bfloat16), which costs more than running
  them, so tiles are filled up to one of `TILE_BLOCKS` and to a multiple of `TILE_WIDTH` columns of scores.
- All factors are contiguous: others are copied by each product. So a tile's keys and values are copied once,
  and the scores of its own blocks lie in the last columns of its context's, behind keys and values of zero.

Dimensions as in `dflash.attention`; R = Q * (h / g) rows a block and key/value head, n blocks of a tile, W
its columns of scores, A' blocks of all tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.attention import BlockAttention, BlockLayout, KeyValue, flex_block_attention

TILE_BLOCKS = (1, 2, 4, 8, 16, 24, 32)
"""Blocks of a tile."""
TILE_ROWS = 512
"""Rows of scores of one head at most: enough for the matrix product, and still in the processor's cache."""
TILE_WIDTH = 64
KEPT_BYTES = 128 << 20
"""Attention weights of a layer that are kept for the backward pass; more of them are computed again there."""


def grouped_attention(query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout) -> Tensor:
    """The function that `dflash.attention.dense_attention` computes, and its gradient."""
    return _Grouped.apply(query, *context, *block, layout) if len(query) else query  # type: ignore[no-untyped-call]


class Tile(NamedTuple):
    """Where a tile lies."""

    first: int
    """Its first block, in the order of `Tiles`."""
    last: int
    """One past its last."""
    start: int
    """First context row that its blocks see."""
    end: int
    """One past the last that any of them sees."""
    width: int
    """W."""
    counts: tuple[int, ...]
    """How many context rows each of its n blocks sees: the first ones."""

    def seen(self, rows: Tensor, room: Tensor) -> Tensor:
        """Context rows `[g, T, d]` of this tile, `[g, W, d]`, and zeros behind them, in `room`."""
        shape = (len(rows), self.width, rows.shape[2])
        tile, count = room[: math.prod(shape)].view(shape), self.end - self.start
        tile[:, :count] = rows[:, self.start : self.end]
        tile[:, count:] = 0.0
        return tile

    def of(self, rows: Tensor, heads: int) -> Tensor:
        """This tile's `[g, n*R, x]` of `[A' * g, R, x]`."""
        return rows[heads * self.first : heads * self.last].view(heads, -1, rows.shape[2])


@dataclass(frozen=True)
class Tiles:
    """The tiles of a layout. A block that fills one up repeats another, and what it yields is not used."""

    order: Tensor
    """Pairs of block and head, `block * g + head`, by tile, then head, then block: int64 `[A' * g]`."""
    places: Tensor
    """Where each pair is in that order, int64 `[A * g]`."""
    fillers: Tensor
    """Places of pairs that only fill up, int64."""
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, layout: BlockLayout, heads: int, size: int, rows: int) -> Tiles:
        """Those of a layout for g heads, blocks of B and R rows, derived once for all layers."""
        most = max((blocks for blocks in TILE_BLOCKS if blocks * rows <= TILE_ROWS), default=1)
        key = f"tiles {heads} {size} {most}"
        if key not in layout.memo:
            layout.memo[key] = cls._build(layout, heads, size, most)
        return layout.memo[key]  # type: ignore[no-any-return]

    @classmethod
    def _build(cls, layout: BlockLayout, heads: int, size: int, most: int) -> Tiles:
        starts, ends = layout.context_start.tolist(), layout.context_end.tolist()
        device = layout.context_end.device
        tiles, order, real, at = list[Tile](), list[int](), list[bool](), 0
        for first, last in _runs(starts, most):
            more = next(size for size in TILE_BLOCKS if size >= last - first) - (last - first)
            blocks = [*range(first, last), *[last - 1] * more]
            start, end = starts[first], ends[last - 1]
            width = -(-(end - start + size) // TILE_WIDTH) * TILE_WIDTH
            seen = tuple(ends[block] - start for block in blocks)
            tiles.append(Tile(at, at + len(blocks), start, end, width, seen))
            order += [block * heads + head for head in range(heads) for block in blocks]
            real += ([True] * (last - first) + [False] * more) * heads
            at += len(blocks)
        pairs, counts = torch.tensor(order, device=device), torch.tensor(real, device=device)
        places = torch.empty(len(starts) * heads, dtype=torch.int64, device=device)
        places[pairs[counts]] = counts.nonzero()[:, 0]
        return cls(pairs, places, (~counts).nonzero()[:, 0], tuple(tiles))

    def gather(self, rows: Tensor, heads: int) -> Tensor:
        """Rows of blocks and heads `[A, x, g * k, d]` in the order of the tiles, `[A' * g, x * k, d]`."""
        slots, (block, head) = rows.shape[1], (self.order // heads, self.order % heads)
        slot = torch.arange(slots, device=rows.device)
        places = (block[:, None] * slots + slot) * heads + head[:, None]  # [A' * g, x]
        picked = rows.reshape(len(rows) * slots * heads, -1).index_select(0, places.flatten())
        return picked.view(len(self.order), -1, rows.shape[3])

    def scatter(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The way back, to `[A, x, g * k, d]`."""
        slot = torch.arange(shape[1], device=rows.device)[:, None]
        places = self.places.view(shape[0], 1, -1) * shape[1] + slot  # [A, x, g]
        return rows.view(len(self.order) * shape[1], -1).index_select(0, places.flatten()).view(shape)


class _Grouped(torch.autograd.Function):
    """Attention whose weights are kept for the backward pass if they are few, or computed again there."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *tensors: Any) -> Tensor:
        """`(query, context key, context value, block key, block value, layout) -> [A, Q, h, d]`."""
        *given, layout = tensors
        work = _Work.begin(query, KeyValue(*given[:2]), KeyValue(*given[2:]), layout)
        kept: list[Tensor] | None = [] if any(ctx.needs_input_grad) and work.bytes <= KEPT_BYTES else None
        with torch.autocast(query.device.type, enabled=False):
            own, out = work.own_scores(), torch.empty_like(work.query)
            for tile, weights in work.weights(own, kept):
                values = tile.seen(work.context.value, work.rooms[1])
                torch.bmm(weights, values, out=tile.of(out, work.heads))
                tile.of(own, work.heads).copy_(work.own_of(weights))  # scores become weights
            out += torch.bmm(own, work.block.value)
        ctx.save_for_backward(query, *given, *(kept or []))
        ctx.layout, ctx.kept = layout, kept is not None
        return work.tiles.scatter(out, query.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Gradients of all five tensors."""
        query, *saved = ctx.saved_tensors
        given, kept = saved[:4], saved[4:]
        work = _Work.begin(query, KeyValue(*given[:2]), KeyValue(*given[2:]), ctx.layout)
        heads, tiles = work.heads, work.tiles
        above = tiles.gather(upstream[0].to(query.dtype), heads)
        above[tiles.fillers] = 0.0
        d_own = torch.bmm(above, work.block.value.mT)
        own = torch.empty_like(d_own) if ctx.kept else work.own_scores()  # become weights below
        weighed = zip(tiles.tiles, kept, strict=True) if ctx.kept else work.weights(own)
        d_query = torch.empty_like(work.query)
        d_context = [torch.zeros_like(part, dtype=torch.float32) for part in work.context]
        for tile, weights in weighed:
            keys = tile.seen(work.context.key, work.rooms[0])
            values = tile.seen(work.context.value, work.rooms[1])
            slope = torch.bmm(tile.of(above, heads), values.mT, out=work.like(weights))
            work.own_of(slope).copy_(tile.of(d_own, heads))
            work.add(d_context[1], tile, torch.bmm(weights.mT, tile.of(above, heads), out=values))
            torch._softmax_backward_data(slope, weights, -1, slope.dtype, grad_input=slope)  # noqa: SLF001
            torch.bmm(slope, keys, out=tile.of(d_query, heads))
            work.add(d_context[0], tile, torch.bmm(slope.mT, tile.of(work.query, heads), out=keys))
            tile.of(own, heads).copy_(work.own_of(weights))
            tile.of(d_own, heads).copy_(work.own_of(slope))
        d_query.add_(torch.bmm(d_own, work.block.key)).mul_(work.scale)
        d_block = torch.bmm(d_own.mT, work.query), torch.bmm(own.mT, above)
        return (
            tiles.scatter(d_query, query.shape),
            *(part.to(query.dtype).transpose(0, 1) for part in d_context),
            *(tiles.scatter(part, given[2].shape) for part in d_block),
            None,
        )


@dataclass(frozen=True)
class _Work:
    """What a pass in either direction works on."""

    tiles: Tiles
    query: Tensor
    """`[A' * g, R, d]`, scaled."""
    context: KeyValue
    """`[g, T, d]`, so that what a tile reads lies together."""
    block: KeyValue
    """`[A' * g, B, d]`."""
    rooms: tuple[Tensor, ...]
    """For one tile's keys, values, weights and their slopes."""
    scale: float
    """Of the scores."""

    @classmethod
    def begin(cls, query: Tensor, context: KeyValue, block: KeyValue, layout: BlockLayout) -> _Work:
        """Bring queries, and keys and values of blocks, into the order of the tiles."""
        size, heads, width = block.key.shape[1:]
        per = query.shape[1] * query.shape[2] // heads
        tiles = Tiles.of(layout, heads, size, per)
        scale = float(query.shape[-1] ** -0.5)
        seen = heads * width * max(tile.width for tile in tiles.tiles)
        scores = heads * per * max((tile.last - tile.first) * tile.width for tile in tiles.tiles)
        rooms = tuple(query.new_empty(count) for count in (seen, seen, scores, scores))
        seen_by_all = KeyValue(*(part.transpose(0, 1).contiguous() for part in context))
        own = KeyValue(*(tiles.gather(part, heads) for part in block))
        return cls(tiles, tiles.gather(query, heads).mul_(scale), seen_by_all, own, rooms, scale)

    @property
    def heads(self) -> int:
        """Key/value heads, g."""
        return len(self.context.key)

    @property
    def bytes(self) -> int:
        """Of the weights of all tiles."""
        rows = self.heads * self.query.shape[1] * self.query.element_size()
        return rows * sum((tile.last - tile.first) * tile.width for tile in self.tiles.tiles)

    def like(self, weights: Tensor) -> Tensor:
        """Room for slopes of these weights."""
        return self.rooms[3][: weights.numel()].view_as(weights)

    def own_of(self, scores: Tensor) -> Tensor:
        """The last B columns of a tile's `[g, n*R, W]`."""
        return scores[..., -self.block.key.shape[1] :]

    def own_scores(self) -> Tensor:
        """Scaled scores of each block's rows with its own keys, `[A' * g, R, B]`."""
        return torch.bmm(self.query, self.block.key.mT)

    def weights(self, own: Tensor, kept: list[Tensor] | None = None) -> Iterator[tuple[Tile, Tensor]]:
        """Attention weights `[g, n*R, W]` of each tile.

        Args:
            own: As `own_scores` gives them.
            kept: They are put here; otherwise all are in the same memory, and gone when the next ones come.
        """
        for tile in self.tiles.tiles:
            keys, queries = tile.seen(self.context.key, self.rooms[0]), tile.of(self.query, self.heads)
            shape = (self.heads, queries.shape[1], tile.width)
            # apart, since memory of this size is used again in the next step, but not a large piece
            scores = self.rooms[2][: math.prod(shape)].view(shape) if kept is None else own.new_empty(shape)
            torch.bmm(queries, keys.mT, out=scores)
            for count, rows in zip(tile.counts, torch.split(scores, own.shape[1], dim=1), strict=True):
                rows[..., count : -own.shape[2]] = -math.inf
            self.own_of(scores).copy_(tile.of(own, self.heads))
            torch.softmax(scores, dim=-1, out=scores)
            if kept is not None:
                kept.append(scores)
            yield tile, scores

    def add(self, total: Tensor, tile: Tile, gradient: Tensor) -> None:
        """Add a tile's `[g, W, d]` to the context's float32 `[g, T, d]`."""
        total[:, tile.start : tile.end] += gradient[:, : tile.end - tile.start]


def _runs(starts: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Blocks of one document in even runs of at most so many: the first of each, and one past its last."""
    begin = 0
    while begin < len(starts):
        end = begin
        while end < len(starts) and starts[end] == starts[begin]:
            end += 1
        parts = -(-(end - begin) // most)
        for part in range(parts):
            yield (
                begin + part * (end - begin) // parts,
                begin + (part + 1) * (end - begin) // parts,
            )
        begin = end


def attention_for(device: torch.device) -> BlockAttention:
    """The implementation that trains fastest on this kind of device."""
    return flex_block_attention if device.type == "cuda" else grouped_attention
