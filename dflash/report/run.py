"""`dflash report`: from folders to one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflash.errors import ConfigError
from dflash.files import publish_bytes
from dflash.report.gather import RunSource, Sources, gather
from dflash.report.page import page
from dflash.report.texts import RunTexts

_SUFFIXES = (".html", ".htm")


def write_report(runs: Sequence[Path], out: Path, *, evals: Sequence[Path] = (), samples: int = 3) -> None:
    """Write the page about these runs.

    Args:
        runs: Their folders.
        out: The file, ending in `.html`; replaced if it is there.
        evals: Results of `dflash eval --json`.
        samples: Texts of each run that are shown with their accepted runs; 0 loads neither cache nor drafter.

    Raises:
        ConfigError: a folder is no run, a file is no result, or `out` cannot be written.
    """
    if out.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--out {out} must end in .html")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if samples < 0:
        raise ConfigError(f"--samples is {samples}; it must be at least 0")
    sources = gather(runs, evals)
    sources = Sources([_with_texts(source, samples) for source in sources.runs], sources.evaluations)
    try:
        publish_bytes(out, page(sources).encode())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error


def _with_texts(source: RunSource, count: int) -> RunSource:
    if not count:
        return replace(source, texts=RunTexts(note="No sample texts were asked for."))
    from dflash.report.samples import run_texts

    return replace(source, texts=run_texts(source.run, count))
