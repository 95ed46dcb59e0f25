"""What a forward pass keeps for the backward pass on a GPU, counted without one.

The drafter's layers run on tensors that have shapes and no values, by the operations that CUDA gets;
attention keeps what flex_attention keeps. Counted is every tensor that autograd saves, once for each memory,
without the parameters. The `lm_head`'s logits come on top, up to 1.5 GiB, and what a layer needs in
passing.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash import drafter as network
from dflash import rowwise
from dflash.attention import BlockLayout, KeyValue
from dflash.drafter import Drafter, DrafterConfig
from dflash.train.parallel import recompute_layers

QWEN3_8B = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
)


class Attention(torch.autograd.Function):
    """Keeps its inputs, its output, and a number a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *keys: Tensor) -> Tensor:
        """`[A, Q, h, d]`."""
        out, joined = (
            torch.empty_like(query),
            [torch.cat([keys[i], keys[i + 2].flatten(0, 1)]) for i in (0, 1)],
        )
        ctx.save_for_backward(query, *joined, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Is not run."""
        raise NotImplementedError


def attend(query: Tensor, context: KeyValue, block: KeyValue, _layout: BlockLayout) -> Tensor:
    """In the place of flex_attention."""
    return Attention.apply(query, *context, *block)  # type: ignore[no-any-return,no-untyped-call]


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """As off the CPU."""
    cos, sin = (part.to(x.dtype) for part in cos_sin)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def number(tensor: Tensor) -> int:
    """Tells a tensor's memory from others; there is no address."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def kept(tokens: int, blocks: int, *, recompute: bool) -> int:
    """Bytes that the forward pass of a micro-batch keeps."""
    with FakeTensorMode():
        drafter = Drafter(QWEN3_8B)
        recompute_layers(drafter, wanted=recompute)
        memories = {number(p): 0 for p in drafter.parameters()}

        def count(tensor: Tensor) -> Tensor:
            memories.setdefault(number(tensor), tensor.untyped_storage().nbytes())
            held.append(tensor)  # or its memory's number would be given out again
            return tensor

        held: list[Tensor] = []
        states = torch.empty(blocks, QWEN3_8B.block_size, QWEN3_8B.hidden_size)
        positions = torch.zeros(states.shape[:2], dtype=torch.int64)
        features = torch.empty(tokens, 5 * QWEN3_8B.hidden_size, dtype=torch.bfloat16)
        ends = torch.zeros(blocks, dtype=torch.int64)
        rows = torch.zeros(tokens, dtype=torch.int64)
        saving = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with saving, torch.autocast("cpu", torch.bfloat16):
            drafter(states, positions, features, rows, BlockLayout(ends, ends), first_slot=1)
    return sum(memories.values())


def main() -> None:
    """Print what is kept, with and without layers that are computed again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="Context rows of a micro-batch.")
    parser.add_argument(
        "--blocks", type=int, default=4096, help="Blocks: tokens that are supervised x density."
    )
    given = parser.parse_args()
    rowwise.by_hand = network.by_hand = lambda _x: False
    network.rotate = rotate
    network.attention_for = lambda _device: attend
    for recompute in (False, True):
        size = kept(given.tokens, given.blocks, recompute=recompute) / 2**30
        flag = " with --activation-checkpointing" if recompute else ""
        print(f"{given.tokens:,} tokens, {given.blocks:,} blocks: {size:.1f} GiB{flag}")


if __name__ == "__main__":
    main()
