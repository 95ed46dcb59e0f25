"""Starting serving clients, which live in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.loop import generate
from dflash.drafter import Drafter
from dflash.target import Target

ROOT = Path(__file__).parents[2]


def run_client(name: str, job: dict[str, Any], folder: Path, *args: str, timeout: float = 900) -> Path:
    """Run `NAME_client.py ARGS JOB` in the environment of that name; returns the file it wrote.

    Args:
        name: `zlab` or `vllm`.
        job: What the script is to do; JSON-ready.
        folder: For the job and the result.
        args: Stand before the job.
        timeout: Seconds.
    """
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is missing; `make serving-test` installs it (tests/serving/setup_clients.sh)")
    out = folder / f"{name}-{'-'.join(args)}.out"
    path = out.with_suffix(".json")
    path.write_text(json.dumps(job | {"out": str(out)}))
    # Neither our package nor this process's settings may reach the client.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))
    }
    script = Path(__file__).with_name(f"{name}_client.py")
    done = subprocess.run(
        [python, script, *args, path],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,  # its output says more than a return code
    )
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return out


def decode_all(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> list[Generation]:
    """Our own greedy speculative decoding of these prompts."""
    return [generate(target, drafter, torch.tensor(prompt), DecodeConfig(tokens)) for prompt in prompts]


def acceptance_length(generations: list[Generation]) -> float:
    """Tokens a verification cycle adds, pooled over prompts."""
    counts = [count for generation in generations for count in generation.accepted]
    return sum(counts) / len(counts)
