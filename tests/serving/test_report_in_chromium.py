"""The page of `dflash report` in a real browser: no error, no request; light, dark, phone, keyboard."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from support import write_cache, write_tokenizer
from tiny_runs import LENGTHS, tiny_config

from dflash.cache.manifest import load_manifest
from dflash.cache.parts import record_parts
from dflash.report.colours import DARK, LIGHT
from dflash.report.run import write_report
from dflash.train.holdout import HoldoutConfig
from dflash.train.trainer import train
from dflash.world import World

pytestmark = pytest.mark.serving

HOSTILE = "</title><script>document.title=1</script><img src=x onerror=document.title=1>"
SMALLEST_LETTERS = """Math.min(...[...document.querySelectorAll('svg text')].map(text => {
  const svg = text.ownerSVGElement;
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(text).fontSize) * scale;
}))"""
BAD_LABELS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const labels = [...svg.querySelectorAll('text:not(.level)')];
  const boxes = labels.map(label => [label.textContent, label.getBoundingClientRect()]);
  const cut = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1 ||
    b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([name]) => name + ' is cut');
  const hit = boxes.flatMap(([one, a], n) => boxes.slice(n + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
    .map(([other]) => one + ' on ' + other));
  return [...cut, ...hit].map(text => svg.querySelector('title').textContent + ': ' + text);
})"""
ROWS = """[...document.querySelectorAll('#loss-chart tbody tr')].map(row =>
  [...row.children].map(cell => cell.textContent))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with everything, and hostile text wherever the page shows text of others."""
    folder = tmp_path_factory.mktemp("pages")
    cache = write_cache(folder / "cache", LENGTHS * 2)
    (cache / "tokenizer").mkdir()
    write_tokenizer(cache / "tokenizer")
    record_parts(cache, load_manifest(cache))
    config = tiny_config(cache, folder / "a", max_steps=40, eval_every=5, holdout=HoldoutConfig(0.35))
    train(config, World())
    train(replace(config, out=folder / "b", sampler=replace(config.sampler, policy="shuffle")), World())
    record = json.loads((folder / "b" / "run.json").read_text())
    record["argv"] = ["dflash", "train", "--cache", HOSTILE]
    (folder / "b" / "run.json").write_text(json.dumps(record))
    corrupt = {"step": 1, "id": 1, "row": 1, "error": HOSTILE}
    (folder / "b" / "corrupt.jsonl").write_text(json.dumps(corrupt) + "\n")
    write_report([folder / "a", folder / "b"], folder / "report.html", samples=2)
    return folder / "report.html"


@pytest.fixture
def browser(tmp_path: Path):
    with Browser(tmp_path / "profile") as opened:
        yield opened


def test_the_page_opens_without_an_error_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.problems() == []
    requests = {event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")}
    assert requests == {page.as_uri()}
    assert browser.evaluate("document.title") == "Training report: a, b"
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.body.textContent").count(HOSTILE) == 2  # in the command and the error


def test_an_error_would_be_seen(browser: Browser, page: Path, tmp_path: Path) -> None:
    source = page.read_text()
    for name, change in (
        ("script", source.replace("</main>", "</main><script>missing()</script>")),
        ("request", source.replace("</main>", '</main><img src="x.png">')),
    ):
        broken = tmp_path / f"{name}.html"
        broken.write_text(change)
        browser.open(broken)
        assert browser.problems(), name  # the page's policy refuses both, and says so


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "phone"), [(1200, False), (360, True)], ids=["desktop", "phone"])
def test_it_fits_the_screen_in_both_schemes(
    browser: Browser, page: Path, scheme: str, width: int, phone: bool, tmp_path: Path
) -> None:
    browser.look(width=width, scheme=scheme, phone=phone)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    colours = {"light": LIGHT, "dark": DARK}[scheme]
    channels = [int(colours.page[place : place + 2], 16) for place in (1, 3, 5)]
    ground = browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == f"rgb({', '.join(map(str, channels))})"
    smallest = browser.evaluate(SMALLEST_LETTERS)
    assert smallest >= 10
    picture = browser.screenshot(tmp_path / f"{scheme}.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000


def test_no_label_of_a_chart_is_cut_off_or_lies_on_another(browser: Browser, page: Path) -> None:
    for width, phone in ((1200, False), (360, True)):
        browser.look(width=width, phone=phone)
        browser.open(page)
        assert browser.evaluate(BAD_LABELS) == []


def test_the_keyboard_reaches_every_part_and_reads_the_charts(browser: Browser, page: Path) -> None:
    browser.look(width=1200)
    browser.open(page)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    charts = browser.evaluate("document.querySelectorAll('svg').length")
    stops = browser.evaluate("document.querySelectorAll('a, summary, [tabindex], svg').length")
    seen = set()
    for _ in range(stops + 5):
        browser.press("Tab")
        seen.add(browser.evaluate("document.activeElement.closest('figure')?.id"))
    assert len(seen - {None}) == charts
    browser.evaluate("document.querySelector('#loss-chart svg').focus()")
    browser.press("ArrowRight")
    first = browser.evaluate("document.querySelector('#loss-chart .readout').textContent")
    browser.press("End")
    last = browser.evaluate("document.querySelector('#loss-chart .readout').textContent")
    rows = browser.evaluate(ROWS)
    said = [f"step {row[0]} · a {row[1]} · b {row[2]}" for row in (rows[0], rows[-1])]
    assert [first, last] == said
    assert browser.problems() == []


def test_the_pointer_reads_the_charts_too(browser: Browser, page: Path) -> None:
    browser.look(width=1200)
    browser.open(page)
    browser.evaluate("mix = document.querySelector('#mix-chart-0'); mix.scrollIntoView({block: 'center'})")
    box = "(b => [b.left, b.top, b.width, b.height])(mix.querySelector('svg').getBoundingClientRect())"
    left, top, width, height = browser.evaluate(box)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=top + height / 2)
    assert re.match(
        r"step 1\d · to 16 [\d.]+%", browser.evaluate("mix.querySelector('.readout').textContent")
    )
    visible = browser.evaluate("getComputedStyle(mix.querySelector('.cursor')).visibility")
    assert visible == "visible"


def test_a_screen_reader_finds_landmarks_and_named_pictures(browser: Browser, page: Path) -> None:
    browser.open(page)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    found: dict[str, list[str]] = {}
    for node in nodes:
        if not node["ignored"]:
            found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert all(len(found[role]) == 1 for role in ("main", "banner", "contentinfo", "navigation"))
    charts = browser.evaluate("document.querySelectorAll('svg').length")
    assert len([name for name in found["image"] if name]) == len(found["image"]) == charts
    assert all(found["table"])


def test_without_scripts_the_page_shows_the_same_figures(browser: Browser, page: Path) -> None:
    browser.open(page)
    count = "[document.querySelectorAll('svg path').length, document.querySelectorAll('table tr').length]"
    before = browser.evaluate(count)
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    assert browser.evaluate(count) == before
    assert (
        browser.evaluate("document.querySelectorAll('svg[tabindex]').length") == 0
    )  # no stop that does nothing
