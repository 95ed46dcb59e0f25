"""Sections whose figures are curves: loss, length mix, window, acceptance, throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash.report.axes import NONE
from dflash.report.charts import AreaChart, LineChart
from dflash.report.figure import areas, lines, note, section, table
from dflash.report.gather import RunSource, Sources
from dflash.report.markup import Html, tag
from dflash.report.series import MOST_POINTS, Curve, FloatArray, floats, running_mean, running_sum

_DRAWS = 30
"""Micro-batches over which a mix is shown, as in `dflash compare` and the log."""
Value = Callable[[dict[str, Any]], "float | None"]


def loss(sources: Sources) -> Html:
    """The training loss."""
    chart = LineChart(
        "loss-chart", "Training loss", "step", "loss", _smoothed(sources, lambda s: s["loss"]), log=True
    )
    norms = LineChart(
        "norm-chart",
        "Gradient norm before clipping",
        "step",
        "norm",
        _smoothed(sources, lambda s: s.get("grad_norm")),
        log=True,
    )
    remark = "Running mean of up to 20 steps; the steps themselves are drawn lightly."
    return section("loss", "Loss", _grid(lines(chart, remark), lines(norms, remark)))


def mix(sources: Sources) -> Html:
    """What each run drew of each length bucket, against its quota."""
    figures = [_mix_chart(number, source) for number, source in enumerate(sources.runs)]
    off = LineChart(
        "off-chart",
        "Distance of the mix from its quota",
        "step",
        "total variation",
        [_curve(number, s, lambda step: step["mix"]["variation"][0]["last"]) for number, s in _each(sources)],
        zero=True,
    )
    remark = f"Half the sum of differences over the last {_DRAWS} micro-batches: 0 is on quota."
    tables = [_mix_table(source) for source in sources.runs]
    return section("mix", "Length mix", _grid(*figures, lines(off, remark)), tables)


def _mix_chart(number: int, source: RunSource) -> Html:
    run, edges = source.run, source.run.bucket_edges
    drawn = np.array([step["tokens_by_bucket"] for step in run.steps], np.float64)
    per_step = int(run.config.get("sampler", {}).get("batches_per_step", 1))
    recent = running_sum(drawn, -(-_DRAWS // per_step))
    every = max(len(recent) // MOST_POINTS, 1)
    places = np.arange(len(recent) - 1, -1, -every)[::-1]
    chart = AreaChart(
        f"mix-chart-{number}",
        f"Length mix of {source.label}",
        "step",
        "share of tokens",
        _steps(source)[places],
        recent[places] / recent[places].sum(axis=1, keepdims=True),
        np.array(run.steps[-1]["mix"]["quota"]),
        [f"to {edge:,}" for edge in edges],
    )
    return areas(
        chart,
        f"Tokens of the last {_DRAWS} micro-batches by bucket; dashed: where the quota puts the borders.",
    )


def _mix_table(source: RunSource) -> Html:
    last = source.run.steps[-1]
    passes = last.get("passes_by_bucket") or [None] * len(source.run.bucket_edges)
    rows = [
        [f"to {edge:,}", f"{share:.2%}", f"{owed:.2%}", NONE if seen is None else f"{seen:.2f}"]
        for edge, share, owed, seen in zip(
            source.run.bucket_edges, last["mix"]["shares"], last["mix"]["quota"], passes, strict=True
        )
    ]
    head = ["bucket, tokens", "share of the whole run", "quota", "passes over the bucket"]
    return table(f"Length mix of {source.label}, whole run", head, rows)


def window(sources: Sources) -> Html:
    """How full the window of samples was, and how long steps waited for data."""
    levels = sorted({(name, value) for s in sources.runs for name, value in _limits(s)})
    fill = LineChart(
        "window-chart",
        "Window fill",
        "step",
        "micro-batches",
        [_curve(n, s, lambda step: step.get("window")) for n, s in _each(sources)],
        levels=levels,
        zero=True,
    )
    waits = LineChart(
        "wait-chart",
        "Waiting for data",
        "step",
        "seconds a step",
        [_curve(n, s, lambda step: step.get("waited")) for n, s in _each(sources)],
        zero=True,
    )
    shares = [[s.label, f"{_waited(s):.2%}"] for s in sources.runs]
    return section(
        "window",
        "Window and waits",
        _grid(lines(fill, "What was ready to draw from."), lines(waits)),
        table("Share of the time that was spent waiting for data", ["run", "share"], shares),
    )


def _limits(source: RunSource) -> list[tuple[str, float]]:
    sampler = source.run.config.get("sampler", {})
    names = (("min-ready", "min_ready"), ("max-ready", "max_ready"))
    return [(name, float(sampler[key])) for name, key in names if sampler.get(key) is not None]


def _waited(source: RunSource) -> float:
    waited = float(sum(step.get("waited") or 0.0 for step in source.run.steps))
    worked = float(sum(step["seconds"] for step in source.run.steps))
    return waited / max(waited + worked, 1e-9)


def acceptance(sources: Sources) -> Html:
    """By position in the block, and by length bucket."""
    by_bucket, edges = [], sources.runs[0].run.bucket_edges
    for number, s in _each(sources):
        if s.run.bucket_edges == edges:
            by_bucket.append(_points(number, f"{s.label}, training", s.run.mean_by("anchor_tau_by_bucket")))
            by_bucket.append(
                _points(number, f"{s.label}, held-out walk", s.run.walk.get("walk_tau_by_bucket") or [])
            )
    positions = _positions(sources)
    places = [str(n + 1) for n in range(max(len(curve.x) for curve in positions))]
    position = LineChart(
        "position-chart",
        "Acceptance by position in the block",
        "position behind the anchor",
        "share",
        positions,
        x_names=places,
        zero=True,
    )
    bucket = LineChart(
        "bucket-chart",
        "Tokens a cycle by length bucket",
        "sample, tokens at most",
        "tokens a cycle",
        by_bucket,
        x_names=[f"{edge:,}" for edge in edges],
    )
    others = [s.label for s in sources.runs if s.run.bucket_edges != edges]
    return section(
        "acceptance",
        "Acceptance",
        _grid(
            lines(
                position,
                "Training: share of right tokens. Held-out: share where all places before were right.",
            ),
            lines(bucket, "Training: averaged over all anchors, last tenth of the steps."),
        ),
        note(f"Not in the figure by bucket, having other buckets: {', '.join(others)}.") if others else None,
    )


def _positions(sources: Sources) -> list[Curve]:
    curves = []
    for number, s in _each(sources):
        curves.append(_points(number, f"{s.label}, training", s.run.mean_by("accuracy")))
        curves.append(_points(number, f"{s.label}, held-out", s.run.walk.get("heldout_accuracy") or []))
    for number, (label, found) in enumerate(sources.evaluations, start=len(sources.runs)):
        curves.append(_points(number, f"decoding, {label}", found["accepted_by_position"]))
    return curves


def walk(sources: Sources) -> Html:
    """The held-out walk in the course of training."""
    walks = [
        Curve(
            s.label,
            floats([line["step"] for line in s.run.evaluations]),
            floats([line["walk_tau"] for line in s.run.evaluations]),
            number,
            dots=True,
        )
        for number, s in _each(sources)
    ]
    chart = LineChart("walk-chart", "Serving walk over held-out samples", "step", "tokens a cycle", walks)
    anchors = LineChart(
        "anchor-chart",
        "Average over training anchors",
        "step",
        "tokens a cycle",
        _smoothed(sources, lambda step: step["anchor_tau"]),
    )
    none = [s.label for s in sources.runs if not s.run.evaluations]
    return section(
        "walk",
        "Held-out walk",
        _grid(lines(chart, "What a server would see."), lines(anchors, "Not what a server sees: it walks.")),
        note(f"Without a walk: {', '.join(none)}. It comes with --holdout.") if none else None,
    )


def throughput(sources: Sources) -> Html:
    """Tokens a second."""
    curves = []
    for number, s in _each(sources):
        tokens = floats([step["tokens"] for step in s.run.steps])
        seconds = floats([step["seconds"] + (step.get("waited") or 0.0) for step in s.run.steps])
        rate = running_mean(tokens) / np.maximum(running_mean(seconds), 1e-9)
        curves.append(Curve(s.label, _steps(s), rate, number))
    chart = LineChart("rate-chart", "Tokens a second", "step", "tokens/s", curves, zero=True)
    rates = LineChart(
        "lr-chart",
        "Learning rate",
        "step",
        "learning rate",
        [_curve(n, s, lambda step: step.get("lr")) for n, s in _each(sources)],
        zero=True,
    )
    return section(
        "throughput", "Throughput", _grid(lines(chart, "Waits counted; up to 20 steps."), lines(rates))
    )


def _each(sources: Sources) -> list[tuple[int, RunSource]]:
    return list(enumerate(sources.runs))


def _steps(source: RunSource) -> FloatArray:
    return floats([step["step"] for step in source.run.steps])


def _curve(number: int, source: RunSource, value: Value) -> Curve:
    return Curve(source.label, _steps(source), floats([value(step) for step in source.run.steps]), number)


def _smoothed(sources: Sources, value: Value) -> list[Curve]:
    """Each run's steps, and their running mean."""
    curves = []
    for number, source in _each(sources):
        plain = _curve(number, source, value)
        curves.append(Curve(source.label, plain.x, plain.y, number, faint=True))
        curves.append(Curve(source.label, plain.x, running_mean(plain.y), number))
    return curves


def _points(colour: int, label: str, values: Sequence[float | None]) -> Curve:
    held_out = "training" not in label
    return Curve(label, np.arange(len(values), dtype=np.float64), floats(values), colour, dots=held_out)


def _grid(*figures: Html) -> Html:
    return tag("div", figures, class_="figures")
