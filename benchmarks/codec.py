"""What each codec makes of a cache's states: size, error, speed.

    python benchmarks/codec.py CACHE [--tokens N]

`CACHE` holds exact states (codec raw or lossless). Samples are read until there are N tokens, encoded and
decoded one by one on the CPU; GB/s count raw bytes. Sizes are of whole extents, so scales, escaped rows and
padding are in them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from dflash.cache.calibration import calibration_rows, with_codec
from dflash.cache.codec import codec_of, decoded
from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.quantised import CodedStates
from dflash.cache.reader import CacheReader
from dflash.cache.scales import CALIBRATION_LENGTH
from dflash.errors import CacheError


def load(reader: CacheReader, tokens: int) -> list[torch.Tensor]:
    """States [T, K, H] of the first samples."""
    states: list[torch.Tensor] = []
    for row in range(len(reader.index)):
        if sum(map(len, states)) >= tokens:
            break
        states.append(reader.read([row])[0].hidden_states)
    return states


def measure(codec: Any, states: list[torch.Tensor]) -> dict[str, Any]:
    """Encode and decode all samples; errors are medians over rows, by tap and in all."""
    raw = sum(sample.nbytes for sample in states)
    started = time.perf_counter()
    extents = [torch.from_numpy(codec.encode(sample)) for sample in states]
    encoded = time.perf_counter()
    parsed = [codec.parse(extent, len(sample)) for extent, sample in zip(extents, states, strict=True)]
    found = [decoded(one) for one in parsed]
    done = time.perf_counter()
    pairs = list(zip(found, states, strict=True))
    rows = [
        (new.float() - old.float()).norm(dim=-1) / old.float().norm(dim=-1).clamp_min(1e-30)
        for new, old in pairs
    ]
    errors = torch.cat(rows)  # [T, K]
    coded = [one for one in parsed if isinstance(one, CodedStates)]
    escaped = sum(len(one.escaped) for one in coded if one.escaped is not None)
    return {
        "ratio": sum(extent.nbytes for extent in extents) / raw,
        "relative_error": float(errors.median()),
        "by_tap": [round(value, 5) for value in errors.median(dim=0).values.tolist()],
        "escaped": escaped / errors.numel(),
        "bit_exact": all(torch.equal(new.view(torch.int16), old.view(torch.int16)) for new, old in pairs),
        "encode_gb_s": raw / (encoded - started) / 1e9,
        "decode_gb_s": raw / (done - encoded) / 1e9,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """For the terminal."""
    heads = ("of raw", "rel. error", "escaped", "exact", "encode GB/s", "decode GB/s")
    lines = [f"{'codec':<10}" + "".join(f"{head:>13}" for head in heads)]
    for name, one in results.items():
        exact = "yes" if one["bit_exact"] else "no"
        lines.append(
            f"{name:<10}{one['ratio']:>13.4f}{one['relative_error']:>13.4f}{one['escaped']:>13.2%}{exact:>13}"
            f"{one['encode_gb_s']:>13.2f}{one['decode_gb_s']:>13.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    with CacheReader(options.cache) as reader:
        identity = reader.manifest.identity
        if identity.codec in LOSSY_CODECS or identity.dtype != "bfloat16":
            raise CacheError(f"{options.cache} must hold exact bfloat16 states")
        states = load(reader, options.tokens)
        rows = calibration_rows(reader.index.ids, reader.index.lengths)
        first = [reader.read([row])[0].hidden_states[:CALIBRATION_LENGTH] for row in rows.tolist()]
        manifests = {name: with_codec(reader.manifest, name, torch.cat(first)) for name in CODECS}
    results = {name: measure(codec_of(manifest), states) for name, manifest in manifests.items()}
    print(table(results))
    tokens, threads = sum(map(len, states)), torch.get_num_threads()
    print(json.dumps({"cache": str(options.cache), "tokens": tokens, "threads": threads, "codecs": results}))


if __name__ == "__main__":
    main()
