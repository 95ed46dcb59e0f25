"""Take the README's picture of `dflash report`: docs/report.png, the top of the page about a run.

    python scripts/write_report_screenshot.py demo/run

Needs Chromium (tests/serving/setup_browser.sh). Run it where the run finds its cache, behind `make demo`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "report.png"
SIZE = "1100,1540"
MOST_BYTES = 300_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def take(page: Path, picture: Path) -> None:
    """Let a headless Chromium draw the top of a page."""
    names = (os.environ.get("CHROMIUM", ""), *BROWSERS)
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        sys.exit("no Chromium found; tests/serving/setup_browser.sh installs it, or set CHROMIUM to its path")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words = [browser, *flags, f"--window-size={SIZE}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(words, check=True, capture_output=True, timeout=120)


def main(runs: list[str]) -> None:
    """Write the report of these runs, and the picture of it."""
    dflash = Path(sys.executable).with_name("dflash")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "report.html", Path(folder) / "report.png"
        subprocess.run([dflash, "report", *runs, "--out", page], check=True)
        take(page, picture)
        if (size := picture.stat().st_size) > MOST_BYTES:
            sys.exit(f"the picture has {size:,} bytes; the README's may have {MOST_BYTES:,}")
        shutil.copy(picture, PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
