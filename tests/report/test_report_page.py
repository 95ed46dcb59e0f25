"""`dflash report`: what is on the page, who can read it, and that text stays text."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from report_pages import Page, parse
from support import write_cache
from tiny_runs import LENGTHS, tiny_config

from dflash.cache.manifest import load_manifest
from dflash.cache.transcode import transcode
from dflash.cli import cli
from dflash.errors import ConfigError
from dflash.evaluate.figures import EvalReport, KindReport
from dflash.report.colours import DARK, LIGHT, RUNS, contrast
from dflash.report.gather import Codec, Sources, gather
from dflash.report.markup import Html, tag, text
from dflash.report.page import page
from dflash.report.run import write_report
from dflash.report.settings import command
from dflash.report.tables import codec
from dflash.report.texts import Piece, RunTexts, SampleText
from dflash.train.faults import append_line
from dflash.train.holdout import HoldoutConfig
from dflash.train.runs import METRICS_NAME
from dflash.train.trainer import train
from dflash.world import World

SECTIONS = [
    "summary",
    "loss",
    "mix",
    "window",
    "acceptance",
    "walk",
    "throughput",
    "codec",
    "samples",
    "configuration",
]
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--\u202e\x00\ud800]]></title></svg>"
KIND = KindReport(
    prompts=4,
    tokens=100,
    cycles=10,
    walked=25,
    equal=4,
    plain_seconds=10.0,
    speculative_seconds=5.0,
    accepted=Counter({0: 3, 1: 3, 2: 2, 3: 2}),
)
RESULT = EvalReport(KIND, {"short": KIND}, 4).to_json()
EVAL = RESULT["kinds"]["short"]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]


def test_every_section_is_there_and_the_navigation_leads_to_it(page_of_two: Page) -> None:
    sections = [element.attributes["id"] for element in page_of_two.root.all("section")]
    links = [link.attributes["href"] for link in next(page_of_two.root.all("nav")).all("a")]
    assert sections == SECTIONS
    assert links == [f"#{name}" for name in SECTIONS]


def test_ids_are_unique_and_every_reference_has_its_target(page_of_two: Page) -> None:
    ids = [e.attributes["id"] for e in page_of_two.root.all() if "id" in e.attributes]
    assert len(set(ids)) == len(ids)
    for element in page_of_two.root.all():
        named = (element.attributes.get("aria-labelledby") or "").split()
        named += [link[1:] for link in [element.attributes.get("href") or ""] if link]
        assert set(named) <= set(ids)


def test_every_drawing_says_what_it_is_and_has_a_table_with_its_numbers(page_of_two: Page) -> None:
    figures = list(page_of_two.root.all("figure"))
    assert len(figures) == len(list(page_of_two.root.all("svg"))) >= 12
    for figure in figures:
        (svg,) = figure.all("svg")
        assert svg.attributes["role"] == "img"
        assert [len(next(svg.all(name)).text()) > 10 for name in ("title", "desc")] == [True, True]
        (table,) = figure.all("table")
        marks = svg.attributes["data-marks"].split()
        assert len(list(next(table.all("tbody")).all("tr"))) in (len(marks), len(marks) + 1)
    assert not list(page_of_two.root.all("img"))


def test_landmarks_headings_and_tables_are_in_order_for_a_screen_reader(page_of_two: Page) -> None:
    names = [element.name for element in page_of_two.root.all()]
    assert [names.count(name) for name in ("main", "header", "nav", "footer", "h1")] == [1] * 5
    levels = [int(name[1]) for name in names if re.fullmatch(r"h\d", name)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for table in page_of_two.root.all("table"):
        assert table.children[0].name == "caption"
        assert table.children[0].text()
        head, *rows = table.all("tr")
        assert all(cell.attributes == {"scope": "col"} for cell in head.children)
        assert all(row.children[0].attributes == {"scope": "row"} for row in rows)
        assert {len(row.children) for row in rows} == {len(head.children)}
    html = next(page_of_two.root.all("html"))
    assert html.attributes["lang"] == "en"


def test_the_page_reaches_for_nothing_outside_itself(page_of_two: Page) -> None:
    for element in page_of_two.root.all():
        assert element.name not in {"link", "iframe", "object", "embed", "base", "form", "use"}
        assert not {"src", "srcset", "action", "style"} & element.attributes.keys()
        assert (element.attributes.get("href") or "#").startswith("#")
        assert not [name for name in element.attributes if name.startswith("on")]
    assert not re.findall(r"https?:|url\(|@import", page_of_two.source)


def test_the_page_carries_its_own_policy_for_the_browser(page_of_two: Page) -> None:
    (policy,) = [
        m.attributes["content"] for m in page_of_two.root.all("meta") if "http-equiv" in m.attributes
    ]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert len(re.findall("'sha256-[^']+'", policy)) == 2
    assert "unsafe" not in policy


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_has_the_contrast_of_wcag_in_both_schemes(scheme) -> None:
    assert len(scheme.series) == RUNS
    assert {pair: contrast(*pair) for pair in scheme.pairs() if contrast(*pair) < 4.5} == {}


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(
        4.478, abs=1e-3
    )  # the usual example of just too little
    assert contrast("#123456", "#123456") == 1


def test_hostile_text_of_a_corpus_stays_text(runs: Path) -> None:
    sample = SampleText(1, HOSTILE, [Piece(HOSTILE, 0), Piece(HOSTILE, 3)], 1, 4)
    found = gather([runs / "a"], [])
    evaluations = [(HOSTILE, RESULT | {"kinds": {HOSTILE: EVAL}})]
    corrupt = [{"step": 1, "id": HOSTILE, "error": HOSTILE}]
    source = replace(
        found.runs[0],
        label=HOSTILE,
        texts=RunTexts([sample], HOSTILE),
        corrupt=corrupt,
        record=found.runs[0].record | {"argv": [HOSTILE], "versions": {HOSTILE: HOSTILE}},
    )
    source.run.config["cache"] = HOSTILE
    source.run.config["network"][HOSTILE] = HOSTILE
    made = parse(page(Sources([source], evaluations)))
    assert len(list(made.root.all("script"))) == 1
    assert not list(made.root.all("img"))
    assert not re.search(r"<img|<!--|[\u202e\x00]", made.source)
    made.source.encode()  # a lone surrogate could not be written
    (response,) = made.root.classed("response")
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x00", "\\u0000").replace("\ud800", "\\ud800")
    assert response.text() == f"Response: {shown}{shown}"
    assert [mark.text() for mark in response.all("mark")] == [shown]


def test_markup_comes_from_tag_alone() -> None:
    assert tag("p", "<b>", Html("<i></i>"), [1, None, tag("br")], class_="x", hidden=False, open=True) == (
        '<p class="x" open>&lt;b&gt;<i></i>1<br></p>'
    )
    assert tag("p", title='"><script>') == '<p title="&quot;&gt;&lt;script&gt;"></p>'
    assert text("a\tb\nc\u2028é") == "a\tb\nc\u2028é"


def test_figures_are_those_of_the_runs_record(page_of_two: Page, reported_runs: Path) -> None:
    lines = metrics(reported_runs / "a")
    steps = [line for line in lines if "kind" not in line]
    walks = [line for line in lines if line.get("kind") == "evaluation"]
    figures = {row[0]: row[1] for row in page_of_two.table("Figures")}
    assert figures["steps"] == "6"
    assert figures["tokens"] == f"{sum(step['tokens'] for step in steps):,}"
    assert figures["walk tau"] == f"{walks[-1]['walk_tau']:.3f}"
    losses = page_of_two.table("Training loss")
    assert losses[0] == ["step", "a", "b"]
    assert [row[0] for row in losses[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert losses[1][1] == f"{steps[0]['loss']:.4g}"
    walked = page_of_two.table("Serving walk over held-out samples")
    assert [row[0] for row in walked[1:]] == [str(walk["step"]) for walk in walks] == ["2", "4", "6"]
    assert [float(row[1]) for row in walked[1:]] == pytest.approx([w["walk_tau"] for w in walks], abs=1e-3)


def test_what_differs_between_runs_comes_before_their_figures(page_of_two: Page) -> None:
    captions = [next(table.all("caption")).text() for table in page_of_two.by_id("summary").all("table")]
    assert captions == ["Settings that differ", "Figures"]
    assert page_of_two.table("Settings that differ")[1:] == [["sampler.policy", "stratified", "shuffle"]]


def test_runs_of_another_seed_are_called_so(runs: Path) -> None:
    record = json.loads((runs / "b" / "run.json").read_text())
    record["config"]["seed"] = 7
    (runs / "b" / "run.json").write_text(json.dumps(record))
    made = parse(page(gather([runs / "a", runs / "b"])))
    assert "Not the same cache, seed or drafter: seed." in made.by_id("summary").text()


def test_the_mix_stands_beside_its_quota(page_of_two: Page, reported_runs: Path) -> None:
    last = metrics(reported_runs / "a")[-2]
    rows = page_of_two.table("Length mix of a, whole run")[1:]
    assert [row[1] for row in rows] == [f"{share:.2%}" for share in last["mix"]["shares"]]
    assert [row[2] for row in rows] == [f"{share:.2%}" for share in last["mix"]["quota"]]
    *shares, quota = page_of_two.table("Length mix of a")[1:]
    assert quota == ["quota", *(f"{share:.1%}" for share in last["mix"]["quota"])]
    for row in shares:
        assert sum(float(cell[:-1]) for cell in row[1:]) == pytest.approx(100, abs=0.2)


def test_a_run_of_an_older_layout_is_shown_with_what_it_has(runs: Path) -> None:
    steps = [line for line in metrics(runs / "a") if "kind" not in line]
    later = ("window", "passes_by_bucket")
    kept = [{key: value for key, value in step.items() if key not in later} for step in steps]
    (runs / "a" / METRICS_NAME).write_text("".join(f"{json.dumps(step)}\n" for step in kept[:1]))
    made = parse(page(gather([runs / "a"])))
    assert "Window fill: nothing recorded." in made.by_id("window").text()
    assert "Without a walk: a." in made.by_id("walk").text()


def test_skipped_steps_and_damaged_samples_have_a_section_of_their_own(runs: Path, page_of_two: Page) -> None:
    assert "What went wrong" not in page_of_two.source
    append_line(runs / "a" / METRICS_NAME, {"kind": "skipped", "step": 7, "samples": [1, 2], "tokens": 9})
    append_line(runs / "a" / "corrupt.jsonl", {"step": 3, "id": 5, "row": 4, "error": "bytes have changed"})
    made = parse(page(gather([runs / "a"])))
    assert made.table("Steps that were not finite and changed nothing")[1] == ["a, step 7", "2"]
    assert made.table("Damaged samples that were left out")[1] == ["a, step 3", "5", "bytes have changed"]


def test_what_eval_measured_is_shown_from_the_runs_folder_and_from_files(runs: Path) -> None:
    (runs / "a" / "eval.json").write_text(json.dumps(RESULT))
    (runs / "several.json").write_text(json.dumps({"x": RESULT, "y": RESULT | {"speedup": 9.0}}))
    made = parse(page(gather([runs / "a"], [runs / "several.json"])))
    assert made.table("Decoding: a")[-1] == ["all", "4", "100", "2.50", "10", "20", "2.00x", "4 of 4"]
    assert made.table(f"Decoding: {runs / 'several.json'}: y")[-1][6] == "9.00x"
    heads = made.table("Acceptance by position in the block")
    assert "decoding, a" in heads[0]
    assert [row[heads[0].index("decoding, a")] for row in heads[1:]] == ["0.7", "0.4", "0.2"]


def test_a_lossy_codec_tells_its_error_by_layer(runs: Path) -> None:
    (source,) = gather([runs / "a"]).runs
    error = {"tokens": 2048, "relative_error": [0.02, 0.03], "escaped": [0.0, 0.01], "kl": [0.001, 0.004]}
    made = Html(codec(Sources([replace(source, codec=Codec("fp8", (1, 3), error))])))
    assert parse(made).table("a: codec fp8, over 2,048 tokens")[1:] == [
        ["1", "0.02", "0.00%", "0.001"],
        ["3", "0.03", "1.00%", "0.004"],
    ]
    without = error | {"kl": ()}
    made = Html(codec(Sources([replace(source, codec=Codec("int8", (1, 3), without))])))
    assert [row[3] for row in parse(made).table("a: codec int8, over 2,048 tokens")[1:]] == ["-", "-"]


def test_a_run_on_a_lossy_cache_shows_its_error_and_its_texts(reported_runs: Path, tmp_path: Path) -> None:
    cache = tmp_path / "fp8"
    transcode(reported_runs / "cache", cache, "fp8", jobs=1)
    config = tiny_config(cache, tmp_path / "run", max_steps=1, holdout=HoldoutConfig(0.35))
    train(config, World())
    write_report([tmp_path / "run"], tmp_path / "r.html", samples=1)
    made = parse((tmp_path / "r.html").read_text())
    error = load_manifest(cache).codec_error
    (_, *rows) = made.table(f"run: codec fp8, over {error.tokens:,} tokens")
    assert [float(row[1]) for row in rows] == pytest.approx(error.relative_error, rel=1e-3)
    assert len(list(made.by_id("samples").all("article"))) == 1


def test_runs_on_other_buckets_share_what_they_can(runs: Path, tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "other", LENGTHS, edges=(32, 64))
    train(tiny_config(cache, tmp_path / "c", max_steps=3), World())
    made = parse(page(gather([runs / "a", tmp_path / "c"])))
    assert "Not in the figure by bucket, having other buckets: c." in made.by_id("acceptance").text()
    assert made.table("Training loss")[0] == ["step", "a", "c"]
    assert made.table("Training loss")[-1][2] == "-"  # c ended earlier
    assert [row[0] for row in made.table("Length mix of c, whole run")[1:]] == ["to 32", "to 64"]


def test_the_codec_is_read_from_the_runs_cache_only_while_it_is_the_same(runs: Path) -> None:
    assert gather([runs / "a"]).runs[0].codec == Codec("raw", (1, 3), None)
    record = json.loads((runs / "a" / "run.json").read_text())
    record["config"]["cache_digest"] = "0" * 64
    (runs / "a" / "run.json").write_text(json.dumps(record))
    assert gather([runs / "a"]).runs[0].codec is None


def test_the_command_is_given_as_it_is_typed() -> None:
    assert command({"argv": ["/x/bin/dflash", "train", "--out", "my run"]}) == "dflash train --out 'my run'"
    assert command({"argv": ["/x/dflash/__main__.py", "train"]}) == "dflash train"
    assert command({"command": "train"}) == "dflash train"


def test_the_command_line_writes_the_page_and_names_it(reported_runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    done = CliRunner().invoke(cli, ["report", str(reported_runs / "a"), "--out", str(out), "--samples", "0"])
    assert (done.exit_code, done.output) == (0, f"{out}\n")
    assert "No sample texts were asked for." in parse(out.read_text()).by_id("samples").text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "--out", "r.txt"], ["--out r.txt", ".html"]),
        (["a", "--out", "none/r.html"], ["none/r.html", "no folder"]),
        (["a", "--samples", "-1"], ["--samples", "-1"]),
        (["a", "a"], ["2 runs", "each once"]),
        (["none"], ["none is not a run"]),
        (["a", "--eval", "a/run.json"], ["a/run.json", "dflash eval --json"]),
        (["a", "--eval", "list.json"], ["list.json", "dflash eval --json"]),
        (["a", "--eval", "null.json"], ["null.json", "dflash eval --json"]),
        (["a", "--eval", "none.json"], ["none.json", "dflash eval --json"]),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_leaves_no_page(
    arguments: list[str], words: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    Path("list.json").write_text("[1]")
    Path("null.json").write_text(json.dumps(RESULT | {"walk_tau": None}))
    before = set(runs.rglob("*"))
    done = CliRunner().invoke(cli, ["report", *arguments])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert set(runs.rglob("*")) == before


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="9 runs given; a report takes 1 to 8"):
        gather([tmp_path / str(n) for n in range(9)])


def test_the_same_runs_give_the_same_page(reported_runs: Path, tmp_path: Path) -> None:
    write_report([reported_runs / "a"], tmp_path / "1.html", samples=1)
    write_report([reported_runs / "a"], tmp_path / "2.html", samples=1)
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()
