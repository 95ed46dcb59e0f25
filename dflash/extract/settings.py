"""What `dflash extract` is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.errors import ConfigError
from dflash.extract.conversation import Thinking
from dflash.extract.corpus import CorpusConfig
from dflash.taps import check_taps, default_taps
from dflash.target import DTYPES

_DEFAULT_TAPS = 5
_FIRST_EDGE = 256
ORDERS = ("longest-first", "mixed")


@dataclass(frozen=True)
class ExtractConfig:
    """What `dflash extract` is asked to do."""

    target: str
    """Folder or hub name."""
    data: tuple[str, ...]
    out: Path
    taps: tuple[int, ...] | None = None
    """0-based layers; five evenly spread ones when None."""
    max_length: int = 3072
    """Tokens a sample is cut at."""
    bucket_edges: tuple[int, ...] | None = None
    """Ascending, the last equal to `max_length`; 256, doubled up to `max_length`, when None."""
    min_supervised: int = 2
    tokens_per_batch: int = 8192
    """Tokens of one forward pass, padding included."""
    dtype: str = "bfloat16"
    shard_bytes: int = 256 << 20
    thinking: Thinking = "keep"
    last_turn_only: bool = False
    column_map: tuple[tuple[str, str], ...] = ()
    trust_remote_code: bool = False
    append: bool = False
    """Add the data to a finished cache of another corpus."""
    max_bad: float = 0.001
    """Share of the samples that may be left out because of NaN or infinity."""
    tp: int = 1
    """Consecutive ranks that hold one replica of the target."""
    force: bool = False
    """Start even where the disk cannot hold the result."""
    order: str = "longest-first"
    """Of the work: one of `ORDERS`. It changes no byte of any sample."""
    codec: str = "raw"
    """How hidden states are stored."""
    max_divergence: float = 0.02
    """Nats a token by which a lossy codec may change the target's output at any tap."""

    def __post_init__(self) -> None:
        """Check what can be checked without the target.

        Raises:
            ConfigError: a value is out of its range; names it.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        _check_codec(self)
        edges = self.edges
        if list(edges) != sorted(set(edges)) or edges[0] < 1 or edges[-1] != self.max_length:
            raise ConfigError(
                f"--bucket-edges {','.join(map(str, edges))} must be ascending and end with "
                f"--max-length {self.max_length}"
            )
        if self.tokens_per_batch < 1 or self.shard_bytes < 1:
            raise ConfigError(
                f"--tokens-per-batch {self.tokens_per_batch} and the shard size {self.shard_bytes} "
                "must be at least 1"
            )
        if not 0 <= self.max_bad <= 1:
            raise ConfigError(f"--max-bad {self.max_bad} is a share of the samples, from 0 to 1")
        if self.order not in ORDERS:
            raise ConfigError(f"--order {self.order} is not one of {', '.join(ORDERS)}")
        if self.tp < 1:
            raise ConfigError(f"--tp {self.tp} must be at least 1")
        self.corpus  # noqa: B018 - checks its own fields

    @classmethod
    def from_flags(cls, *, shard_mb: int = 256, **flags: Any) -> ExtractConfig:
        """The configuration for command-line flags; the shard size is given in MiB."""
        return cls(shard_bytes=shard_mb << 20, **flags)

    @property
    def edges(self) -> tuple[int, ...]:
        """The bucket edges, chosen or given."""
        if self.bucket_edges:
            return self.bucket_edges
        edges = [_FIRST_EDGE]
        while edges[-1] * 2 < self.max_length:
            edges.append(edges[-1] * 2)
        return (*(edge for edge in edges if edge < self.max_length), self.max_length)

    @property
    def corpus(self) -> CorpusConfig:
        """How the corpus is read and cut."""
        return CorpusConfig(
            self.data,
            self.max_length,
            self.min_supervised,
            self.thinking,
            self.last_turn_only,
            self.column_map,
        )

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """The taps, chosen or given, for a target of so many layers.

        Raises:
            ConfigError: a tap is not a layer of it.
        """
        taps = self.taps or default_taps(num_layers, _DEFAULT_TAPS)
        check_taps(taps, num_layers)
        return taps

    def plain(self) -> dict[str, Any]:
        """For the run's record: every field, with the bucket edges that hold."""
        return asdict(self) | {"out": str(self.out), "bucket_edges": self.edges}


def _check_codec(config: ExtractConfig) -> None:
    if config.codec not in CODECS:
        raise ConfigError(f"--codec {config.codec!r} is not one of {', '.join(CODECS)}")
    if config.codec != "raw" and config.dtype != "bfloat16":
        raise ConfigError(f"--codec {config.codec} stores bfloat16; --dtype {config.dtype} needs --codec raw")
    if config.codec in LOSSY_CODECS and config.tp > 1:
        raise ConfigError(
            f"--codec {config.codec} first runs the whole target on one device, and --tp {config.tp} splits "
            "it; extract in the codec raw or lossless, then use `dflash cache transcode`"
        )
    if not config.max_divergence > 0:
        raise ConfigError(f"--max-divergence {config.max_divergence} must be above 0 nats")
