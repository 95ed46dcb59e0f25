"""What `make` would run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def would_run(goal: str, **environment: str) -> str:
    """The commands of a goal whose environment is installed."""
    others = ("MAKE", "MFLAGS", "OMP_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", goal]
    return subprocess.run(
        command, cwd=ROOT, env=own | environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("goal", ["unit", "test-long", "demo", "serving-test"])
def test_threads_of_a_shell_do_not_change_the_workers(goal: str) -> None:
    """`nproc` obeys these variables: with OMP_NUM_THREADS=1 the long tests had one worker."""
    assert would_run(goal, OMP_NUM_THREADS="1", OMP_THREAD_LIMIT="1") == would_run(goal)
