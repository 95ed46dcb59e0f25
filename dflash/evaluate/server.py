"""The same table from a running vLLM or SGLang server: what users of that server see.

Prompts are sent as token ids, group by group (a kind, a length), and the server's counters are read between
groups. Acceptance is therefore exact by kind and by length where the server counts drafts (vLLM), and an
estimate where it shows a gauge (SGLang). Seconds are those of the group, prefill and queueing included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dflash.errors import ConfigError, CorpusError, ServerError, TargetError
from dflash.evaluate.client import Client, Reply
from dflash.evaluate.config import THINKING
from dflash.evaluate.counters import Counters
from dflash.evaluate.figures import EvalReport, KindReport, length_edge
from dflash.extract.prompts import Prompt, load_prompts, selected
from dflash.progress import Progress, warn
from dflash.target_files import load_tokenizer


@dataclass(frozen=True)
class ServerConfig:
    """Which server is evaluated, on which prompts."""

    server: str
    """Base URL, with or without `/v1`."""
    data: tuple[str, ...]
    target: str | None = None
    """Folder or hub name of the target, for its tokenizer; by default what the server calls its model."""
    plain_server: str | None = None
    """The same target without a drafter, to compare text and speed with."""
    concurrency: int = 4
    """Requests under way at once."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    per_kind: int | None = None
    thinking: str = "template"
    timeout: float = 600.0
    """Seconds without an answer before the evaluation fails."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be evaluated.

        Raises:
            ConfigError: names the flag, the value and what is allowed.
        """
        if self.thinking not in THINKING:
            raise ConfigError(f"--thinking {self.thinking!r} is not one of {', '.join(THINKING)}")
        for name in ("concurrency", "max_new_tokens", "per_kind"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if not self.temperature >= 0:
            raise ConfigError(f"--temperature {self.temperature} must not be negative; 0 is greedy")

    def sampling(self) -> dict[str, Any]:
        """What is asked of the server with each prompt."""
        values = {"top_k": self.top_k, "top_p": self.top_p}
        given = {name: value for name, value in values.items() if value is not None}
        return {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            **given,
        }


@dataclass(frozen=True)
class ServerReport(EvalReport):
    """Figures as the server counted them."""

    server: str = ""
    concurrency: int = 1
    estimated: bool = False
    """Acceptance comes from a gauge."""

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        more = {"server": self.server, "concurrency": self.concurrency, "estimated": self.estimated}
        return super().to_json() | more

    def notes(self) -> list[str]:
        """Lines below the table."""
        lines = super().notes() if self.block_size > 1 else []
        rate = self.total.tokens / max(self.total.speculative_seconds, 1e-9)
        lines.append(f"{self.server}: {rate:,.1f} tokens/s with {self.concurrency} requests at once")
        if self.estimated:
            lines.append("acceptance is the server's gauge of its last batches, read behind each group")
        return lines


def evaluate_server(config: ServerConfig) -> ServerReport:
    """Send every prompt and read what the server counted.

    Raises:
        CorpusError: no prompts.
        TargetError: there is no tokenizer; `--target` names one.
        ServerError: the server is away, refuses a prompt, or reports no speculative decoding.
    """
    with ExitStack() as stack:
        server = stack.enter_context(Client(config.server, config.concurrency, config.timeout))
        plain = None
        if config.plain_server is not None:
            plain = stack.enter_context(Client(config.plain_server, config.concurrency, config.timeout))
        prompts = _prompts(config, server)
        last = _checked(server)
        groups = list(_groups(prompts))
        measured = []
        with Progress("eval", len(prompts), "prompts") as bar:
            for number, group in enumerate(groups):
                found, last = _measure(config, (server, plain), group, last, plain_first=number % 2 == 0)
                measured.append(found)
                bar.advance(len(group), f"{measured[-1].tokens / measured[-1].seconds:.1f} tokens/s")
    return _report(config, groups, measured)


def _prompts(config: ServerConfig, server: Client) -> list[Prompt]:
    name = config.target or server.root
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    except TargetError as error:
        if config.target is not None:
            raise
        raise TargetError(
            f"the server calls its model {name!r}, where no tokenizer is found; give --target"
        ) from error
    found = load_prompts(config.data, tokenizer, template_thinking=THINKING[config.thinking])
    prompts = selected(found, config.per_kind)
    if not prompts:
        raise CorpusError(f"{', '.join(config.data)} holds no prompts")
    return prompts


def _checked(server: Client) -> Counters:
    """A first reading; a server that others use is warned of.

    Raises:
        ServerError: acceptance cannot be read from this server.
    """
    counters = server.settled()
    if not counters.speculative:
        raise ServerError(
            f"{server.url}/metrics has neither vllm:spec_decode_num_drafts_total nor "
            "sglang:spec_accept_length; start the server with a drafter (SGLang: and with --enable-metrics)"
        )
    if counters.running:
        warn(f"{server.url} is answering {counters.running} other requests; its counters include theirs")
    return counters


def _groups(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of one kind and one length, in the order in which the first of each comes."""
    groups: dict[tuple[str | None, int], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.kind, length_edge(len(prompt.input_ids))), []).append(prompt)
    yield from groups.values()


@dataclass(frozen=True)
class _Measured:
    """What one group gave."""

    tokens: int
    seconds: float
    counted: Counters
    plain_seconds: float = 0.0
    equal: int = 0


def _measure(
    config: ServerConfig,
    servers: tuple[Client, Client | None],
    group: Sequence[Prompt],
    before: Counters,
    *,
    plain_first: bool,
) -> tuple[_Measured, Counters]:
    """Figures of a group, and the reading behind it."""
    prompts, sampling = [prompt.input_ids.tolist() for prompt in group], config.sampling()
    server, plain = servers
    others: tuple[list[Reply], float] = ([], 0.0)
    if plain is not None and plain_first:
        others = plain.complete(prompts, sampling)
    replies, seconds = server.complete(prompts, sampling)
    after = server.settled()
    if plain is not None and not plain_first:
        others = plain.complete(prompts, sampling)
    equal = sum(mine.same(other) for mine, other in zip(replies, others[0], strict=False))
    tokens = sum(reply.tokens for reply in replies)
    return _Measured(tokens, seconds, after.since(before), others[1], equal), after


def _report(
    config: ServerConfig, groups: Sequence[Sequence[Prompt]], measured: Sequence[_Measured]
) -> ServerReport:
    size = max((found.counted.block_size or 1 for found in measured), default=1)
    report = ServerReport(
        KindReport(),
        {},
        size,
        greedy=config.temperature == 0,
        server=config.server,
        concurrency=config.concurrency,
        estimated=any(found.counted.drafts is None for found in measured),
    )
    for group, found in zip(groups, measured, strict=True):
        for part in report.parts(group[0]):
            _add(part, len(group), found)
    return report


def _add(part: KindReport, prompts: int, found: _Measured) -> None:
    part.prompts += prompts
    part.tokens += found.tokens
    part.speculative_seconds += found.seconds
    part.plain_seconds += found.plain_seconds
    part.equal += found.equal
    if found.counted.drafts is not None:
        part.cycles += found.counted.drafts
        part.walked += found.counted.drafts + found.counted.accepted
        part.accepted.update(found.counted.lengths())
    elif found.counted.gauge:
        # the prefill gives each prompt's first token
        part.walked += found.tokens - prompts
        part.cycles += round((found.tokens - prompts) / found.counted.gauge)
