"""Put the table that `make demo` left in demo/table.txt into the README, with the machine it ran on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- demo-table -->", "<!-- /demo-table -->"


def processor() -> str:
    """Model name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found.group(1).strip() if found else platform.machine()


def main() -> None:
    """Replace what stands between the two marks."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    table = (ROOT / "demo" / "table.txt").read_text().rstrip()
    machine = f"({processor()}, {os.cpu_count()} cores, no GPU; `make demo`)"
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    readme.write_text(f"{head}{BEGIN}\n```\n{table}\n```\n{machine}\n{END}{tail}")


if __name__ == "__main__":
    main()
