"""What is regenerated, by whom, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError

APIS = ("chat", "completions")
THINKING = {"template": None, "on": True, "off": False}


@dataclass(frozen=True)
class RegenerateConfig:
    """Everything that decides the answers, and how they are got."""

    data: tuple[str, ...]
    out: Path
    """JSONL file that is written."""
    server: str | None = None
    """Base URL of an OpenAI-compatible server, with or without `/v1`."""
    target: str | None = None
    """The target, to decode here; with `api` completions, whose tokenizer renders the prompts."""
    model: str | None = None
    """Name of the model at the server; by default the first that it serves."""
    api: str = "chat"
    concurrency: int = 64
    """Requests under way at once."""
    max_new_tokens: int = 2048
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    thinking: str = "template"
    retries: int = 6
    """Further attempts for a request that failed in a way that may pass."""
    timeout: float = 600.0
    """Seconds without an answer before a request counts as failed."""
    rate_limit: float | None = None
    """Most requests a second."""
    batch_size: int = 16
    """Prompts that the target decodes together."""
    dtype: str = "bfloat16"
    keep_truncated: bool = False
    """Keep answers that were cut at `max_new_tokens`; their end is not the target's."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            ConfigError: names the flag, the value and what is allowed.
        """
        if self.server is None and self.target is None:
            raise ConfigError("nobody to answer: give --server URL, or --target for decoding here")
        if self.api not in APIS:
            raise ConfigError(f"--api {self.api!r} is not one of {', '.join(APIS)}")
        if self.server and self.api == "completions" and self.target is None:
            raise ConfigError("--api completions needs --target, whose tokenizer renders the prompts")
        if self.thinking not in THINKING:
            raise ConfigError(f"--thinking {self.thinking!r} is not one of {', '.join(THINKING)}")
        for name, least in (("concurrency", 1), ("max_new_tokens", 1), ("retries", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {getattr(self, name)}; it must be at least {least}")
        for name in ("timeout", "rate_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be positive")

    def identity(self) -> dict[str, Any]:
        """What decides the answers: a file is only gone on with under the same."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "thinking", "keep_truncated")
        who = {"target": self.target} if self.server is None else {"model": self.model, "api": self.api}
        return {name: getattr(self, name) for name in names} | who
