"""Memory that a training process keeps instead of giving it back after every tensor."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, torch
from dflash.train.memory import keep_memory
torch.set_num_threads(1)
def pages():
    for turn in range(12):  # at first small tensors come to lie between the places of large ones
        if turn == 9:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(pages(), keep_memory(), pages())
"""


def test_large_tensors_of_one_step_lie_where_those_of_the_last_one_did():
    """Pages fetched anew by three tensors of 40 MiB, one after another, before memory is kept and after."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], check=True, capture_output=True, text=True, timeout=60
    )
    given_back, told, kept = done.stdout.split()
    if told == "True":
        assert int(kept) < int(given_back) / 10
