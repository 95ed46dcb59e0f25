"""Pieces of the page: a figure with its chart, legend and table; a table; a list of facts; a section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dflash.report.axes import number
from dflash.report.charts import AreaChart, LineChart, area_svg, line_svg
from dflash.report.colours import RUNS
from dflash.report.markup import Html, tag
from dflash.report.series import MOST_ROWS, Curve, FloatArray, table_places, value_at


def section(name: str, title: str, *content: object) -> Html:
    """A part of the page that the navigation knows."""
    heading = f"{name}-heading"
    return tag("section", tag("h2", title, id=heading), content, id=name, aria_labelledby=heading)


def note(text: str) -> Html:
    """A remark."""
    return tag("p", text, class_="note")


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table whose first column names the rows; it scrolls by itself where the screen is narrow."""
    columns = tag("tr", [tag("th", name, scope="col") for name in head])
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    made = tag("table", tag("caption", caption), tag("thead", columns), tag("tbody", body))
    return tag("div", made, class_="scroll", role="region", tabindex=0, aria_label=caption)


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Figures with their names, large."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs], class_="facts")


def lines(chart: LineChart, remark: str = "") -> Html:
    """A figure of curves; a remark that nothing was recorded where no curve has a value."""
    if not chart.shown:
        return note(f"{chart.title}: nothing recorded.")
    drawn = [curve for curve in chart.shown if not curve.faint]
    places = table_places(drawn)
    rows = [
        [_x_text(chart, float(x)), *(number(value_at(curve, float(x))) for curve in drawn)] for x in places
    ]
    legend = [(curve.label, _key(curve)) for curve in drawn]
    numbers = table(chart.title, [chart.x_label, *(curve.label for curve in drawn)], rows)
    return _figure(chart, line_svg(chart, places), legend if len(legend) > 1 else [], numbers, remark)


def areas(chart: AreaChart, remark: str = "") -> Html:
    """A figure of shares."""
    chosen = np.unique(np.linspace(0, len(chart.x) - 1, MOST_ROWS).round().astype(int))
    rows: list[list[str]] = [
        [number(float(chart.x[n])), *(f"{share:.1%}" for share in chart.shares[n])] for n in chosen
    ]
    rows.append(["quota", *(f"{share:.1%}" for share in chart.owed)])
    legend = [(label, f"filled c{n % RUNS}") for n, label in enumerate(chart.labels)]
    numbers = table(chart.title, [chart.x_label, *chart.labels], rows)
    marks: FloatArray = chart.x[chosen]
    return _figure(chart, area_svg(chart, marks), legend, numbers, remark)


def _figure(
    chart: LineChart | AreaChart, svg: Html, legend: list[tuple[str, str]], numbers: Html, remark: str
) -> Html:
    keys = [tag("li", tag("span", class_=f"key {kind}", aria_hidden="true"), label) for label, kind in legend]
    return tag(
        "figure",
        tag("figcaption", tag("strong", chart.title), f" {remark}" if remark else None),
        tag("ul", keys, class_="legend") if keys else None,
        svg,
        tag("output", class_="readout"),
        tag(
            "details",
            tag("summary", "Data as a table", tag("span", f": {chart.title}", class_="unseen")),
            numbers,
        ),
        id=chart.name,
    )


def _key(curve: Curve) -> str:
    """Classes of the curve's sign in a legend."""
    dots = " dots" if curve.dots else ""
    return f"c{curve.colour % RUNS} d{curve.colour // 2 % 3}{dots}"


def _x_text(chart: LineChart, x: float) -> str:
    return chart.x_names[int(x)] if chart.x_names else number(x)
