"""The codecs by name, what a cache must have for them, and what a lossy one costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CODECS = ("raw", "lossless", "int8", "fp8")
LOSSY_CODECS = ("int8", "fp8")


def codec_problems(codec: str, dtype: str, digest: str | None) -> list[str]:
    """What is wrong with a cache's codec; at most one line."""
    if codec not in CODECS:
        return [f"codec {codec!r} is not one of {', '.join(CODECS)}"]
    if codec != "raw" and dtype == "float32":
        return [f"codec {codec} is for bfloat16, not for float32; use the codec raw"]
    if (codec == "int8") != (digest is not None):
        return [f"codec {codec} with the codec digest {digest!r}: int8 alone has one"]
    return []


@dataclass(frozen=True)
class CodecError:
    """What a lossy codec did to samples that were looked at when the cache was begun. K tapped layers."""

    tokens: int
    """Tokens that were looked at."""
    relative_error: tuple[float, ...]
    """[K] median over tokens of |decoded - exact| / |exact|, Euclidean norms over H."""
    escaped: tuple[float, ...]
    """[K] share of rows that are kept exactly."""
    kl: tuple[float, ...] = ()
    """[K] mean divergence, in nats a token, of the target's output when the decoded states of one tapped
    layer
    take the place of its output; empty where the target was not at hand."""

    def of_layers(self, columns: Sequence[int]) -> CodecError:
        """That of these layers alone, by their place on axis K, in this order."""

        def some(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(values[column] for column in columns) if values else ()

        return replace(
            self,
            relative_error=some(self.relative_error),
            escaped=some(self.escaped),
            kl=some(self.kl),
        )

    def text(self) -> str:
        """What a report says of it."""
        errors = " ".join(f"{value:.4f}" for value in self.relative_error)
        kept = sum(self.escaped) / len(self.escaped)
        divergence = f"; KL by tap {' '.join(f'{value:.4f}' for value in self.kl)}" if self.kl else ""
        return f"relative error by tap {errors}; {kept:.2%} of rows kept exactly{divergence}"
