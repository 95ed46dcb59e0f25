"""The frozen target: its tapped layers, the truncated forward of extraction, the verification of decoding.

A tap T is the 0-based number of a decoder layer; what is taken is the residual stream that this layer puts
out, always before the final norm. In Transformers' `hidden_states` that is index T + 1, except for the last
layer, where index N holds the state after the final norm and would be wrong (contract, section 2).

Dimensions: N target layers, K taps, H hidden size, V vocabulary rows, T tokens.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.distributed import DistributedConfig
from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

from dflash.attention import allow_compilations
from dflash.bfloat16 import use_products
from dflash.errors import ConfigError, TargetError
from dflash.head import TargetHead, head_of
from dflash.progress import warn
from dflash.smallrows import use_small_rows
from dflash.taps import check_taps
from dflash.target_files import TargetFacts, inspect_target, load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PACKING_ERROR = 0.05
"""Relative error of a token's state, packed against alone: far above bfloat16's, far below a leak's."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
__all__ = [
    "DTYPES",
    "Target",
    "TargetFacts",
    "TruncatedTarget",
    "decoder_layers",
    "final_norm",
    "inspect_target",
    "load_config",
    "load_head",
    "load_tokenizer",
    "tapped",
    "truncated_config",
]


def truncated_config(config: Any, layers: int) -> Any:
    """The configuration of the target's first `layers` decoder layers; per-layer lists are cut with it."""
    text = config.get_text_config()
    full = text.num_hidden_layers
    for key, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == full and key != "architectures":
            setattr(text, key, type(value)(value[:layers]))
    text.num_hidden_layers = layers
    return config


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The decoder stack of any Transformers model: its shallowest list of `count` layers.

    Raises:
        TargetError: there is none.
    """
    stacks = [
        (name.count("."), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and "vision" not in name
    ]
    if not stacks:
        raise TargetError(
            f"{type(model).__name__} has no list of {count} decoder layers; it cannot be tapped"
        )
    return min(stacks, key=lambda stack: stack[:2])[2]


def final_norm(decoder: nn.Module, hidden_size: int) -> nn.Module:
    """The norm behind the last layer: the decoder's last own child with a weight `[H]`.

    Raises:
        TargetError: there is none.
    """
    for _, module in reversed(list(decoder.named_children())):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (hidden_size,):
            return module
    raise TargetError(f"{type(decoder).__name__} has no final norm with a weight of {hidden_size}")


def _sharding(config: Any, ranks: int) -> dict[str, Any]:
    """How Transformers is told to split a model over the ranks of the process group.

    Raises:
        ConfigError: the attention heads cannot be shared out evenly.
    """
    text = config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if heads and heads % ranks:
            raise ConfigError(f"--tp {ranks} does not divide the target's {heads} {key}; use a divisor of it")
    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def _straight_to(device: torch.device) -> dict[str, Any]:
    """Load weights to a GPU one by one: in the host's memory each rank would hold a copy of all of them."""
    return {"device_map": {"": device}} if device.type == "cuda" else {}


def load_head(name: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> TargetHead:
    """Embedding, `lm_head` and final norm of a target, loading no decoder layer but the first.

    Raises:
        TargetError: the target cannot be loaded or its embedding cannot serve a drafter.
    """
    config = truncated_config(load_config(name, trust_remote_code=trust_remote_code), 1)
    model = load_model(
        AutoModelForCausalLM, name, config=config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    return head_of(model, final_norm(model.get_decoder(), config.get_text_config().hidden_size))


@contextmanager
def tapped(layers: nn.ModuleList, taps: Sequence[int], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `take(k, output)` with the residual stream `[b, T, H]` behind each tapped layer, once produced."""

    def hook(k: int) -> Callable[..., None]:
        def taken(_module: nn.Module, _inputs: Any, output: Any) -> None:
            take(k, output[0] if isinstance(output, tuple) else output)

        return taken

    handles = [layers[tap].register_forward_hook(hook(k)) for k, tap in enumerate(taps)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class TruncatedTarget:
    """The target's embedding and its layers up to the deepest tap: all that extraction runs or loads.

    Args:
        name: Folder or hub name.
        taps: 0-based layers, ascending.
        dtype: Compute dtype of the weights; never float16 (activations overflow it).
        device: Where it runs.
        trust_remote_code: Whether the model's own code may be executed.
        tp: Ranks that hold it together by Transformers' tensor parallelism: all those of the process group.
            Each forward pass needs all of them.

    Raises:
        TargetError: the target cannot be loaded, lacks weights, or its family has no plan for `tp`.
        ConfigError: a tap is not a layer of it, or `tp` does not divide its attention heads.
    """

    def __init__(
        self,
        name: str,
        taps: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
        tp: int = 1,
    ) -> None:
        config = load_config(name, trust_remote_code=trust_remote_code)
        check_taps(taps, config.get_text_config().num_hidden_layers)
        depth = taps[-1] + 1
        config = truncated_config(config, depth)
        where = _straight_to(device) if tp == 1 else _sharding(config, tp)
        options = {"trust_remote_code": trust_remote_code, **where}
        model = load_model(AutoModel, name, config=config, dtype=dtype, **options)
        self.model = model if where else model.to(device)
        use_products(self.model)
        self.taps, self.device = taps, device
        self.hidden_size = int(config.get_text_config().hidden_size)
        self._layers = decoder_layers(self.model, depth)
        # Whether packing is exact is found by looking, on which the ranks of a replica might not agree.
        self.packed = tp == 1 and device.type == "cuda" and self.use_packing()

    @torch.inference_mode()
    def capture(self, sequences: Sequence[np.ndarray], out: Tensor) -> None:
        """Run one batch and copy each tap into place as it is produced.

        Args:
            sequences: Token ids, one int array `[T_i]` a sample. Where the attention takes sequences of any
                length they are packed. Elsewhere shorter ones are padded on the right, where a causal model
                cannot see the padding, so no attention mask is needed; pads are never copied.
            out: `[sum of T_i, K, H]` on the target's device; filled sample after sample.
        """
        if self.packed:
            self._capture_packed(sequences, out)
        else:
            self._capture_padded(sequences, out)

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that a batch of samples of these lengths costs, padding included."""
        return sum(lengths) if self.packed else len(lengths) * max(lengths)

    def use_packing(self) -> bool:
        """Switch to attention over packed sequences of any length, where the model has it: flash, else flex.

        Whether it has is found by looking: some models ignore where a sequence begins, and layers with linear
        attention carry their state on, both without an error. Others end with one: flash attention takes no
        float32, and flex attention needs a compiler.
        """
        before = self.model.config._attn_implementation  # noqa: SLF001 - Transformers has no public name for it
        for name, available in (
            ("flash_attention_2", is_flash_attn_2_available()),
            ("flex_attention", is_torch_flex_attn_available()),
        ):
            if not available:
                continue
            if name == "flex_attention":
                allow_compilations()
            try:
                self.model.set_attn_implementation(name)
                if self.packs_exactly():
                    return True
            except (ValueError, ImportError):  # this model has no such implementation
                continue
            except RuntimeError as error:
                reason = str(error).strip().split("\n")[0]
                warn(f"{name} does not run here, so batches are not packed with it: {reason}")
        self.model.set_attn_implementation(before)
        return False

    @torch.inference_mode()
    def packs_exactly(self) -> bool:
        """Whether a sequence that is packed behind others gives what it gives alone."""
        rows = self.model.get_input_embeddings().weight.shape[0]
        first, other, behind = (np.arange(5, 5 + 3 * n, 3) % rows for n in (40, 39, 30))
        shape = (len(behind), len(self.taps), self.hidden_size)
        alone = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        self._capture_padded([behind], alone)
        for before in ([first], [other[::-1], first]):
            count = sum(map(len, before)) + len(behind)
            packed = torch.empty((count, *shape[1:]), dtype=self.model.dtype, device=self.device)
            self._capture_packed([*before, behind], packed)
            error = (packed[-len(behind) :] - alone).float().norm(dim=-1) / alone.float().norm(dim=-1)
            if not bool((error < _PACKING_ERROR).all()):
                return False
        return True

    def _capture_packed(self, sequences: Sequence[np.ndarray], out: Tensor) -> None:
        """One row; Transformers tells the sequences apart by their positions, which begin anew with each."""
        ids = np.concatenate(sequences).astype(np.int64)
        positions = np.concatenate([np.arange(len(ids)) for ids in sequences])

        def take(k: int, output: Tensor) -> None:
            out[:, k] = output[0]

        with tapped(self._layers, self.taps, take):
            self.model(
                input_ids=torch.from_numpy(ids)[None].to(self.device),
                position_ids=torch.from_numpy(positions)[None].to(self.device),
                use_cache=False,
            )

    def _capture_padded(self, sequences: Sequence[np.ndarray], out: Tensor) -> None:
        longest = max(len(ids) for ids in sequences)
        padded = np.zeros((len(sequences), longest), dtype=np.int64)
        real = np.zeros((len(sequences), longest), dtype=bool)
        for row, ids in enumerate(sequences):
            padded[row, : len(ids)] = ids
            real[row, : len(ids)] = True
        # by number: to count what a mask holds, the host would wait for the device at each tap
        keep = None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(self.device)

        def take(k: int, output: Tensor) -> None:
            states = output.flatten(0, 1)
            out[:, k] = states if keep is None else states.index_select(0, keep)

        with tapped(self._layers, self.taps, take):
            self.model(input_ids=torch.from_numpy(padded).to(self.device), use_cache=False)


class Target:
    """The whole target, for decoding and verification.

    Args:
        name: Folder or hub name.
        taps: 0-based layers whose states the drafter reads.
        dtype: Dtype of the weights.
        device: Where it runs.
        trust_remote_code: Whether the model's own code may be executed.

    Raises:
        TargetError: the target cannot be loaded, or lacks weights.
        ConfigError: a tap is not a layer of it.
    """

    def __init__(
        self,
        name: str,
        taps: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        where = _straight_to(device)
        options = {"trust_remote_code": trust_remote_code, **where}
        model = load_model(AutoModelForCausalLM, name, dtype=dtype, **options)
        self.model = model if where else model.to(device)
        text = model.config.get_text_config()
        check_taps(taps, text.num_hidden_layers)
        self.taps, self.device, self.dtype = taps, device, dtype
        self.num_layers, self.hidden_size = int(text.num_hidden_layers), int(text.hidden_size)
        self._layers = decoder_layers(self.model, self.num_layers)
        self.head = head_of(model, final_norm(model.get_decoder(), self.hidden_size))
        use_small_rows(self.model)
        use_products(self.model)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End-of-sequence ids of the target's generation config."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset(ids if isinstance(ids, list) else [ids])

    def new_cache(self) -> DynamicCache:
        """An empty key/value cache that can be cropped, also where layers keep a window only."""
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()
        return cache

    def forward(
        self,
        ids: Tensor,
        cache: DynamicCache,
        *,
        keep_logits: int,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run tokens of one sequence behind what the cache holds.

        Args:
            ids: `[T]`.
            cache: Extended by T positions.
            keep_logits: How many of the last positions need logits.
            positions: Absolute positions `[T]`; by default those behind the cache.
            mask: What each token sees, `[1, 1, T, cache + T]`, added to the scores; causal by default.

        Returns:
            Logits `[keep_logits, V]` and tapped states `[T, K*H]`.
        """
        where = None if positions is None else positions[None]
        logits, features = self.forward_rows(
            ids[None], cache, keep_logits=keep_logits, positions=where, mask=mask
        )
        return logits[0], features[0]

    @torch.inference_mode()
    def forward_rows(
        self,
        ids: Tensor,
        cache: DynamicCache,
        *,
        keep_logits: int,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run tokens of R sequences behind what the cache holds of each.

        Args:
            ids: `[R, T]`.
            cache: Extended by T positions.
            keep_logits: How many of the last positions need logits.
            positions: Absolute positions `[R, T]`; by default those behind the cache.
            mask: `[R, cache + T]`, 1 where a position counts, or as in `forward`.

        Returns:
            Logits `[R, keep_logits, V]` and tapped states `[R, T, K*H]`.
        """
        given = {"position_ids": positions, "attention_mask": mask}
        taken: list[Tensor] = []
        with tapped(self._layers, self.taps, lambda _, output: taken.append(output)):
            logits = self.model(
                input_ids=ids,
                cache=cache,
                use_cache=True,
                logits_to_keep=keep_logits,
                **{name: value for name, value in given.items() if value is not None},
            ).logits
        return logits, torch.cat(taken, dim=-1)
