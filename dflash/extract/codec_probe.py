"""Before a cache in a lossy codec is begun: its scales, its error, and what the error does to the target.

Some tokens of the corpus run through the whole target. Then, tap by tap, their states are coded and decoded
and put back in the place of the layer's output, and the rest of the target runs on from there. The divergence
of what it puts out says in the target's own terms what the codec loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.cache.calibration import calibration_rows, coded_copy, with_codec
from dflash.cache.codec_error import LOSSY_CODECS
from dflash.cache.manifest import MANIFEST_NAME, Manifest, load_manifest, mismatch
from dflash.cache.scales import CALIBRATION_LENGTH
from dflash.dist import device_of
from dflash.errors import TargetError
from dflash.extract.settings import ExtractConfig
from dflash.extract.token_store import TokenizedCorpus
from dflash.progress import Progress
from dflash.target import DTYPES, Target, decoder_layers, tapped
from dflash.world import World

PROBE_TOKENS = 1024
"""Tokens whose output is compared; each takes one forward pass more than there are taps."""
_LOGIT_ROWS = 256


def coded_manifest(config: ExtractConfig, manifest: Manifest, corpus: TokenizedCorpus) -> Manifest:
    """The manifest of a new cache in the codec that is asked for, or with what an earlier run has frozen.

    Args:
        config: What to extract.
        manifest: In the codec raw.
        corpus: Whose samples of the smallest ids are looked at.

    Raises:
        TargetError: the target cannot be loaded, or the codec changes its output by more than is allowed.
        CacheMismatch: a cache in another codec is there.
    """
    if (config.out / MANIFEST_NAME).is_file():
        there = load_manifest(config.out).identity
        if there.codec != config.codec:
            raise mismatch(config.out, [f"codec: this {config.codec!r}, other {there.codec!r}"])
        identity = replace(manifest.identity, codec=there.codec, codec_digest=there.codec_digest)
        return replace(manifest, identity=identity)
    if config.codec not in LOSSY_CODECS:
        return with_codec(manifest, config.codec)
    try:
        coded = _probed(config, manifest, corpus)
    except torch.OutOfMemoryError as lack:
        raise TargetError(
            f"--codec {config.codec} is tried out with the whole target on one GPU, which has too little "
            "memory for it; use --codec lossless or raw"
        ) from lack
    error = coded.codec_error
    if error and error.kl and not max(error.kl) <= config.max_divergence:
        worst = max(range(len(error.kl)), key=lambda k: error.kl[k])
        raise TargetError(
            f"--codec {config.codec} changes the target's output by {error.kl[worst]:.4f} nats a token (KL) "
            f"behind layer {manifest.identity.taps[worst]}, more than --max-divergence "
            f"{config.max_divergence:g}; use --codec lossless or raw, or allow more"
        )
    return coded


def _probed(config: ExtractConfig, manifest: Manifest, corpus: TokenizedCorpus) -> Manifest:
    target = Target(
        config.target,
        manifest.identity.taps,
        dtype=DTYPES[config.dtype],
        device=device_of(World()),
        trust_remote_code=config.trust_remote_code,
    )
    rows = calibration_rows(corpus.ids, corpus.lengths).tolist()
    samples = [
        torch.from_numpy(corpus.example(row).input_ids[:CALIBRATION_LENGTH]).long().to(target.device)
        for row in rows
    ]
    states = []
    with Progress("probe", sum(map(len, samples))) as progress:
        for ids in samples:
            states.append(target_states(target, ids).cpu())
            progress.advance(len(ids))
    coded = with_codec(manifest, config.codec, torch.cat(states))
    divergence = _divergence(target, coded, samples, states)
    return replace(coded, codec_error=coded.codec_error and replace(coded.codec_error, kl=divergence))


@torch.inference_mode()
def target_states(target: Target, ids: Tensor) -> Tensor:
    """Tapped states `[T, K, H]` of one sequence, ids `[T]`."""
    taken: list[Tensor] = []
    layers = decoder_layers(target.model, target.num_layers)
    with tapped(layers, target.taps, lambda _, output: taken.append(output[0])):
        target.model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    return torch.stack(taken, dim=1)


@torch.inference_mode()
def target_logits(target: Target, ids: Tensor, put_back: Mapping[int, Tensor] | None = None) -> Tensor:
    """Logits `[T, V]` of one sequence.

    Args:
        target: The whole target.
        ids: `[T]`.
        put_back: Layer to states `[T, H]` that take the place of what it puts out.
    """
    with _replaced(decoder_layers(target.model, target.num_layers), put_back or {}):
        logits: Tensor = target.model(input_ids=ids[None], use_cache=False).logits
    return logits[0]


@contextmanager
def _replaced(layers: nn.ModuleList, states: Mapping[int, Tensor]) -> Iterator[None]:
    """Let layers put out these states `[T, H]` instead of what they compute for the one sequence."""

    def hook(own: Tensor) -> Callable[..., Any]:
        def put_back(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            stream = output[0] if isinstance(output, tuple) else output
            given = own.to(stream.dtype).view_as(stream)
            return (given, *output[1:]) if isinstance(output, tuple) else given

        return put_back

    handles = [layers[layer].register_forward_hook(hook(own)) for layer, own in states.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _divergence(
    target: Target, manifest: Manifest, samples: list[Tensor], states: list[Tensor]
) -> tuple[float, ...]:
    """Mean KL in nats a token for each tap [K], over the first `PROBE_TOKENS` tokens of finite samples."""
    sums, tokens = torch.zeros(len(target.taps), dtype=torch.float64), 0
    for ids, exact in zip(samples, states, strict=True):
        if tokens >= PROBE_TOKENS:
            break
        if not bool(torch.isfinite(exact.float().sum())):
            continue
        coded, _ = coded_copy(manifest, exact)
        expected = target_logits(target, ids)
        for k, tap in enumerate(target.taps):
            found = target_logits(target, ids, {tap: coded[:, k].to(target.device)})
            sums[k] += _kl(expected, found)
        tokens += len(ids)
    return tuple(round(value / max(tokens, 1), 6) for value in sums.tolist())


def _kl(expected: Tensor, found: Tensor) -> float:
    """Sum over tokens of KL(expected || found), from logits [T, V]."""
    total = 0.0
    for one, other in zip(*(torch.split(x, _LOGIT_ROWS) for x in (expected, found)), strict=True):
        wanted, got = one.float().log_softmax(-1), other.float().log_softmax(-1)
        total += float(F.kl_div(got, wanted, reduction="sum", log_target=True))
    return total
