"""Put figures into the README, from what `make demo` left in demo.

They are its table, what `--plan` prints, and the length mixes that `dflash sample` draws from its cache.

Run it behind `make demo`, on the machine that ran it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAN = (
    "extract --target demo/target --data dflash/demo/data/train.jsonl --out demo/other "
    "--max-length 1536 --bucket-edges 128,256,512,1024,1536 --plan"
)
QUEUE = "compose=bucketed,tokens-per-batch=2048"
PICTURE = "docs/demo-mix.png"
SAMPLE = [
    "sample demo/cache --producer longest-first --draws 420",
    f"--plot {PICTURE}",
    f"--settings sampler=fifo,min-ready=10,max-ready=60,{QUEUE}",
    f"--settings sampler=shuffle,min-ready=30,max-ready=90,{QUEUE}",
    "--settings sampler=stratified,compose=mixed,tokens-per-batch=2048",
]


def processor() -> str:
    """Model name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.machine()


def plan() -> str:
    """What `dflash extract --plan` prints for the demo's corpus, behind its command line."""
    words = [sys.executable, "-m", "dflash", *PLAN.split()]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return f"$ dflash {PLAN}\n{printed.rstrip()}"


def sample() -> str:
    """Draw the length mixes of the demo's cache; the command line that did it, and the picture."""
    words = [sys.executable, "-m", "dflash", *" ".join(SAMPLE).split()]
    subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    command = " \\\n    ".join([f"$ dflash {SAMPLE[0]} {SAMPLE[1]}", *SAMPLE[2:]])
    what = "The old queue drifts from long to short samples, a deeper one less so; the quota stays level"
    return f"```\n{command}\n```\n\n![{what}]({PICTURE})"


def between(text: str, mark: str, content: str) -> str:
    """The text with `content` between `<!-- mark -->` and `<!-- /mark -->`."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Write all blocks."""
    readme = ROOT / "README.md"
    table = (ROOT / "demo" / "table.txt").read_text().rstrip()
    machine = f"({processor()}, {os.cpu_count()} cores, no GPU; `make demo`, one run)"
    text = between(readme.read_text(), "demo-table", f"```\n{table}\n```\n{machine}")
    text = between(text, "plan", f"```\n{plan()}\n```")
    readme.write_text(between(text, "sample", sample()))


if __name__ == "__main__":
    main()
