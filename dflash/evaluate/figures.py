"""Figures of an evaluation.

tau is that of the serving walk (the next anchor is behind the last accepted token), pooled over prompts:
produced tokens / verification cycles. The average over all anchors is shown beside it, since easy stretches
dominate that one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash.decode.config import Generation
from dflash.extract.prompts import Prompt

NEAR_TIE = 8
"""Steps of the dtype by which sums of a different order may move a logit."""


def length_edge(tokens: int) -> int:
    """The power of two, at least 16, that a prompt of so many tokens does not exceed."""
    return 1 << max(tokens - 1, 15).bit_length()


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs of one prompt part."""

    prompt: str
    position: int
    """Tokens of the output before it."""
    plain: int
    """Token of plain decoding."""
    drafted: int
    """Token of speculative decoding."""
    gap: float
    """How much higher the target's logit of the one is than that of the other."""
    resolution: float
    """Distance of neighbouring numbers of the dtype there."""

    @property
    def near_tie(self) -> bool:
        """Whether the target cannot tell the two tokens apart in this dtype."""
        return abs(self.gap) <= NEAR_TIE * self.resolution


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
    differences: list[Difference] = field(default_factory=list)
    """Where greedy output differs."""

    @property
    def walk_tau(self) -> float:
        """Acceptance length of the serving walk."""
        return self.walked / self.cycles if self.cycles else 1.0

    @property
    def anchor_tau(self) -> float:
        """Accepted drafts + 1, averaged over every position of the output."""
        return self.anchor_accepted / self.anchors if self.anchors else 1.0

    @property
    def verifying_seconds(self) -> float:
        """Speculative time without drafting."""
        return self.speculative_seconds - self.drafting_seconds

    @property
    def speedup(self) -> float:
        """Plain time over speculative time, both behind the prefill."""
        return self.plain_seconds / self.speculative_seconds if self.speculative_seconds else 1.0

    def summary(self) -> str:
        """A few words for the progress line."""
        rate = self.tokens / self.speculative_seconds if self.speculative_seconds else 0.0
        return f"{rate:.1f} tokens/s, walk tau {self.walk_tau:.2f}, speed-up {self.speedup:.2f}x"

    def _rate(self, seconds: float) -> float | None:
        return self.tokens / seconds if seconds else None

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
        """Everything, JSON-ready; null where nothing was measured."""
        counts = {name: value for name, value in asdict(self).items() if name != "accepted"}
        return counts | {
            "drafting_seconds": self.drafting_seconds or None,
            "verifying_seconds": self.verifying_seconds if self.drafting_seconds else None,
            "plain_tokens_per_s": self._rate(self.plain_seconds),
            "tokens_per_s": self._rate(self.speculative_seconds),
            "walk_tau": self.walk_tau,
            "anchor_tau": self.anchor_tau if self.anchors else None,
            "speedup": self.speedup if self.plain_seconds else None,
            "equal": self.equal if self.plain_seconds else None,
            "accepted_by_position": self.by_position(slots),
        }


@dataclass(frozen=True)
class EvalReport:
    """Figures over all prompts, by kind, and by length of the prompt."""

    total: KindReport
    kinds: dict[str, KindReport]
    block_size: int
    lengths: dict[int, KindReport] = field(default_factory=dict)
    """By the power of two that the prompt's tokens do not exceed."""
    greedy: bool = True
    """With a temperature, outputs are not expected to be equal."""

    def parts(self, prompt: Prompt) -> list[KindReport]:
        """Where a prompt counts."""
        edge = length_edge(len(prompt.input_ids))
        kind = self.kinds.setdefault(prompt.kind or "all", KindReport())
        return [self.total, kind, self.lengths.setdefault(edge, KindReport())]

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        slots = self.block_size - 1
        kinds = {kind: report.figures(slots) for kind, report in self.kinds.items()}
        lengths = {str(edge): report.figures(slots) for edge, report in sorted(self.lengths.items())}
        return self.total.figures(slots) | {
            "block_size": self.block_size,
            "greedy": self.greedy,
            "kinds": kinds,
            "lengths": lengths,
        }

    def rows(self) -> list[list[str]]:
        """Header, then a row a kind, a row a length of prompts, and one for all together."""
        groups = list(self.kinds.items()) if len(self.kinds) > 1 else []
        groups.sort()
        if len(self.lengths) > 1:
            groups += [(f"<= {edge} tokens", report) for edge, report in sorted(self.lengths.items())]
        head = ["prompts", "n", "tokens", "walk tau", "anchor tau", "plain s", "spec. s", "drafting"]
        groups.append(("all", self.total))
        return [[*head, "speed-up", "equal"], *(self._row(*group) for group in groups)]

    def _row(self, name: str, r: KindReport) -> list[str]:
        """A row; a dash where nothing was measured (a server does not say how long it drafts)."""
        drafting = r.drafting_seconds / r.speculative_seconds if r.speculative_seconds else 0.0
        return [
            name,
            str(r.prompts),
            f"{r.tokens:,}",
            f"{r.walk_tau:.2f}",
            f"{r.anchor_tau:.2f}" if r.anchors else "-",
            f"{r.plain_seconds:.1f}" if r.plain_seconds else "-",
            f"{r.speculative_seconds:.1f}",
            f"{drafting:.0%}" if r.drafting_seconds else "-",
            f"{r.speedup:.2f}x" if r.plain_seconds else "-",
            f"{r.equal}/{r.prompts}" if self.greedy and r.plain_seconds else "-",
        ]

    def table(self) -> str:
        """For the terminal."""
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, *self.notes()])

    def markdown(self) -> str:
        """The same for a page."""
        head, *rows = ["| " + " | ".join(row) + " |" for row in self.rows()]
        rule = "|" + "---|" * len(self.rows()[0])
        return "\n".join([head, rule, *rows, "", *self.notes()])

    def notes(self) -> list[str]:
        """Lines below the table."""
        positions = " ".join(f"{share:.2f}" for share in self.total.by_position(self.block_size - 1))
        lines = [f"accepted by position in the block: {positions}"]
        if differences := self.total.differences if self.greedy else []:
            ties = sum(difference.near_tie for difference in differences)
            widest = max(abs(difference.gap) for difference in differences)
            lines.append(
                f"outputs that differ: {len(differences)}, of which {ties} part at a near-tie of the target "
                f"(widest gap {widest:.3g} in logits)"
            )
        return lines
