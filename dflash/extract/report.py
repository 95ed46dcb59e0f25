"""What a run of `dflash extract` did, and what the cache holds after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ExtractReport:
    """What the cache holds, and what this run did for it."""

    cache: Path
    samples: int
    """In the cache."""
    tokens: int
    """In the cache."""
    bytes: int
    """Of all shards."""
    new_tokens: int
    """Extracted by this run, on all ranks."""
    seconds: float
    """Of this run, from the first batch to the last commit."""
    pad_share: float
    """Share of this run's computed tokens that was padding."""
    disk_wait_share: float
    """Share of the seconds for which the main rank's target waited for the disk."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""

    @property
    def tokens_per_s(self) -> float:
        """Rate of this run over all ranks; 0 when it had nothing to do."""
        return self.new_tokens / self.seconds if self.new_tokens else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Size of the cache per token."""
        return self.bytes / self.tokens

    def text(self) -> str:
        """The summary for the terminal."""
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        run = (
            f"this run: {self.new_tokens:,} tokens at {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.pad_share:.1%} padding, {self.disk_wait_share:.0%} of the time waiting for the disk"
            if self.new_tokens
            else "this run: nothing left to do"
        )
        return (
            f"{self.cache}: {self.samples:,} samples, {self.tokens:,} tokens, {self.bytes / 1e9:,.2f} GB "
            f"({self.bytes_per_token:,.0f} bytes/token)\n{run}\nrows left out: {dropped}"
        )
