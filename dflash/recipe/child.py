"""A stage's process: `python -m dflash.recipe.child PARENT extract ...` is `dflash extract ...`.

Where the run that started it is killed, it is told to stop, saves what it has, and ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the system send SIGTERM to this process when its parent ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv = ["dflash", *sys.argv[2:]]
    runpy.run_module("dflash", run_name="__main__", alter_sys=True)
