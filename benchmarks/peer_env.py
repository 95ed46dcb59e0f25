"""The environment of the trainers that ours is measured against: `.venv-peers` beside this environment.

It uses this environment's torch, numpy and transformers, and is made on the first run. The peers come without
dependencies, which would pull another torch; what their training steps import is named one by one.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / ".venv-peers"
PACKAGES = (
    "specforge==0.2.0",
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    *("openai", "jiter", "distro", "sniffio", "loguru", "pydantic-settings", "python-dotenv"),
)


def peer_python() -> Path:
    """The interpreter that has the peers.

    Raises:
        subprocess.CalledProcessError: they cannot be installed; pip has said why.
    """
    python = VENV / "bin" / "python"
    if (VENV / ".ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    show = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True)
    ours = sysconfig.get_paths()["purelib"]
    (Path(found.stdout.strip()) / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, *PACKAGES], check=True)
    (VENV / ".ready").touch()
    return python
