"""The recipes that come with the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash.cli import cli
from dflash.demo import run as demo
from dflash.evaluate.config import EvalConfig
from dflash.extract.settings import ExtractConfig
from dflash.extract.space import TOKEN_BYTES
from dflash.recipe.checks import check_settings
from dflash.recipe.reading import Recipe, load_recipe, resolved
from dflash.train.settings import train_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Recipe:
    return load_recipe(cli.commands, EXAMPLES / name)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_pass_every_check(path: Path) -> None:
    recipe = example(path.name)
    assert recipe.stages
    check_settings(recipe, recipe.stages)  # raises for a setting that its command would refuse


def test_the_demo_and_its_recipe_are_the_same() -> None:
    recipe = example("smollm2.toml")
    of = {stage.name: resolved(recipe, stage) for stage in recipe.stages}
    target, cache, run = Path("target"), Path("cache"), Path("run")
    data = {name: (str(demo.corpus_file(f"{name}.jsonl")),) for name in ("train", "heldout")}

    flags = {k: v for k, v in of["extract"].items() if k not in ("nproc", "plan", "probe", "config")}
    flags |= {"target": str(target), "out": cache, "data": data["train"]}
    assert ExtractConfig.from_flags(**flags) == demo.extract_config(target, cache)

    assert train_config(**of["train"] | {"cache": cache, "out": run}) == demo.train_config(cache, run)

    names = EvalConfig.__dataclass_fields__.keys()
    flags = {key: value for key, value in of["eval"].items() if key in names}
    flags |= {"target": str(target), "data": data["heldout"], "drafter": run}
    assert EvalConfig(**flags) == demo.eval_config(target, run)

    assert [Path(path).resolve() for path in recipe.run["data"]] == [Path(data["train"][0]).resolve()]
    assert [Path(path).resolve() for path in recipe.run["holdout"]] == [Path(data["heldout"][0]).resolve()]


def test_the_figures_of_the_large_recipe_follow_from_its_settings() -> None:
    text = (EXAMPLES / "qwen3-8b.toml").read_text()
    recipe = example("qwen3-8b.toml")
    extract = next(resolved(recipe, stage) for stage in recipe.stages if stage.name == "extract")
    epochs = next(resolved(recipe, stage) for stage in recipe.stages if stage.name == "train")["epochs"]
    samples, length = (
        int(word.replace(",", "")) for word in re.findall(r"([\d,]+) (?:samples|tokens)", text)[:2]
    )
    token = len(extract["taps"]) * 4096 * 2 + TOKEN_BYTES
    tokens = samples * length
    assert tokens == 10**9
    assert f"{token:,} bytes a token: {tokens * token / 1e12:.0f} TB" in text
    hours = tokens / 27_000 / 3600
    assert f"{hours:.0f} hours on one GPU" in text
    assert f"{hours / 8:.1f} on eight, which then write {8 * 27_000 * token / 1e9:.1f} GB/s" in " ".join(
        text.replace("\n#", " ").split()
    )
    assert f"{epochs * tokens * token / 1e12:.0f} TB in all" in text
    assert recipe.tables["train"]["keep_best"]
