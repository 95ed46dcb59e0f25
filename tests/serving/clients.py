"""Starting serving clients, which live in environments of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.loop import generate
from dflash.drafter import Drafter
from dflash.target import Target

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 64
"""Longest answer that vLLM gives."""


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
    script = Path(__file__).with_name(f"{name}_client.py")
    done = subprocess.run(
        [python, script, *args, path],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,  # its output says more than a return code
    )
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return out


def environment() -> dict[str, str]:
    """Neither our package nor this process's settings may reach a client."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}


@contextmanager
def vllm_server(model: Path, log: Path, *more: str, timeout: float = 900) -> Iterator[str]:
    """URL of `vllm serve MODEL` on loopback in float32; stopped, whatever happens.

    Args:
        model: Target, or an export that names it.
        log: File for what the server prints; its end is shown when the server fails.
        more: Further arguments.
        timeout: Seconds that it may take to start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
    command = [
        ROOT / ".venv-vllm" / "bin" / "vllm",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    if not command[0].exists():
        pytest.fail(
            f"{command[0]} is missing; `make serving-test` installs it (tests/serving/setup_clients.sh)"
        )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command), *settings, *more],
            cwd=log.parent,
            env=environment()
            | {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its workers can be ended with it
        )
    try:
        _wait_until_healthy(process, url, log, time.monotonic() + timeout)
        yield url
    finally:
        _end(process)


def _wait_until_healthy(process: subprocess.Popen, url: str, log: Path, deadline: float) -> None:
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            if answer.status == 200:
                return
        time.sleep(1)
    state = "is not up in time" if process.poll() is None else f"ended with {process.returncode}"
    pytest.fail(f"vllm serve {state}:\n{log.read_text(errors='replace')[-8000:]}")


def _end(process: subprocess.Popen) -> None:
    """End a server and all processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    end = time.monotonic() + 20
    while _members(process.pid) and time.monotonic() < end:
        time.sleep(0.2)
    assert not _members(process.pid), "processes of vllm serve are left"


def _members(session: int) -> list[int]:
    """Processes of a session that are not dead yet."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, theirs = path.read_text().rpartition(")")[2].split()[:4]
            if int(theirs) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def decode_all(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> list[Generation]:
    """Our own greedy speculative decoding of these prompts."""
    return [generate(target, drafter, torch.tensor(prompt), DecodeConfig(tokens)) for prompt in prompts]


def acceptance_length(generations: list[Generation]) -> float:
    """Tokens a verification cycle adds, pooled over prompts."""
    counts = [count for generation in generations for count in generation.accepted]
    return sum(counts) / len(counts)
