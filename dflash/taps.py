"""Which layers of the target are tapped; T is the 0-based layer whose output is taken."""

from __future__ import annotations

from dflash.errors import ConfigError


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """K evenly spread layers of an N-layer target, as the published drafters choose them.

    `round(1 + i (N-4) / (K-1))`, or the middle layer for K = 1 (contract section 2; z-lab's rule).

    Raises:
        ConfigError: the target is too shallow for that many different layers.
    """
    taps = (
        (num_layers // 2,)
        if count == 1
        else tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    )
    check_taps(taps, num_layers)
    return taps


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Refuse taps that are missing, repeated, out of order or outside the target.

    Raises:
        ConfigError: names the offending tap and the allowed range.
    """
    if not taps:
        raise ConfigError("no taps: name at least one target layer, e.g. --taps 1,8,14")
    for tap in taps:
        if not 0 <= tap < num_layers:
            raise ConfigError(f"tap {tap} is outside the target's layers 0..{num_layers - 1}")
        if taps.count(tap) > 1:
            raise ConfigError(
                f"tap {tap} is repeated in {','.join(map(str, taps))}; each layer can be tapped once"
            )
    if list(taps) != sorted(taps):
        raise ConfigError(f"taps {','.join(map(str, taps))} are not in ascending order")
