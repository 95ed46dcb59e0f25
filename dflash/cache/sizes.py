"""How much a codec will take, before anything is written."""

from __future__ import annotations

from dflash.cache.manifest import BYTES_PER_VALUE

LOSSLESS_SHARE = 0.69
"""Of raw: what SmolLM2 and `benchmarks/codec.py` give. It depends on the states, so it is an estimate."""
ESCAPED_SHARE = 0.005
"""Rows that int8 keeps exactly: about one token of a sample and layer. An estimate as well."""
ESTIMATED = ("lossless", "int8")
"""Codecs whose size depends on the states."""


def bytes_per_token(codec: str, taps: int, hidden_size: int, dtype: str) -> int:
    """Bytes of one token's stored states, [taps, hidden_size]; an estimate for the codecs in `ESTIMATED`."""
    raw = taps * hidden_size * BYTES_PER_VALUE[dtype]
    coded = taps * (hidden_size + 2)  # one byte a value, and a scale
    escaped = ESCAPED_SHARE * taps * (hidden_size + 4)
    return round({"raw": raw, "lossless": LOSSLESS_SHARE * raw, "int8": coded + escaped, "fp8": coded}[codec])
