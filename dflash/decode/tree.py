"""Trees of drafts: alternatives beside the likeliest token, verified in one pass of the target.

A drafter's pass gives a distribution for each slot. A path through the slots is as likely as the product of
its tokens, so the likeliest paths are found best first: behind each node taken, its first child and its next
sibling come into question. The target runs over all nodes at once, each seeing the context and its own
ancestors; then the path of the target's own tokens is walked as far as the tree has it. Each token of the
output is the target's own, whatever the tree holds.

Dimensions: S slots, V vocabulary rows, n nodes, T tokens of context.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.errors import ConfigError


@dataclass(frozen=True)
class DraftTree:
    """Nodes in the order in which they were taken: a parent comes before its children."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Number of each node's parent; -1 for children of the anchor."""
    depths: tuple[int, ...]
    """1 for children of the anchor."""

    def children(self) -> dict[tuple[int, int], int]:
        """Node by its parent and token."""
        return {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True))}


def best_first(logits: Tensor, budget: int) -> DraftTree:
    """The `budget` likeliest paths, or fewer where there are no more.

    Args:
        logits: The drafter's, `[S, V]`.
        budget: Most nodes.
    """
    slots, vocabulary = logits.shape
    if slots == 0:
        return DraftTree((), (), ())
    top = torch.log_softmax(logits.float(), dim=-1).topk(min(budget, vocabulary), dim=-1)
    scores, ids = top.values.tolist(), top.indices.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    # (minus the path's log-probability, tie-break, parent, depth, rank among the slot's tokens)
    waiting = [(-scores[0][0], 0, -1, 1, 0)]
    while waiting and len(tokens) < budget:
        cost, _, parent, depth, rank = heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        if rank + 1 < len(scores[depth - 1]):
            sibling = cost + scores[depth - 1][rank] - scores[depth - 1][rank + 1]
            heapq.heappush(waiting, (sibling, 2 * node + 1, parent, depth, rank + 1))
        if depth < slots:
            heapq.heappush(waiting, (cost - scores[depth][0], 2 * node + 2, node, depth + 1, 0))
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths))


def tree_positions(tree: DraftTree, context: int, device: torch.device) -> Tensor:
    """Absolute positions `[1 + n]` of the anchor and the nodes."""
    return torch.tensor([0, *tree.depths], device=device) + context


def tree_mask(tree: DraftTree, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What anchor and nodes see, `[1, 1, 1 + n, T + 1 + n]`: 0 where visible, else the lowest number."""
    count = 1 + len(tree.tokens)
    sees = torch.eye(count, dtype=torch.bool)
    sees[:, 0] = True
    for node, parent in enumerate(tree.parents, start=1):
        sees[node] |= sees[parent + 1]
    mask = torch.zeros(count, context + count, dtype=dtype)
    mask[:, context:].masked_fill_(~sees, torch.finfo(dtype).min)
    return mask[None, None].to(device)


def follow(tree: DraftTree, chosen: list[int]) -> tuple[list[int], int]:
    """Walk from the anchor along the target's own tokens.

    Args:
        tree: The tree.
        chosen: The target's token behind the anchor and behind each node, `[1 + n]`.

    Returns:
        The nodes on the way, and the token behind the last of them, which the tree does not have.
    """
    children, path, node = tree.children(), [], -1
    while (node, chosen[node + 1]) in children:
        node = children[node, chosen[node + 1]]
        path.append(node)
    return path, chosen[node + 1]


def check_tree_target(model: Any, cache: Any) -> None:
    """Refuse targets on which a tree cannot be verified.

    Raises:
        ConfigError: names what stands in the way.
    """
    attention = model.config._attn_implementation  # noqa: SLF001 - Transformers has no public name for it
    if attention not in ("sdpa", "eager"):
        raise ConfigError(f"--draft tree needs sdpa or eager attention, not {attention}; use --draft block")
    kinds = {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer"}
    if kinds:
        raise ConfigError(
            f"--draft tree needs full attention in all layers; this target has {', '.join(sorted(kinds))}; "
            "use --draft block"
        )


def keep_rows(cache: Any, context: int, rows: list[int]) -> None:
    """Of what lies behind the first `context` positions of a cache, keep these rows, in this order."""
    for layer in cache.layers:
        index = torch.tensor([*range(context), *(context + row for row in rows)], device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(-2, index), layer.values.index_select(-2, index)
