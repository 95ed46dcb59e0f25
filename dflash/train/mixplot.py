"""Pictures of a mix over time. matplotlib is an extra and is imported only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dflash.errors import ConfigError
from dflash.files import publish_bytes
from dflash.train.compare import WINDOW, FloatArray, window_shares
from dflash.train.pools import IntArray

FORMATS = (".png", ".svg", ".html")
_MOST_POINTS = 500
_PAGE = """<!doctype html>
<html>
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
{svg}
</body>
</html>
"""


@dataclass(frozen=True, eq=False)
class Panel:
    """One setting of a picture."""

    label: str
    draws: IntArray
    """Tokens by micro-batch and bucket, `[draws, buckets]`."""
    quota: FloatArray
    """Share that each bucket is owed, `[buckets]`."""


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before the work for it is done.

    Raises:
        ConfigError: an unknown ending, no such folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path} must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    new_figure(1.0)


def plot_mix(path: Path, panels: Sequence[Panel], edges: Sequence[int]) -> None:
    """Draw the share of each bucket over time, one panel a setting, quotas as dashed lines.

    Raises:
        ConfigError: as `check_plot`.
    """
    check_plot(path)
    figure = new_figure(1.1 + 1.9 * len(panels))
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    colours = bucket_colours(len(edges))
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, colours)
    axes[-1].set_xlabel(f"micro-batches drawn (share of the tokens of the last {WINDOW})")
    names = [f"to {edge:,}" for edge in edges]
    columns = -(-(len(edges) + 1) // -(-(len(edges) + 1) // 6))  # rows of at most six, equally long
    figure.legend(*_legend(axes[0], names), loc="outside upper center", ncols=columns, frameon=False)
    save_figure(path, figure)


def save_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure as the ending of `path` says; a page holds the drawing itself."""
    from matplotlib import rc_context

    buffer = BytesIO()
    kind = path.suffix.lower().lstrip(".")
    # Without a date and with fixed names, so that the same figures give the same file.
    metadata = {} if kind == "png" else {"Date": None}
    with rc_context({"svg.hashsalt": "dflash"}):
        figure.savefig(buffer, format="svg" if kind == "html" else kind, dpi=150, metadata=metadata)
    data = buffer.getvalue()
    if kind == "html":
        svg = data.decode()
        data = _PAGE.format(title=path.stem, svg=svg[svg.index("<svg") :]).encode()
    publish_bytes(path, data)


def bucket_colours(count: int) -> list[Any]:
    """Colours of the buckets, short to long, dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](place) for place in np.linspace(0.05, 0.95, count)]


def new_figure(height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}); install it with `pip install 'dflash-trainer[plot]'`"
        ) from error
    return Figure(figsize=(9, height), layout="constrained")


def _draw_panel(axis: Any, panel: Panel, colours: Sequence[Any]) -> None:
    window = min(WINDOW, len(panel.draws))
    shares = window_shares(panel.draws, window)
    every = max(len(shares) // _MOST_POINTS, 1)
    places = np.arange(0, len(shares), every)
    axis.stackplot(places + window, shares[places].T, colors=colours, linewidth=0)
    for border in np.cumsum(panel.quota)[:-1]:
        axis.axhline(border, color="white", linewidth=2.2, alpha=0.6)
        axis.axhline(border, color="black", linewidth=0.9, linestyle=(0, (4, 3)))
    axis.set(ylim=(0, 1), xlim=(window, window + len(shares) - 1), ylabel="share of tokens")
    axis.set_title(panel.label, loc="left", fontsize=9)


def _legend(axis: Any, names: Sequence[str]) -> tuple[list[Any], list[str]]:
    return [*axis.collections, axis.lines[1]] if axis.lines else list(axis.collections), [*names, "quota"]
