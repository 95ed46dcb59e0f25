"""What a drafter is worth on prompts it has not seen: acceptance, speed-up, and whether output is unchanged.

Every prompt is decoded plainly and speculatively, in turn and in alternating order, so that noise of the
machine falls on both. tau is that of the serving walk (the next anchor is behind the last accepted token),
pooled over prompts: produced tokens / verification cycles. The average over all anchors is shown beside it,
since easy stretches dominate that one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.drafting import check_fit
from dflash.decode.loop import generate
from dflash.dist import device_of
from dflash.drafter import Drafter
from dflash.errors import CheckpointError, ConfigError, CorpusError
from dflash.extract.prompts import Prompt, load_prompts
from dflash.pretrained import CONFIG_NAME, load_drafter
from dflash.progress import Progress
from dflash.target import DTYPES, Target, load_tokenizer
from dflash.train.checkpoint import best_checkpoint, latest_checkpoint
from dflash.world import World


@dataclass(frozen=True)
class EvalConfig:
    """What is evaluated, on which prompts."""

    target: str
    drafter: Path
    """A run, a checkpoint of it, or any drafter folder in the z-lab layout."""
    data: tuple[str, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    dtype: str = "float32"
    """In float32 greedy output must be equal on every prompt; in bfloat16 near-ties may fall either way."""
    per_kind: int | None = None
    """Most prompts of each kind; all when None."""
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be evaluated.

        Raises:
            ConfigError: names the value and what is allowed.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.per_kind is not None and self.per_kind < 1:
            raise ConfigError(f"--per-kind is {self.per_kind}; it must be at least 1")


@dataclass
class KindReport:
    """Figures of one kind of prompt, or of all together."""

    prompts: int = 0
    tokens: int = 0
    """Produced speculatively."""
    cycles: int = 0
    """Verification passes."""
    walked: int = 0
    """Tokens that these cycles added."""
    anchors: int = 0
    anchor_accepted: int = 0
    equal: int = 0
    """Prompts whose output equals plain decoding, token for token."""
    plain_seconds: float = 0.0
    speculative_seconds: float = 0.0
    drafting_seconds: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)
    """How often a cycle accepted so many drafts."""

    @property
    def walk_tau(self) -> float:
        """Acceptance length of the serving walk."""
        return self.walked / self.cycles if self.cycles else 1.0

    @property
    def anchor_tau(self) -> float:
        """Accepted drafts + 1, averaged over every position of the output."""
        return self.anchor_accepted / self.anchors if self.anchors else 1.0

    @property
    def speedup(self) -> float:
        """Plain time over speculative time, both behind the prefill."""
        return self.plain_seconds / self.speculative_seconds if self.speculative_seconds else 1.0

    def summary(self) -> str:
        """A few words for the progress line."""
        rate = self.tokens / self.speculative_seconds if self.speculative_seconds else 0.0
        return f"{rate:.1f} tokens/s, walk tau {self.walk_tau:.2f}, speed-up {self.speedup:.2f}x"

    def by_position(self, slots: int) -> list[float]:
        """Share of cycles whose slot k = 1..B-1 was accepted."""
        total = max(sum(self.accepted.values()), 1)
        return [
            sum(n for length, n in self.accepted.items() if length >= slot) / total
            for slot in range(1, slots + 1)
        ]

    def add(self, plain: Generation, speculative: Generation) -> None:
        """Count one prompt."""
        self.prompts += 1
        self.tokens += len(speculative.tokens)
        self.cycles += len(speculative.accepted)
        self.walked += sum(speculative.accepted)
        self.anchors += len(speculative.anchor_accepted)
        self.anchor_accepted += sum(speculative.anchor_accepted)
        self.equal += plain.tokens == speculative.tokens
        self.plain_seconds += plain.seconds
        self.speculative_seconds += speculative.seconds
        self.drafting_seconds += speculative.drafting_seconds
        self.accepted.update(length - 1 for length in speculative.accepted)

    def figures(self, slots: int) -> dict[str, Any]:
        """Everything, JSON-ready."""
        counts = {name: value for name, value in asdict(self).items() if name != "accepted"}
        return counts | {
            "walk_tau": self.walk_tau,
            "anchor_tau": self.anchor_tau,
            "speedup": self.speedup,
            "accepted_by_position": self.by_position(slots),
        }


@dataclass(frozen=True)
class EvalReport:
    """Figures over all prompts and by kind."""

    total: KindReport
    kinds: dict[str, KindReport]
    block_size: int

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        slots = self.block_size - 1
        kinds = {kind: report.figures(slots) for kind, report in self.kinds.items()}
        return self.total.figures(slots) | {"block_size": self.block_size, "kinds": kinds}

    def table(self) -> str:
        """A row a kind, then all together."""
        head = f"{'prompts':<12}{'n':>4}{'tokens':>8}{'walk tau':>10}{'anchor tau':>12}"
        lines = [head + f"{'plain s':>9}{'spec. s':>9}{'speed-up':>10}{'equal':>9}"]
        rows = [*sorted(self.kinds.items()), ("all", self.total)]
        for name, r in rows if len(self.kinds) > 1 else rows[-1:]:
            lines.append(
                f"{name:<12}{r.prompts:>4}{r.tokens:>8,}{r.walk_tau:>10.2f}{r.anchor_tau:>12.2f}"
                f"{r.plain_seconds:>9.1f}{r.speculative_seconds:>9.1f}{r.speedup:>9.2f}x"
                f"{f'{r.equal}/{r.prompts}':>9}"
            )
        positions = " ".join(f"{share:.2f}" for share in self.total.by_position(self.block_size - 1))
        return "\n".join([*lines, f"accepted by position in the block: {positions}"])


def resolve_drafter(path: Path) -> Path:
    """The folder to load: `path`, or of the run at `path` the best checkpoint, else the newest whole one.

    A run marks its best checkpoint with `--keep-best`.

    Raises:
        CheckpointError: there is neither.
    """
    if (path / CONFIG_NAME).exists():
        return path
    newest = best_checkpoint(path) or latest_checkpoint(path)
    if newest is None:
        raise CheckpointError(f"{path} is neither a drafter folder nor a run with a checkpoint")
    return newest


def open_pair(
    target: str, drafter: Path, *, dtype: str, trust_remote_code: bool = False
) -> tuple[Target, Drafter, Any]:
    """Target, drafter and tokenizer for decoding, on this machine's device.

    Raises:
        TargetError: the target cannot be loaded.
        CheckpointError: the drafter cannot be loaded or does not fit.
    """
    device = device_of(World())
    network = load_drafter(resolve_drafter(drafter), DTYPES[dtype])
    network.eval().requires_grad_(False)
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    try:
        model = Target(
            target,
            network.config.target_layer_ids,
            dtype=DTYPES[dtype],
            device=device,
            trust_remote_code=trust_remote_code,
        )
    except ConfigError as error:
        raise CheckpointError(
            f"the drafter in {drafter} does not fit the target {target}: {error}"
        ) from error
    check_fit(network, model)
    return model, network.to(device), tokenizer


def evaluate(config: EvalConfig) -> EvalReport:
    """Decode every prompt both ways and count.

    Raises:
        CorpusError: no prompts.
        TargetError: the target cannot be loaded.
        CheckpointError: the drafter cannot be loaded or does not fit.
    """
    target, drafter, tokenizer = open_pair(
        config.target, config.drafter, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    prompts = _selected(load_prompts(config.data, tokenizer), config.per_kind)
    if not prompts:
        raise CorpusError(f"{', '.join(config.data)} holds no prompts")
    report = EvalReport(KindReport(), {}, drafter.config.block_size)
    decode = DecodeConfig(config.max_new_tokens, config.temperature, config.seed, measure_anchors=True)
    with Progress("eval", len(prompts), "prompts") as bar:
        for number, prompt in enumerate(prompts):
            plain, speculative = _both(target, drafter, prompt, decode, plain_first=number % 2 == 0)
            for part in (report.total, report.kinds.setdefault(prompt.kind or "all", KindReport())):
                part.add(plain, speculative)
            bar.advance(1, report.total.summary())
    return report


def _selected(prompts: list[Prompt], per_kind: int | None) -> list[Prompt]:
    seen: Counter[str | None] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.kind] += 1
        if per_kind is None or seen[prompt.kind] <= per_kind:
            chosen.append(prompt)
    return chosen


def _both(
    target: Target, drafter: Drafter, prompt: Prompt, config: DecodeConfig, *, plain_first: bool
) -> tuple[Generation, Generation]:
    ids = torch.from_numpy(prompt.input_ids).long()
    done: dict[bool, Generation] = {}
    for plain in (plain_first, not plain_first):
        done[plain] = generate(target, None if plain else drafter, ids, config)
    return done[True], done[False]
