"""Taking refused drafts back out of the target's cache.

Keys and values are cropped. A recurrent state (linear attention, Mamba) sums up all that it has seen and
cannot be cropped: it is copied before the pass, put back, and the tokens that stay are run once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from dflash.target import Target

_STATES = ("conv_states", "recurrent_states")


class Rollback:
    """What a cache holds before a verification pass. Made before it, used after it.

    Args:
        cache: The target's cache.
        tokens: How many the pass will have; the state of a single one is never taken back.
    """

    def __init__(self, cache: Any, tokens: int) -> None:
        self._cache, self._tokens = cache, tokens
        recurrent = [layer for layer in cache.layers if has_recurrent_state(layer)] if tokens > 1 else []
        self._saved = [
            (layer, {name: _copied(getattr(layer, name)) for name in _STATES}) for layer in recurrent
        ]

    def keep(self, target: Target, ids: Tensor, kept: int) -> int:
        """Keep the first tokens of the pass and forget the others.

        Args:
            target: Whose cache it is.
            ids: Tokens of the pass, `[T]`.
            kept: How many stay, at least 1.

        Returns:
            Passes of the target that this took: 0, or 1 where tokens were run once more.
        """
        if not self._saved or kept == self._tokens:
            self._cache.crop(kept - self._tokens)
            return 0
        self._cache.crop(-self._tokens)
        for layer, states in self._saved:
            for name, values in states.items():
                getattr(layer, name).update(values)
        target.forward(ids[:kept], self._cache, keep_logits=1)
        self._cache.crop(0)
        return 1


def has_recurrent_state(layer: Any) -> bool:
    """Whether a layer of a cache keeps a sum of the past."""
    return any(state is not None for state in getattr(layer, "recurrent_states", {}).values())


def _copied(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {number: None if state is None else state.clone() for number, state in states.items()}
