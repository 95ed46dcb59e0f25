"""Recipes as they are written: keys, values, overrides, paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import RECIPE, write_place

from dflash.cli import cli
from dflash.errors import ConfigError
from dflash.recipe.reading import Recipe, absolute, load_recipe, resolved, values_of
from dflash.recipe.stages import STAGES

COMMANDS = cli.commands


def read(path: Path, *sets: str) -> Recipe:
    return load_recipe(COMMANDS, path, sets)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nlrr = 1\n", ["[train] has no key 'lrr'", "lr,", "batches-per-step"]),
        ("[trian]\n", ["unknown table [trian]", "[train]"]),
        ("[run]\nouts = 'x'\n", ["[run] has no key 'outs'", "holdout"]),
        ("out = 'x'\n", ["'out' stands outside of a table"]),
        ("[train]\nresume = true\n", ["resume", "decided by `dflash run` itself"]),
        ("[extract]\nplan = true\n", ["plan", "decided by `dflash run` itself"]),
        ("[train]\nlr = 'fast'\n", ["[train]", "--lr", "'fast'"]),
        ("[train]\nlayers = 1.5\n", ["[train]", "--layers", "1.5"]),
        ("[train]\nlayers = true\n", ["[train] layers is True"]),
        ("[train]\nkeep-best = 'no'\n", ["[train] keep_best is 'no'", "true or false"]),
        ("[train]\nmix = [1]\n", ["[train] mix is [1]"]),
        ("[extract]\ntaps = ['a']\n", ["[extract]", "--taps", "'a'"]),
        ("[extract]\ntarget = 3\n", ["[extract] target is 3", "in quotes"]),
        ("[extract\n", ["recipe.toml is no TOML", "line"]),
    ],
)
def test_what_is_wrong_in_a_recipe_is_one_line_that_names_it(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = write_place(tmp_path / "p", text)
    with pytest.raises(ConfigError) as caught:
        read(path, f"run.out={tmp_path / 'o'}", "run.target=t", "run.data=d.jsonl", "train.cache=c")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[run]\ntarget='t'\ndata='d'\n[extract]\n", "needs a folder"),
        ("[run]\nout='o'\ndata='d'\n[extract]\n", "[extract] has no target"),
        ("[run]\nout='o'\ntarget='t'\n[extract]\n", "[extract] has no data"),
        ("[run]\nout='o'\n[train]\n", "[train] has no cache"),
        ("[run]\nout='o'\ntarget='t'\nholdout='h'\n[eval]\n", "give `drafter` in [eval] or a table [train]"),
        ("[run]\nout='o'\ntarget='t'\n", "asks for nothing"),
        ("[run]\nout='o'\n[export]\n", "[export] has no source"),
    ],
)
def test_what_is_missing_says_where_to_give_it(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write_place(tmp_path / "p", text))
    assert word in str(caught.value)


def test_a_recipe_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml cannot be read"):
        read(tmp_path / "no.toml")


def test_overrides_win_over_the_file_and_start_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_place(tmp_path / "p")
    sets = ("train.lr=1e-3", "extract.taps=1,8", "train.mix=sqrt", "run.data=mine.jsonl", "eval.plot=a.png")
    recipe = read(path, *sets, "train.keep-best=true", "extract.last_turn_only=true")
    params = {stage.name: resolved(recipe, stage) for stage in recipe.stages}
    assert (params["train"]["lr"], params["train"]["mix"], params["train"]["keep_best"]) == (
        1e-3,
        "sqrt",
        True,
    )
    assert params["extract"]["taps"] == (1, 8)
    assert params["extract"]["last_turn_only"]
    assert recipe.run["data"] == [str(tmp_path / "mine.jsonl")]
    assert recipe.run["target"] == str(tmp_path / "p" / "target")
    assert params["eval"]["plot"] == tmp_path / "a.png"


@pytest.mark.parametrize("text", ["train.lr", "lr=3", "=", ".lr=3", "train.=3"])
def test_an_override_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"TABLE\.KEY=VALUE"):
        read(write_place(tmp_path / "p"), text)


def test_flags_alone_are_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"out": "o", "target": "Qwen/Qwen3-8B", "data": ["a.jsonl", "name/of-a-set"]}
    recipe = load_recipe(COMMANDS, None, ["train.lr=1"], given)
    assert [stage.name for stage in recipe.stages] == ["plan", "extract", "train"]
    assert recipe.run == {"target": "Qwen/Qwen3-8B", "data": [str(tmp_path / "a.jsonl"), "name/of-a-set"]}
    held = load_recipe(COMMANDS, None, [], {**given, "holdout": ["gsm8k"]})
    assert [stage.name for stage in held.stages][-1] == "eval"
    assert held.run["holdout"] == ["gsm8k"]


@pytest.mark.parametrize(
    ("text", "kind", "moved"),
    [
        ("chats.jsonl", "data", True),
        ("parts/*.parquet", "data", True),
        ("gsm8k", "data", False),
        ("HuggingFaceH4/ultrachat_200k:train_sft", "data", False),
        ("there", "data", True),
        ("Qwen/Qwen3-8B", "target", False),
        ("there", "target", True),
        ("./away", "target", True),
        ("model.gguf", "target", True),
        ("s3://bucket/cache", "cache", False),
        ("runs/a", "drafter", True),
    ],
)
def test_paths_start_at_the_recipe_and_names_stay_names(
    tmp_path: Path, text: str, kind: str, moved: bool
) -> None:
    (tmp_path / "there").mkdir()
    assert absolute(text, tmp_path, kind) == (str(tmp_path / text) if moved else text)


def test_the_stages_know_the_parameters_of_their_commands() -> None:
    for stage in STAGES:
        known = {param.name for param in COMMANDS[stage.command].params}
        sets = (stage.inputs, stage.wires, stage.fixed, stage.free, stage.again, stage.coarse, stage.needs)
        for names in (*sets, stage.without, *stage.without.values()):
            assert set(names) <= known, (stage.name, set(names) - known)


def test_what_training_keeps_when_it_is_resumed_is_what_decides_its_folder() -> None:
    from dflash.train.settings import train_config

    stage = next(stage for stage in STAGES if stage.name == "train")
    line = ["--cache=c", "--out=o", "--max-steps=3", "--follow", "--max-wait=9"]
    with COMMANDS["train"].make_context("train", line, help_option_names=[]) as context:
        params = dict(context.params)
    settings = train_config(**params).settings()
    words = {"on_starved": "reweight", "parallel": "fsdp", "max_steps": 5, "block_size": 10, "eval_every": 7}
    words |= {"window_bytes": 1 << 30, "max_minutes": 5.0, "min_ready": 29, "max_ready": 91, "warmup": 0.05}
    left = {"log", "cache", "out", "resume", "nproc", "follow", "keep", "dpace_alpha"}  # tested elsewhere
    for name, value in params.items():
        other = words.get(name, (not value) if isinstance(value, bool) else value)
        if type(value) in (int, float) and name not in words:
            other = value / 2 if isinstance(value, float) else value + 1
        if name in left or other == value:
            continue  # names of policies: each has companions of its own
        same = train_config(**params | {name: other}).settings() == settings
        word = "is not" if same else "is"
        assert same == (name in stage.free | stage.again), (
            f"{name} {word} in TrainConfig.settings(): set _TRAIN_FREE in dflash/recipe/stages.py accordingly"
        )


def test_what_no_table_says_is_wired_from_the_run_and_from_earlier_stages(tmp_path: Path) -> None:
    recipe = read(write_place(tmp_path / "p", RECIPE))
    places = {"regenerate": "/a.jsonl", "extract": "/c", "train": "/t", "eval": "/e"}
    values = {stage.name: values_of(recipe, stage, places) for stage in recipe.stages}
    assert values["extract"]["data"] == "/a.jsonl"
    assert values["train"]["cache"] == "/c"
    assert (values["eval"]["drafters"], values["export"]["source"]) == ("/t", "/t")
    served = read(tmp_path / "p" / "recipe.toml", "eval.server=http://localhost:1")
    stage = next(stage for stage in served.stages if stage.name == "eval")
    assert not {"target", "drafters"} & values_of(served, stage, places).keys()
    assert values["regenerate"]["data"] == [str(tmp_path / "p" / "train.jsonl")]
