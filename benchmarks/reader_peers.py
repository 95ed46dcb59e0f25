"""Random reads through mosaicml-streaming, timed in its own process: `reader_peers.py FOLDER BYTES COUNT`.

Writes COUNT samples of BYTES random bytes, token ids and a mask to FOLDER, then answers each line of standard
input (a JSON list of sample numbers) with the seconds that reading them took, their states copied into one
buffer. They are read through `StreamingDataset`, as trainers do, its shards all on this machine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from mixing_peers import _module

COLUMNS = {"hidden_states": "ndarray:uint8", "input_ids": "ndarray:int32", "loss_mask": "ndarray:uint8"}


def write(folder: Path, size: int, count: int) -> None:
    """The samples, in shards of its default size."""
    writer = sys.modules["streaming.base.format"].MDSWriter
    rng = np.random.default_rng(0)
    with writer(out=str(folder), columns=COLUMNS, progress_bar=False) as out:
        for _ in range(count):
            tokens = size // 5760
            states = rng.integers(0, 256, size, np.uint8)
            out.write(
                {
                    "hidden_states": states,
                    "input_ids": np.arange(tokens, dtype=np.int32),
                    "loss_mask": np.ones(tokens, np.uint8),
                }
            )


def main() -> None:
    """Write, then serve."""
    folder, size, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    streaming = _module("streaming", "streaming.base.dataset")
    write(folder, size, count)
    data = streaming.StreamingDataset(local=str(folder), batch_size=1, shuffle=False)
    print("ready", flush=True)
    buffer = np.ones(0, np.uint8)
    for line in sys.stdin:
        rows = json.loads(line)
        if len(buffer) < len(rows) * size:
            buffer = np.ones(len(rows) * size, np.uint8)
        start = time.perf_counter()
        for place, row in enumerate(rows):
            buffer[place * size : (place + 1) * size] = data[row]["hidden_states"]
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
