"""Which stages run again, over a grid of what may have changed, been lost, or been killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import ORDER, Commands, Killed, write_place

from dflash.cli import cli
from dflash.errors import ConfigError
from dflash.recipe.reading import load_recipe
from dflash.recipe.run import Options, preview, run_recipe


def do(path: Path, *sets: str, commands: Commands | None = None, **options: object) -> tuple[list[str], str]:
    """Run a recipe; the stages that ran, and what was printed."""
    commands, shown = commands or Commands(), []
    code = run_recipe(load_recipe(cli.commands, path, sets), Options(**options), commands, shown.append)
    assert code == 0, shown
    return commands.ran, "\n".join(shown)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_place(tmp_path / "place")


@pytest.fixture
def done(recipe: Path) -> Path:
    assert do(recipe)[0] == ORDER
    return recipe


def state(recipe: Path) -> dict:
    return json.loads((recipe.parent / "out" / "run-state.json").read_text())["stages"]


def test_nothing_runs_again_where_nothing_has_changed(done: Path) -> None:
    ran, text = do(done)
    assert ran == []
    assert text.count("whole and unchanged") == len(ORDER)


def test_the_report_tells_times_outputs_and_what_the_drafter_is_worth(done: Path) -> None:
    text = (done.parent / "out" / "summary.md").read_text()
    assert "1.50" in text
    assert "1.25x" in text
    assert "2/2" in text
    assert all(state(done)[name]["out"] in text for name in ORDER)


@pytest.mark.parametrize(
    ("change", "again", "why"),
    [
        ("train.lr=1e-3", ["train", "eval", "export"], "train.lr: was 0.0006, now 0.001"),
        ("train.max-steps=9", ["train", "eval", "export"], "train.max-steps: was 4, now 9"),
        ("extract.max-length=1024", ["plan", "extract", "train", "eval", "export"], "was 3072, now 1024"),
        ("eval.max-new-tokens=8", ["eval"], "eval.max-new-tokens: was 128, now 8"),
        ("export.dtype=float32", ["export"], 'export.dtype: was null, now "float32"'),
        ("regenerate.max-new-tokens=64", ORDER, "was 2048, now 64"),
        ("regenerate.server=http://localhost:2", [], "whole and unchanged"),
        ("extract.nproc=2", [], "extract.nproc has changed, which has no effect on finished work"),
        ("train.save-every=7", [], "train.save-every has changed, which has no effect"),
        ("train.warmup=0.04", [], "whole and unchanged"),
        ("train.max-minutes=5", ["train"], "train.max-minutes: was null, now 5.0"),
    ],
)
def test_a_changed_setting_runs_its_stage_and_those_whose_inputs_it_changes(
    done: Path, change: str, again: list[str], why: str
) -> None:
    ran, text = do(done, change)
    assert ran == again
    assert why in text
    assert do(done, change)[0] == []


def test_a_changed_training_setting_never_touches_the_run_of_another(done: Path) -> None:
    first = Path(state(done)["train"]["out"])
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    do(done, "train.lr=1e-3")
    second = Path(state(done)["train"]["out"])
    assert second != first
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    do(done)
    assert Path(state(done)["train"]["out"]) == first
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def _edit(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text('{"prompt": "other"}\n')


@pytest.mark.parametrize(
    ("edit", "again"),
    [
        (_edit("train.jsonl"), ORDER),
        (_edit("heldout.jsonl"), ["eval"]),
        (_edit("target/model.safetensors"), ORDER),
        (_edit("target/README.md"), []),
        (_edit("other.jsonl"), []),
    ],
    ids=["data", "prompts", "weights", "prose", "unrelated"],
)
def test_changed_inputs_run_what_reads_them(
    done: Path, edit: Callable[[Path], object], again: list[str]
) -> None:
    edit(done.parent)
    ran, text = do(done)
    assert ran == again
    assert "has changed" in text or not again
    assert do(done)[0] == []


def test_a_target_and_data_that_moved_are_the_same(done: Path) -> None:
    folder = done.parent
    (folder / "target").rename(folder / "moved")
    (folder / "train.jsonl").rename(folder / "renamed.jsonl")
    assert do(done, f"run.target={folder / 'moved'}", f"run.data={folder / 'renamed.jsonl'}")[0] == []


def _lose(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize("name", ORDER)
def test_an_output_that_is_gone_is_made_again_and_nothing_else(done: Path, name: str) -> None:
    _lose(Path(state(done)[name]["out"]))
    ran, text = do(done)
    assert ran == ([] if name == "plan" else [name])  # a plan is for an extraction that will run
    assert "is not there" in text or name == "plan"


def test_a_damaged_cache_is_repaired_first(done: Path) -> None:
    cache = Path(state(done)["extract"]["out"])
    next((cache / "shards").rglob("*.safetensors")).unlink()
    commands = Commands()
    with pytest.raises(ConfigError, match="extract has ended, but"):
        do(done, commands=commands)  # the fake repairs nothing: a cache that stays damaged is never used
    assert commands.ran == ["repair", "extract"]
    assert commands.lines[0] == ["cache", "repair", "--quick", str(cache)]


def test_a_damaged_newest_checkpoint_makes_training_go_on_in_its_folder(done: Path) -> None:
    run = Path(state(done)["train"]["out"])
    (run / "checkpoints" / "step-000004" / "model.safetensors").write_text("bits")
    commands = Commands()
    ran, text = do(done, commands=commands)
    assert ran == ["train"]
    assert f"--out={run}" in commands.lines[0]
    assert "is not what this stage left there" in text
    assert not list(run.parent.glob("train-*.old-*"))


def test_a_run_without_any_whole_checkpoint_goes_aside(done: Path) -> None:
    run = Path(state(done)["train"]["out"])
    for path in run.glob("checkpoints/*/model.safetensors"):
        path.write_text("bits")
    ran, text = do(done)
    assert ran == ["train"]
    assert "no whole checkpoint" in text
    assert run.with_name(f"{run.name}.old-1").is_dir()


def test_an_export_that_was_edited_is_kept_aside_and_an_untouched_one_is_replaced(done: Path) -> None:
    export = done.parent / "out" / "export"
    do(done, "export.dtype=float32")
    assert not export.with_name("export.old-1").exists()
    (export / "notes.txt").write_text("mine")
    do(done, "export.dtype=bfloat16")
    assert (export.with_name("export.old-1") / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("name", ORDER)
def test_a_run_that_was_killed_goes_on_with_the_stage_it_was_in(recipe: Path, name: str, moment: str) -> None:
    if (name, moment) == ("plan", "during"):
        moment = "after"
    commands = Commands(die=(name, moment))
    with pytest.raises(Killed):
        do(recipe, commands=commands)
    assert commands.ran == ORDER[: ORDER.index(name) + 1]
    ran, text = do(recipe)
    left = ORDER[ORDER.index(name) :]
    # answers that are whole on disk are taken as they are
    assert ran == (left[1:] if (name, moment) == ("regenerate", "after") else left)
    assert "goes on" in text
    assert do(recipe)[0] == []


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("name", ["regenerate", "extract", "train", "export"])
def test_a_forced_stage_that_was_killed_goes_on_instead_of_beginning_anew(
    done: Path, name: str, moment: str
) -> None:
    with pytest.raises(Killed):
        do(done, commands=Commands(die=(name, moment)), force=(name,))
    do(done, force=(name,))
    aside = [path.name for path in (done.parent / "out").glob("*.old-2")]
    assert aside == ([] if name != "export" else aside)


@pytest.mark.parametrize("name", ORDER)
def test_force_makes_a_stage_anew_and_keeps_what_was_there(done: Path, name: str) -> None:
    ran, text = do(done, force=(name,))
    assert ran == [name]  # the same content comes out of it, so nothing behind it runs
    assert "--force" in text
    if name in ("regenerate", "extract", "train"):
        out = Path(state(done)[name]["out"])
        assert out.with_name(f"{out.name}.old-1").exists()


def test_a_stage_that_fails_ends_the_run_with_its_code_and_keeps_what_is_before_it(recipe: Path) -> None:
    shown: list[str] = []
    loaded = load_recipe(cli.commands, recipe)
    for code in (2, 3, 130, 143):
        assert run_recipe(loaded, Options(), Commands(fail={"train": code}), shown.append) == code
        assert f"exit code {code}" in shown[-1]
    assert do(recipe)[0] == ORDER[3:]


def test_from_and_only_leave_the_others_as_they_are(done: Path) -> None:
    _edit("train.jsonl")(done.parent)
    assert do(done, start="train")[0] == []
    sets = ("eval.max-new-tokens=9", "export.dtype=float32")
    assert do(done, *sets, only="eval")[0] == ["eval"]
    assert do(done, *sets, start="eval")[0] == ["export"]
    assert do(done, *sets, start="eval", force=("eval",))[0] == ["eval"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"start": "tain"}, "--from tain"),
        ({"only": "report"}, "regenerate, plan, extract"),
        ({"force": ("x",)}, "--force x"),
        ({"start": "train", "only": "eval"}, "exclude each other"),
        ({"only": "eval", "force": ("train",)}, "leaves that stage out"),
    ],
)
def test_stages_that_are_not_there_are_refused(recipe: Path, options: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        do(recipe, **options)
    assert not (recipe.parent / "out").exists()


def test_a_stage_without_its_input_says_which_stage_makes_it(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="not there, or not whole"):
        do(recipe, only="eval")


def test_a_plan_says_what_would_run_and_why_and_writes_nothing(recipe: Path) -> None:
    commands, shown = Commands(), []
    assert preview(load_recipe(cli.commands, recipe), Options(), commands, shown.append) == 0
    assert commands.ran == []  # nothing to plan from before the answers are there
    assert not (recipe.parent / "out").exists()
    assert [line.split()[:2] for line in shown[:5]] == [[name, "run"] for name in ORDER if name != "plan"]
    assert "behind regenerate" in shown[1]
    assert "when regenerate is done" in shown[-1]


def test_a_plan_of_a_run_whose_data_is_there_shows_what_extraction_takes(recipe: Path, done: Path) -> None:
    commands, shown = Commands(), []
    before = (recipe.parent / "out" / "run-state.json").read_bytes()
    changed = load_recipe(cli.commands, recipe, ["extract.max-length=512"])
    assert preview(changed, Options(probe=True), commands, shown.append) == 0
    assert commands.ran == ["plan"]
    assert {"--plan", "--probe"} < set(commands.lines[0])
    assert (recipe.parent / "out" / "run-state.json").read_bytes() == before
    assert [line.split()[1] for line in shown[:5]] == ["skip", "run", "run", "run", "run"]


def test_two_runs_in_one_folder_are_refused(done: Path) -> None:
    from dflash.recipe.state import locked

    with locked(done.parent / "out"), pytest.raises(ConfigError, match="another `dflash run`"):
        do(done)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', '{"format": 1, "stages": {"x": 3}, "files": {}}'])
def test_a_lost_state_makes_every_stage_look_at_what_is_there(
    done: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = done.parent / "out"
    (out / "run-state.json").write_text(text)
    ran, _ = do(done)
    assert ran == ORDER[1:]  # each goes on in its old place; answers that are whole are taken
    assert "cannot be used" in capsys.readouterr().err
    assert len(list(out.glob("cache-*"))) == len(list(out.glob("train-*"))) == 1
    assert do(done)[0] == []


def test_a_mistake_in_the_last_table_is_found_before_the_first_stage(recipe: Path) -> None:
    commands = Commands()
    with pytest.raises(ConfigError, match=r"\[eval\] --dtype 'fp8'"):
        do(recipe, "eval.dtype=fp8", commands=commands)
    assert commands.ran == []


def test_a_flag_that_a_newer_version_adds_makes_nothing_anew(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = cli.commands["extract"]
    with monkeypatch.context() as patch:
        patch.setattr(command, "params", [p for p in command.params if p.name != "min_supervised"])
        assert do(recipe)[0] == ORDER
    assert do(recipe)[0] == []
    assert do(recipe, "extract.min-supervised=4")[0][:2] == ["plan", "extract"]


def test_a_default_that_a_newer_version_changes_is_a_changed_setting(done: Path) -> None:
    path = done.parent / "out" / "run-state.json"
    value = json.loads(path.read_text())
    value["stages"]["eval"]["settings"]["max_new_tokens"] = 64
    path.write_text(json.dumps(value))
    ran, text = do(done)
    assert ran == ["eval"]
    assert "eval.max-new-tokens: was 64, now 128" in text
