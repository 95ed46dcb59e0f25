"""`TargetHead`: the part of the target that a drafter borrows, so that training never loads the target.

The frozen token embedding turns a block's anchor and mask tokens into its input; the frozen `lm_head` turns
the drafter's output into logits. The final norm is kept for losses that need the target's own distribution.

Shapes: V rows of the embedding, H hidden size, P any number of positions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dflash.errors import CacheCorrupt, TargetError
from dflash.files import publish
from dflash.smallrows import small_linear

if TYPE_CHECKING:
    from pathlib import Path

HEAD_NAME = "head.safetensors"
_REPAIR = "run `dflash cache repair` on the cache, then extract again"


@dataclass(frozen=True)
class HeadFacts:
    """What the head does besides multiplying."""

    embed_scale: float = 1.0
    """The target multiplies embedding rows by this (Gemma: sqrt(H)); the drafter's input does the same."""
    logit_softcap: float | None = None
    """Logits become `cap * tanh(logits / cap)` where the target caps them (Gemma 2)."""
    norm_eps: float = 1e-6
    """Epsilon of the final norm."""
    norm_unit_offset: bool = False
    """Whether the final norm multiplies by `1 + weight` (Gemma, Qwen3.5)."""


@dataclass
class TargetHead:
    """The target's embedding, `lm_head` and final norm, all frozen."""

    embedding: Tensor
    """`[V, H]`."""
    lm_head: Tensor
    """`[V, H]`; the same storage as `embedding` when the target ties them."""
    final_norm: Tensor
    """`[H]`."""
    facts: HeadFacts

    @property
    def vocab_size(self) -> int:
        """V, the rows of the embedding (may exceed the tokenizer's length)."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.embedding.shape[1]

    @property
    def tied(self) -> bool:
        """Whether embedding and `lm_head` are one tensor."""
        return self.embedding.data_ptr() == self.lm_head.data_ptr()

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows `[..., H]` of token ids `[...]`, scaled as the target scales them."""
        rows = F.embedding(ids, self.embedding)
        return rows if self.facts.embed_scale == 1.0 else rows * self.facts.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[P, V]` of the drafter's normed output `[P, H]`."""
        logits = small_linear(hidden, self.lm_head)
        cap = self.facts.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of last hidden states `[P, H]`, float32: what the target's own logits come from."""
        weight = self.final_norm.float() + (1.0 if self.facts.norm_unit_offset else 0.0)
        return F.rms_norm(hidden.float(), weight.shape, weight, self.facts.norm_eps)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> TargetHead:
        """The same head elsewhere or in another dtype; tied tensors stay tied."""
        embedding = self.embedding.to(device, dtype)
        lm_head = embedding if self.tied else self.lm_head.to(device, dtype)
        return TargetHead(embedding, lm_head, self.final_norm.to(device, dtype), self.facts)

    def save(self, path: Path) -> None:
        """Write the head to one safetensors file; a tied `lm_head` is stored once."""
        tensors = {"embedding": self.embedding.contiguous(), "final_norm": self.final_norm.contiguous()}
        if not self.tied:
            tensors["lm_head"] = self.lm_head.contiguous()
        metadata = {"facts": json.dumps(asdict(self.facts), sort_keys=True)}
        publish(path, lambda tmp: save_file(tensors, tmp, metadata=metadata))

    @classmethod
    def load(cls, path: Path) -> TargetHead:
        """Read a head written by `save`.

        Raises:
            CacheCorrupt: the file is missing, damaged, or its tensors do not belong together.
        """
        try:
            with safe_open(path, framework="pt") as file:
                facts = HeadFacts(**json.loads(file.metadata()["facts"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            embedding, norm = tensors["embedding"], tensors["final_norm"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CacheCorrupt(f"{path} is not a target head ({error}); {_REPAIR}") from error
        lm_head = tensors.get("lm_head", embedding)
        if lm_head.shape != embedding.shape or norm.shape != embedding.shape[1:]:
            raise CacheCorrupt(f"{path}: shapes {_shapes(tensors)} do not belong together; {_REPAIR}")
        return cls(embedding, lm_head, norm, facts)


def head_of(model: Any, final_norm: Any) -> TargetHead:
    """The head of a Transformers causal LM.

    Args:
        model: The full model, or one with `lm_head` alone beside the decoder.
        final_norm: Its last norm module.

    Raises:
        TargetError: the embedding is no plain (scaled) table, so a drafter could not be served with it.
    """
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if output is None:
        raise TargetError(f"{type(model).__name__} has no lm_head; a causal language model is needed")
    config = model.config.get_text_config()
    facts = HeadFacts(
        embed_scale=embed_scale(embedding),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        norm_eps=float(getattr(config, "rms_norm_eps", getattr(config, "layer_norm_eps", 1e-6))),
        norm_unit_offset=norm_has_unit_offset(final_norm),
    )
    table = embedding.weight.detach()
    lm_head = table if output.weight.data_ptr() == table.data_ptr() else output.weight.detach()
    return TargetHead(table, lm_head, final_norm.weight.detach(), facts)


def embed_scale(embedding: Any) -> float:
    """Factor between an embedding module's output and its table, found by looking (Gemma: sqrt(H); most: 1).

    Raises:
        TargetError: the module does something else than scaling.
    """
    ids = torch.arange(min(8, embedding.weight.shape[0]), device=embedding.weight.device)
    with torch.no_grad():
        given, raw = embedding(ids).float(), embedding.weight[ids].float()
    norm = raw.norm()
    scale = float((given * raw).sum() / norm.square()) if norm > 0 else 1.0
    if (given - scale * raw).abs().max() > 0.02 * given.abs().max():
        raise TargetError(
            f"the input embedding {type(embedding).__name__} is not a scaled table; "
            "a DFlash drafter cannot be served with this target"
        )
    return 1.0 if abs(scale - 1.0) < 1e-3 else scale


def norm_has_unit_offset(norm: Any) -> bool:
    """Whether a norm multiplies by `1 + weight` (Gemma, Qwen3.5) and not by `weight`; found by looking."""
    weight = norm.weight.detach().float()
    given = torch.linspace(-1, 1, len(weight), device=weight.device)
    with torch.no_grad():
        output = norm(given.to(norm.weight.dtype)[None])[0].float()
    normed = given / given.square().mean().sqrt()
    errors = [(output - normed * factor).square().sum() for factor in (weight, weight + 1)]
    return bool(errors[1] < errors[0])


def _shapes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items()))
