"""Sections of figures and texts: summary, codec, faults, decoding, samples."""

from __future__ import annotations

from typing import Any

from dflash.report.axes import NONE, number
from dflash.report.figure import facts, note, section, table
from dflash.report.gather import RunSource, Sources
from dflash.report.markup import Html, tag
from dflash.report.texts import Piece, SampleText
from dflash.train.run_comparison import FORMATS, differing, run_figures


def summary(sources: Sources) -> Html:
    """The figures that decide, and what keeps several runs apart."""
    figures = [_figures(source) for source in sources.runs]
    labels = [source.label for source in sources.runs]
    if len(figures) == 1:
        return section("summary", "Summary", facts(figures[0].items()))
    rows = [[name, *(found[name] for found in figures)] for name in figures[0]]
    return section("summary", "Summary", _differences(sources), table("Figures", ["figure", *labels], rows))


def _figures(source: RunSource) -> dict[str, str]:
    found = {
        name: NONE if value is None else FORMATS[name](value)
        for name, value in run_figures(source.run).items()
    }
    walks = source.run.evaluations
    best = max(walks, key=lambda line: float(line["walk_tau"]), default=None)
    found["best walk tau"] = f"{best['walk_tau']:.3f} at step {best['step']:,}" if best else NONE
    found["skipped steps"] = str(len(source.run.skipped))
    found["damaged samples"] = str(len(source.corrupt))
    return found


def _differences(sources: Sources) -> Html:
    different = differing([source.run for source in sources.runs])
    if not different:
        return note("No settings differ.")
    rows = [[d.key, *map(_plain, d.values)] for d in sorted(different, key=lambda d: not d.decides)]
    made = table("Settings that differ", ["setting", *(source.label for source in sources.runs)], rows)
    deciding = [d.key for d in different if d.decides]
    warning = f"Not the same cache, seed or drafter: {', '.join(deciding)}. Figures below measure that too."
    return tag("div", note(warning) if deciding else None, made)


def _plain(value: Any) -> str:
    return NONE if value is None else str(value)


def codec(sources: Sources) -> Html:
    """How hidden states are stored, and what that costs."""
    return section("codec", "Codec", [_codec(source) for source in sources.runs])


def _codec(source: RunSource) -> Html:
    if (found := source.codec) is None:
        return note(f"{source.label}: its cache {source.run.config.get('cache')} is not at hand.")
    if found.error is None:
        return note(f"{source.label}: codec {found.name}; {_exactness(found.name)}.")
    divergence = found.error.get("kl") or [None] * len(found.taps)
    columns = (found.taps, found.error["relative_error"], found.error["escaped"], divergence)
    rows = [
        [str(tap), number(error), f"{escaped:.2%}", number(kl)]
        for tap, error, escaped, kl in zip(*columns, strict=True)
    ]
    head = ["tapped layer", "relative error", "rows kept exactly", "KL of the output, nats a token"]
    caption = f"{source.label}: codec {found.name}, over {found.error['tokens']:,} tokens"
    return table(caption, head, rows)


def _exactness(name: str) -> str:
    return "states are stored exactly" if name in ("raw", "lossless") else "its error is not recorded"


def faults(sources: Sources) -> Html | None:
    """Steps that were skipped and samples that were damaged; nothing where there were none."""
    skipped = [
        [f"{s.label}, step {line['step']:,}", number(len(line.get("samples", ())))]
        for s in sources.runs
        for line in s.run.skipped
    ]
    corrupt = [
        [f"{s.label}, step {line['step']:,}", str(line["id"]), line["error"]]
        for s in sources.runs
        for line in s.corrupt
    ]
    if not skipped and not corrupt:
        return None
    return section(
        "faults",
        "What went wrong",
        table("Steps that were not finite and changed nothing", ["step", "samples"], skipped)
        if skipped
        else None,
        table("Damaged samples that were left out", ["step", "sample", "error"], corrupt)
        if corrupt
        else None,
    )


def decoding(sources: Sources) -> Html | None:
    """What `dflash eval` measured; nothing without it."""
    if not sources.evaluations:
        return None
    return section("decoding", "Decoding", [_decoding(*each) for each in sources.evaluations])


def _decoding(label: str, found: dict[str, Any]) -> Html:
    groups = [*sorted(found["kinds"].items()), ("all", found)]
    greedy = found.get("greedy", True)
    rows = [
        [
            name,
            number(each["prompts"]),
            number(each.get("tokens")),
            f"{each['walk_tau']:.2f}",
            number(each.get("plain_tokens_per_s")),
            number(each.get("tokens_per_s")),
            f"{each['speedup']:.2f}x",
            f"{each['equal']} of {each['prompts']}" if greedy else NONE,
        ]
        for name, each in groups
    ]
    head = ["prompts", "n", "tokens", "walk tau", "plain tokens/s", "tokens/s", "speed-up", "output equal"]
    return table(f"Decoding: {label}", head, rows)


def samples(sources: Sources) -> Html:
    """Responses, with what the drafter got right in colour."""
    explained = (
        "Coloured and underlined: drafts accepted in one cycle, neighbours in turn. Plain: tokens that the "
        "target puts out itself, one behind each run."
    )
    return section(
        "samples", "Sample texts", tag("p", explained), [_run_samples(source) for source in sources.runs]
    )


def _run_samples(source: RunSource) -> Html:
    heading = tag("h3", source.label)
    remark = note(source.texts.note) if source.texts.note else None
    return tag("div", heading, remark, [_sample(sample) for sample in source.texts.samples])


def _sample(sample: SampleText) -> Html:
    rate = sample.tokens / sample.cycles if sample.cycles else 1.0
    told = f"Sample {sample.id}: {sample.tokens:,} tokens in {sample.cycles:,} cycles, {rate:.2f} a cycle"
    marked, turn = [], 0
    for piece in sample.pieces:
        marked.append(_piece(piece, turn))
        turn ^= piece.drafts > 0
    return tag(
        "article",
        tag("h4", told),
        tag("p", tag("span", "Prompt: ", class_="unseen"), sample.prompt, class_="prompt", dir="auto"),
        tag("p", tag("span", "Response: ", class_="unseen"), marked, class_="response", dir="auto"),
        aria_label=told,
    )


def _piece(piece: Piece, turn: int) -> object:
    if not piece.drafts:
        return piece.text
    count = f"{piece.drafts} accepted"
    return tag("mark", piece.text, class_=f"run{turn}", title=count)
