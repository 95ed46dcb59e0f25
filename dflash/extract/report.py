"""What a run of `dflash extract` did, and what the cache holds after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_DISK_BOUND = 0.05
"""Share of waiting above which the disk is what limits a run."""


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
    """Share of the ranks' seconds for which their target waited for the disk."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    bad: int = 0
    """Samples left out because of NaN or infinity, in all runs."""
    halved: int = 0
    """Times that a batch did not fit into the device's memory and was halved, over all ranks."""
    stopped: str | None = None
    """The signal that ended the run early, if one did."""
    expected: int = 0
    """Samples that the finished cache will hold."""

    @property
    def tokens_per_s(self) -> float:
        """Rate of this run over all ranks; 0 when it had nothing to do."""
        return self.new_tokens / self.seconds if self.new_tokens else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Size of the cache per token."""
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def bottleneck(self) -> str:
        """What this run waited for."""
        return "disk" if self.disk_wait_share > _DISK_BOUND else "target"

    def text(self) -> str:
        """The summary for the terminal."""
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        size = f"{self.bytes / 1e9:,.2f} GB ({self.bytes_per_token:,.0f} bytes/token)"
        lines = [
            f"{self.cache}: {self.samples:,} samples, {self.tokens:,} tokens, {size}",
            self._run_line(),
            f"rows left out: {dropped}",
        ]
        if self.bad:
            lines.append(f"samples left out because of NaN or Inf: {self.bad:,}, listed in manifest.json")
        if self.halved:
            lines.append(
                f"batches halved for lack of memory: {self.halved:,}; set a lower --tokens-per-batch"
            )
        if self.stopped:
            lines.append(
                f"stopped by {self.stopped} after {self.samples:,} of {self.expected:,} samples; "
                "run the same command again to go on"
            )
        return "\n".join(lines)

    def _run_line(self) -> str:
        if not self.new_tokens:
            return "this run: nothing " + ("done" if self.stopped else "left to do")
        return (
            f"this run: {self.new_tokens:,} tokens at {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.pad_share:.1%} padding; the bottleneck is the {self.bottleneck} "
            f"({self.disk_wait_share:.0%} of the time waiting for the disk)"
        )
