"""The mix: which share of the tokens each length bucket is owed.

`natural` is the corpus's own mix, `uniform` gives every bucket the same, `sqrt` lies between (shares
proportional to the square root of the bucket's tokens), and `256:0.2,512:0.3,1024:0.5` says it outright:
each bucket by its upper edge, the shares summing to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isqrt, lcm

from dflash.errors import ConfigError

NAMED_MIXES = ("natural", "uniform", "sqrt")
_ROUNDING = Fraction(1, 1_000_000)  # six thirds of 0.333333 are meant to be 1


def parse_shares(mix: str) -> dict[int, Fraction]:
    """The shares of an explicit mix by bucket edge.

    Raises:
        ConfigError: not a list of `edge:share`, an edge given twice, a negative share, or a sum other than 1.
    """
    shares: dict[int, Fraction] = {}
    for part in mix.split(","):
        edge, share = _parse_share(mix, part)
        if edge in shares:
            raise ConfigError(f"--mix {mix}: bucket {edge} is given twice")
        if share < 0:
            raise ConfigError(f"--mix {mix}: the share of bucket {edge} is negative ({part.strip()})")
        shares[edge] = share
    total = sum(shares.values(), Fraction(0))
    if abs(total - 1) > _ROUNDING:
        raise ConfigError(f"--mix {mix}: the shares sum to {float(total):g}; they must sum to 1")
    return shares


def bucket_weights(mix: str, edges: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Integers in proportion to each bucket's share of the tokens; 0 for a bucket that is not drawn from.

    Args:
        mix: One of `NAMED_MIXES`, or explicit shares.
        edges: Upper edge of each bucket, `[buckets]`.
        tokens: Tokens that each bucket holds, `[buckets]`.

    Raises:
        ConfigError: the mix is malformed, names an unknown or an empty bucket, or leaves a bucket out unsaid.
    """
    if mix == "natural":
        return list(tokens)
    if mix == "uniform":
        return [int(held > 0) for held in tokens]
    if mix == "sqrt":
        return [isqrt(held << 40) for held in tokens]  # 20 binary digits after the point
    return _explicit_weights(mix, edges, tokens)


def check_epoch_size(mix: str, size: int | None) -> None:
    """Refuse an epoch of no tokens, and one of the natural mix that is not each sample once.

    Raises:
        ConfigError: names the flag and its value.
    """
    if size is None:
        return
    if size < 1:
        raise ConfigError(f"--epoch-size is {size} tokens; it must be at least 1")
    if mix == "natural":
        raise ConfigError(
            f"--epoch-size {size} with --mix natural, whose epoch is every sample once; leave it out, use "
            "--max-steps for a shorter run, or another --mix"
        )


def epoch_passes(weights: Sequence[int], tokens: Sequence[int], size: int | None) -> list[float]:
    """How often the samples of each bucket are drawn in an epoch, `[buckets]`; 0 for one that is left out.

    Args:
        weights: Share of each bucket, as `bucket_weights` gives them.
        tokens: Tokens that each holds.
        size: Tokens of the epoch; None for as many as the buckets with a share hold.
    """
    size = size or sum(held for weight, held in zip(weights, tokens, strict=True) if weight)
    total = sum(weights)
    return [
        size * weight / (total * held) if weight else 0.0
        for weight, held in zip(weights, tokens, strict=True)
    ]


def _parse_share(mix: str, part: str) -> tuple[int, Fraction]:
    edge, colon, share = part.partition(":")
    try:
        if colon:
            return int(edge), Fraction(share.strip())
    except (ValueError, ZeroDivisionError):
        pass
    raise ConfigError(
        f"--mix {mix}: {part.strip() or 'an empty entry'} is not EDGE:SHARE; use {', '.join(NAMED_MIXES)}, "
        "or shares such as 256:0.2,512:0.3,1024:0.5"
    )


def _explicit_weights(mix: str, edges: Sequence[int], tokens: Sequence[int]) -> list[int]:
    shares = parse_shares(mix)
    if unknown := sorted(set(shares) - set(edges)):
        known = ", ".join(str(edge) for edge in edges)
        raise ConfigError(f"--mix {mix}: there is no bucket {unknown[0]}; this cache has {known}")
    for edge, held in zip(edges, tokens, strict=True):
        if held and edge not in shares:
            raise ConfigError(
                f"--mix {mix}: bucket {edge} holds {held:,} tokens but has no share, so it would never be "
                f"drawn; give it one, or write {edge}:0 to leave it out on purpose"
            )
        if not held and shares.get(edge, Fraction(0)) > 0:
            raise ConfigError(
                f"--mix {mix}: bucket {edge} is empty, so it cannot have a share of {float(shares[edge]):g}; "
                f"write {edge}:0 and give its share to the others"
            )
    scale = lcm(*(share.denominator for share in shares.values()))
    return [int(shares.get(edge, Fraction(0)) * scale) for edge in edges]
