"""How to decode, and what a decoding has cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash.errors import ConfigError

DRAFTS = ("block", "tree")


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of the sampling; unused when greedy."""
    ignore_stop: bool = False
    """Go on behind the end-of-sequence token (measurements of fixed length)."""
    measure_anchors: bool = False
    """Afterwards, draft from every position of the output too and see how much would have been accepted."""
    top_k: int | None = None
    """Sample from so many of the likeliest tokens; None for all."""
    top_p: float | None = None
    """Sample from the fewest tokens that hold this share of the probability; None for all."""
    draft: str = "block"
    """`block`: one line of drafts; `tree`: alternatives too, best first, verified in one pass."""
    budget: int = 64
    """Most nodes of a tree."""
    adaptive: bool = False
    """Draft as many tokens as pay, by measurement; none where drafting does not pay."""

    def __post_init__(self) -> None:
        """Refuse what cannot be decoded.

        Raises:
            ConfigError: names the value and its range.
        """
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} must be 1 or more")
        if not self.temperature >= 0:
            raise ConfigError(f"--temperature {self.temperature} must not be negative; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k} must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} must be above 0 and at most 1")
        if self.draft not in DRAFTS:
            raise ConfigError(f"--draft {self.draft!r} is not one of {', '.join(DRAFTS)}")
        if self.budget < 1:
            raise ConfigError(f"--budget {self.budget} must be 1 or more")
        if self.adaptive and self.draft == "tree":
            raise ConfigError("--adaptive paces blocks, not trees; use --draft block, or leave it out")


@dataclass
class Generation:
    """Tokens behind a prompt and what they cost."""

    tokens: list[int]
    """Produced tokens; ends with the stop token where one was produced."""
    accepted: list[int] = field(default_factory=list)
    """Tokens that each verification cycle added (accepted drafts + 1); their mean is tau."""
    target_passes: int = 0
    """Forward passes of the target, the prefill included."""
    seconds: float = 0.0
    """Wall time behind the prefill; of a batch, this sequence's equal part."""
    drafting_seconds: float = 0.0
    """Share of it that the drafter took."""
    anchor_accepted: list[int] = field(default_factory=list)
    """With `measure_anchors`: accepted drafts + 1 from every position of the output but the last."""

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a verification cycle adds on average; 1.0 when there was none."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else 1.0
