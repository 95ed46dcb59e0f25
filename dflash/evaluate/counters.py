"""What a server says at `/metrics` about its speculative decoding.

vLLM counts drafts, drafted and accepted tokens, these also by place in the block; differences of two readings
are exact. SGLang shows a gauge: the mean acceptance length of its last batches.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'\bposition="(\d+)"')
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_GAUGE = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Counters:
    """One reading, summed over the server's engines."""

    drafts: int | None = None
    """Blocks drafted; None where the server does not count them."""
    drafted: int = 0
    accepted: int = 0
    by_position: dict[int, int] = field(default_factory=dict)
    """Accepted drafts by place behind the anchor, from 1."""
    gauge: float | None = None
    """Tokens a verification pass added lately; None where the server does not say."""
    running: int = 0
    """Requests under way."""

    @property
    def speculative(self) -> bool:
        """Whether the server reports any drafting."""
        return self.drafts is not None or self.gauge is not None

    def since(self, before: Counters) -> Counters:
        """What has been counted since an earlier reading; the gauge is that of now."""
        if self.drafts is None or before.drafts is None:
            return self
        by_position = {
            place: count - before.by_position.get(place, 0) for place, count in self.by_position.items()
        }
        return Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            by_position,
            self.gauge,
            self.running,
        )

    @property
    def block_size(self) -> int | None:
        """B, the anchor included; None where nothing was drafted or counted."""
        return round(self.drafted / self.drafts) + 1 if self.drafts else None

    def lengths(self) -> Counter[int]:
        """How many drafts accepted exactly so many tokens."""
        if not self.drafts or not self.by_position:
            return Counter()
        reached = [self.drafts, *(count for _, count in sorted(self.by_position.items())), 0]
        return Counter({n: reached[n] - reached[n + 1] for n in range(len(reached) - 1)})


def parse_counters(text: str) -> Counters:
    """Read the text of `/metrics` (the Prometheus format); lines that say something else are passed over."""
    sums: dict[str, float] = defaultdict(float)
    gauges: list[float] = []
    by_position: Counter[int] = Counter()
    for line in text.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        name, labels, value = found[1], found[2] or "", _number(found[3])
        sums[name] += value
        if name == _GAUGE:
            gauges.append(value)
        elif name == _BY_POSITION and (place := _POSITION.search(labels)):
            by_position[int(place[1]) + 1] += int(value)
    used = [value for value in gauges if value > 0]  # an idle rank shows zero
    return Counters(
        int(sums[_DRAFTS]) if _DRAFTS in sums else None,
        int(sums[_DRAFTED]),
        int(sums[_ACCEPTED]),
        dict(by_position),
        sum(used) / len(used) if used else (0.0 if gauges else None),
        int(sum(sums[name] for name in _RUNNING)),
    )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value - value == 0 else 0.0  # NaN and infinity are no counts
