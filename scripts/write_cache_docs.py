"""Put real output of each tool into docs/cache.md: `python scripts/write_cache_docs.py CACHE`.

CACHE is read, never changed; `make demo` leaves one in demo/cache. What the tools make is made beside it, so
that hard links work, and removed in the end.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner

from dflash.cache.listing import list_samples
from dflash.cache.manifest import load_manifest
from dflash.cli import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cache.md"


def commands(cache: Path) -> dict[str, list[str]]:
    """Command lines by the mark at which the page has them."""
    identity = load_manifest(cache).identity
    edges, taps = identity.bucket_edges, identity.taps
    shortest = next(list_samples(cache, sort="length"))["id"]
    kept = ",".join(map(str, sorted({taps[0], taps[len(taps) // 2], taps[-1]})))
    halved = ",".join(str(edge) for edge in sorted({edges[len(edges) // 2], edges[-1]}))
    cut = f"dflash cache drop-taps small --keep {kept} --out cut"
    return {
        "info": ["dflash cache info cache"],
        "verify": ["dflash cache verify cache", "dflash cache verify cache --deep"],
        "ls": [f'dflash cache ls cache --where "bucket = {edges[0]} and share > 0.5" --limit 5'],
        "show": [f"dflash cache show cache {shortest}"],
        "subset": [
            f'dflash cache subset cache --where "bucket = {edges[0]}" --out short',
            "dflash cache subset cache --sample 0.1 --seed 1 --out small",
        ],
        "merge": ["dflash cache merge short small --out both"],
        "rebucket": [f"dflash cache rebucket small --edges {halved} --out rebucketed"],
        "drop-taps": [cut],
        "diff": ["dflash cache diff small short"],
        "repair": [
            "dflash cache verify cut --deep",
            "dflash cache repair cut",
            cut,
            "dflash cache verify cut",
        ],
    }


def printed(line: str) -> str:
    """A command line and what it prints, as a terminal shows it."""
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(cli, words)
    if result.exit_code not in (0, 1):
        raise SystemExit(f"{line}: exit code {result.exit_code}\n{result.output}")
    code = f"\n(exit code {result.exit_code})" if result.exit_code else ""
    return f"$ {line}\n{result.stdout.rstrip()}{code}"


def flip_a_bit(cache: Path) -> None:
    """Damage the first shard of a cache in the middle."""
    shard = min((cache / "shards").glob("*/*"))
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def between(text: str, mark: str, content: str) -> str:
    """The text with `content` between `<!-- mark -->` and `<!-- /mark -->`."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def main(cache: Path, page: Path = PAGE) -> None:
    """Run all commands in their order and write what they print into the page."""
    cache, page = cache.resolve(), page.resolve()
    text = page.read_text()
    before, folder = Path.cwd(), Path(tempfile.mkdtemp(prefix="cache-docs-", dir=cache.parent))
    try:
        os.chdir(folder)
        Path("cache").symlink_to(cache)
        for mark, lines in commands(cache).items():
            if mark == "repair":
                flip_a_bit(Path("cut"))
            text = between(text, mark, "```\n" + "\n\n".join(map(printed, lines)) + "\n```")
    finally:
        os.chdir(before)
        shutil.rmtree(folder)
    page.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
