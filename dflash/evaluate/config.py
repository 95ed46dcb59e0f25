"""What is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash.decode.config import DecodeConfig
from dflash.errors import ConfigError
from dflash.target import DTYPES

THINKING = {"template": None, "on": True, "off": False}
"""What the chat template is told about thinking; nothing by default."""


@dataclass(frozen=True)
class EvalConfig:
    """What is evaluated, on which prompts, and how it decodes."""

    target: str
    drafter: Path
    """A run, a checkpoint of it, or any drafter folder in the z-lab layout."""
    data: tuple[str, ...]
    """Files, folders, data sets, or names of benchmarks."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    dtype: str = "float32"
    """In float32 greedy output must be equal on every prompt; in bfloat16 near-ties may fall either way."""
    per_kind: int | None = None
    """Most prompts of each kind; all when None."""
    seed: int = 0
    trust_remote_code: bool = False
    top_k: int | None = None
    top_p: float | None = None
    draft: str = "block"
    budget: int = 64
    adaptive: bool = False
    batch_size: int = 1
    """Prompts that are decoded together."""
    thinking: str = "template"
    """`on` or `off` tells the chat template so; `template` leaves it to it."""

    def __post_init__(self) -> None:
        """Refuse what cannot be evaluated.

        Raises:
            ConfigError: names the value and what is allowed.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.thinking not in THINKING:
            raise ConfigError(f"--thinking {self.thinking!r} is not one of {', '.join(THINKING)}")
        for name in ("per_kind", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.batch_size > 1 and (self.draft != "block" or self.adaptive):
            raise ConfigError("--batch-size above 1 decodes plain blocks, without --draft tree or --adaptive")
        self.decoding()

    def decoding(self) -> DecodeConfig:
        """How prompts are decoded.

        Raises:
            ConfigError: a value is out of its range.
        """
        return DecodeConfig(
            self.max_new_tokens,
            self.temperature,
            self.seed,
            measure_anchors=self.batch_size == 1,
            top_k=self.top_k,
            top_p=self.top_p,
            draft=self.draft,
            budget=self.budget,
            adaptive=self.adaptive,
        )
