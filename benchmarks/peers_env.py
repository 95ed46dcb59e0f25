"""The environment of the peers that benchmarks compare with: `.venv-bench`, beside this project's own.

It uses the torch, numpy and transformers of this project's environment and is made on the first run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / ".venv-bench"
STREAMING = "mosaicml-streaming==0.13.0"


def bench_python(packages: Mapping[str, Sequence[str]]) -> Path:
    """The interpreter of that environment, with these packages, by a name for each group.

    They are installed without dependencies, which would pull another torch, or clients of clouds that a
    benchmark never calls. A group that cannot be installed is reported, and its peers fail by themselves.
    """
    python, record = VENV / "bin" / "python", VENV / "installed.json"
    if not record.exists():
        _make(python)
    installed = json.loads(record.read_text()) if record.exists() else {}
    for name, group in packages.items():
        if installed.get(name) == list(group):
            continue
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, *group], check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: cannot be installed: {last_line(done.stderr)}", file=sys.stderr)
        else:
            installed[name] = list(group)
    record.write_text(json.dumps(installed))
    return python


def last_line(text: str) -> str:
    """Where a traceback or an installer says what is wrong."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def _make(python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    ours = sysconfig.get_paths()["purelib"]
    (Path(purelib) / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
