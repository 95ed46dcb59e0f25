"""The drafter: a small block-diffusion network drafting B-1 tokens at once from the target's hidden states.

One forward pass, following DFlash (arXiv 2602.06036) and the layout that z-lab, vLLM and SGLang serve:

1. `context = hidden_norm(fc(features))`: the K tapped hidden states of each context token, fused once.
2. A block is `[anchor, MASK x (B-1)]`, embedded by the target's frozen embedding.
3. In each layer the block's tokens query `[context | block]`; keys and values of both come from the same
   projections. The context gets no query, no residual and no MLP.
4. `norm`, then the target's frozen `lm_head` (not part of this module). Slot k predicts the token AT position
   anchor + k; slot 0 is the anchor itself.

Dimensions: T context rows, A blocks, B slots a block, K taps, H hidden size, h/g query and key/value heads,
d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash.attention import BlockAttention, BlockLayout, KeyValue
from dflash.errors import ConfigError
from dflash.grouped import attention_for
from dflash.rowwise import by_hand, factor_dtype, gated, rms_norm, rotate
from dflash.taps import check_taps


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that defines a drafter's network and how it is served."""

    hidden_size: int
    """H; equal to the target's."""
    intermediate_size: int
    """Width of the MLP."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's embedding."""
    block_size: int
    """B, the anchor included."""
    mask_token_id: int
    """An unused row of the target's embedding."""
    target_layer_ids: tuple[int, ...]
    """0-based target layers whose outputs are read."""
    num_target_layers: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    input_embedding_scale: float = 1.0
    """The target's embedding scale, for clients that read the raw table."""
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        """Check what cannot work.

        Raises:
            ConfigError: a value is out of its range; the message names it.
        """
        if self.block_size < 2:
            raise ConfigError(
                f"block size {self.block_size} drafts nothing; it includes the anchor, so use 2 or more"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} key/value heads"
            )
        check_taps(self.target_layer_ids, self.num_target_layers)
        check_mask_token(self.mask_token_id, self.vocab_size, self._special_ids())

    def _special_ids(self) -> dict[str, tuple[int, ...]]:
        eos = self.eos_token_id
        return {
            "end-of-sequence": () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            "padding": () if self.pad_token_id is None else (self.pad_token_id,),
        }


def check_mask_token(mask: int, rows: int, special: dict[str, tuple[int, ...]]) -> None:
    """Refuse a mask token that has no embedding row or that means something else.

    Raises:
        ConfigError: names the id and the range or the role it collides with.
    """
    if not 0 <= mask < rows:
        raise ConfigError(f"mask token id {mask} is outside the target's embedding rows 0..{rows - 1}")
    for role, ids in special.items():
        if mask in ids:
            raise ConfigError(
                f"mask token id {mask} is the target's {role} token; choose an unused id (--mask-token-id)"
            )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Any shape with `size` as its last axis, in that dtype; the dtype of `x` is kept when None."""
        return rms_norm(x, self.weight.float(), self.eps, dtype)


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., 1, d]` for absolute positions `[...]` (half-split RoPE, float32)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * theta**-exponent
    angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # one head axis to broadcast over
    return angles.cos(), angles.sin()


def joined(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of linear layers on the same rows; in training, where rows are many, by one matrix product."""
    if not torch.is_grad_enabled():
        return tuple(layer(x) for layer in layers)
    return torch.split(side_by_side(x, *layers), [layer.out_features for layer in layers], dim=-1)


def side_by_side(x: Tensor, *layers: nn.Linear) -> Tensor:
    """The same outputs in one tensor, one behind the other on the last axis."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)


def in_blocks(distinct: Tensor, slots: int) -> Tensor:
    """Blocks `[A, B, ...]` of B slots from what is different in them.

    Args:
        distinct: Rows of the A anchors, and behind them the row that all other slots have, `[A + 1, ...]`.
        slots: B.
    """
    # [...] -> [A, B - 1, ...], without memory of its own
    others = distinct[-1].expand(len(distinct) - 1, slots - 1, *distinct.shape[1:])
    return torch.cat([distinct[:-1, None], others], dim=1)


class Attention(nn.Module):
    """Attention of block tokens over context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        # [..., heads * d] -> [..., heads, d]; there may be no rows at all
        return torch.unflatten(x, -1, (x.shape[-1] // self.head_dim, self.head_dim))

    def key_value(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> KeyValue:
        """Rotated keys and values `[T, g, d]` of context rows `[T, H]`."""
        key, value = joined(x, self.k_proj, self.v_proj)
        return KeyValue(rotate(self.k_norm(self._heads(key)), cos_sin), self._heads(value))

    def query_key_value(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], first_slot: int
    ) -> tuple[Tensor, KeyValue]:
        """Queries `[A, B - first_slot, h, d]`, keys and values `[A, B, g, d]` of blocks.

        The blocks are whole, `[A, B, H]`, or distinct rows as in `in_blocks`, `[A + 1, H]`: what is equal
        stays so until it is rotated.
        """
        query, key, value = (self._heads(part) for part in joined(x, self.q_proj, self.k_proj, self.v_proj))
        query, key = self.q_norm(query if x.ndim == 2 else query[:, first_slot:]), self.k_norm(key)
        if x.ndim == 2:
            slots = cos_sin[0].shape[1]
            query = in_blocks(query, slots)[:, first_slot:]
            key, value = in_blocks(key, slots), in_blocks(value, slots)
        cos, sin = (part[:, first_slot:] for part in cos_sin)
        return rotate(query, (cos, sin)), KeyValue(rotate(key, cos_sin), value)


class MLP(nn.Module):
    """Gated MLP (SwiGLU)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H] -> [..., H]`."""
        if by_hand(x):
            return self.down_proj(gated(side_by_side(x, self.gate_proj, self.up_proj)))  # type: ignore[no-any-return]
        gate, up = joined(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class DrafterLayer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.recompute = False
        """Whether training keeps the layer's inputs alone, and computes the rest again to learn from it."""

    def forward(self, *inputs: Any) -> Tensor:
        """As `compute`."""
        if self.recompute and torch.is_grad_enabled():
            # nothing in a layer is random
            return checkpoint(self.compute, *inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self.compute(*inputs)

    def compute(
        self,
        x: Tensor,
        context: KeyValue,
        cos_sin: tuple[Tensor, Tensor],
        layout: BlockLayout,
        attention: BlockAttention,
        first_slot: int = 0,
    ) -> Tensor:
        """Block states `[A, B, H]` to those of the slots from `first_slot` on, `[A, B - first_slot, H]`.

        They may be given as distinct rows, as in `in_blocks`.
        """
        dtype = factor_dtype(x)  # only products read what the norms give
        query, own = self.self_attn.query_key_value(self.input_layernorm(x, dtype), cos_sin, first_slot)
        x = in_blocks(x, cos_sin[0].shape[1]) if x.ndim == 2 else x
        x = x[:, first_slot:] + self.self_attn.o_proj(attention(query, context, own, layout).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x, dtype))  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """The network; its parameter names are those of the published checkpoints."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE factors of absolute positions of any shape."""
        return rotary(positions, self.config.head_dim, self.config.rope_theta)

    def fuse(self, features: Tensor) -> Tensor:
        """Context `[..., H]` of tapped hidden states `[..., K*H]`."""
        return self.hidden_norm(self.fc(features))  # type: ignore[no-any-return]

    def context_key_values(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of the context for every layer.

        Args:
            features: Tapped hidden states `[T, K*H]`.
            positions: Absolute positions `[T]`.
        """
        context, cos_sin = self.fuse(features), self.rotary(positions)
        return [layer.self_attn.key_value(context, cos_sin) for layer in self.layers]  # type: ignore[union-attr,operator]

    def denoise(
        self,
        blocks: Tensor,
        positions: Tensor,
        context: list[KeyValue],
        layout: BlockLayout,
        attention: BlockAttention | None = None,
        first_slot: int = 0,
    ) -> Tensor:
        """Normed output states of embedded blocks `[A, B, H]` at absolute positions `[A, B]`.

        Blocks may be given as distinct rows, as in `in_blocks`, `[A + 1, H]` with at least one anchor. The
        last layer computes the slots from `first_slot` on: `[A, B - first_slot, H]`.
        """
        attend = attention or attention_for(blocks.device)
        cos_sin = self.rotary(positions)
        last = len(self.layers) - 1
        for number, (layer, rows) in enumerate(zip(self.layers, context, strict=True)):
            blocks = layer(blocks, rows, cos_sin, layout, attend, first_slot if number == last else 0)
        return self.norm(blocks)  # type: ignore[no-any-return]

    def forward(
        self,
        blocks: Tensor,
        positions: Tensor,
        features: Tensor,
        context_positions: Tensor,
        layout: BlockLayout,
        first_slot: int = 0,
    ) -> Tensor:
        """Training pass over a packed micro-batch.

        Args:
            blocks: Embedded blocks `[A, B, H]`; or their anchors, then the mask token, `[A + 1, H]`.
            positions: Their absolute positions `[A, B]`.
            features: Tapped hidden states of all documents, packed, `[T, K*H]`.
            context_positions: Positions within their documents `[T]`.
            layout: What each block sees.
            first_slot: The first slot whose state is wanted; 1 leaves the anchors out.

        Returns:
            Normed states `[A, B - first_slot, H]`; slot k's logits are for the token at position anchor + k.
        """
        context = self.context_key_values(features, context_positions)
        return self.denoise(blocks, positions, context, layout, first_slot=first_slot)


def init_weights(drafter: Drafter, seed: int) -> None:
    """Normal(0, 0.02) matrices (the published checkpoints' `initializer_range`), ones for norms; seeded."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(drafter.named_parameters()):
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
