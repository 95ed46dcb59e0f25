"""Memory that a training process keeps instead of giving it back after every tensor."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, sys, torch
from dflash.train.memory import keep_memory
torch.set_num_threads(1)
told = sys.argv[1] == "keep" and keep_memory()
for turn in range(30):
    if turn == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> tuple[bool, int]:
    """Whether memory is kept, and pages fetched anew by ten tensors of 64 MiB, one after another."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], check=True, capture_output=True, text=True, timeout=60
    )
    told, pages = done.stdout.split()
    return told == "True", int(pages)


def test_large_tensors_of_one_step_lie_where_those_of_the_last_one_did():
    told, kept = faults("keep")
    if told:
        assert kept < faults("give back")[1] / 10
