"""The command line: names, help, configuration files, and how errors look."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dflash import __version__
from dflash.cli import cli, command_paths

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = command_paths(cli)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def fails(*arguments: str) -> str:
    """Run a command that must fail as users' mistakes fail: exit code 2, one line."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.strip().splitlines() if line.startswith("Error")]
    assert len(lines) == 1
    return lines[0]


def test_version() -> None:
    assert run("--version").output == f"dflash, version {__version__}\n"


def test_the_commands_are_those_that_users_rely_on() -> None:
    assert {" ".join(words) for words in COMMANDS} >= {
        "extract",
        "train",
        "eval",
        "generate",
        "cache info",
        "demo",
    }


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(words: tuple[str, ...]) -> None:
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert f"\n  dflash {' '.join(words)}" in result.output


def test_the_reference_in_the_docs_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "write_cli_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "cli-reference.md").read_text() == module.reference(), "run `make docs`"


def test_an_unknown_key_in_a_configuration_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("min-redy = 30\n")
    error = fails("train", "--config", str(config), "--cache", "c", "--out", "r")
    assert "'min_redy'" in error
    assert "min_ready" in error


def test_a_configuration_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("lr = = 3")
    assert str(config) in fails("train", "--config", str(config), "--cache", "c", "--out", "r")


def test_flags_win_over_the_file_and_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dflash.train.trainer

    seen = []
    monkeypatch.setattr(dflash.train.trainer, "train", lambda config, world: seen.append(config) or _Done())
    config = tmp_path / "run.toml"
    config.write_text('cache = "c"\nout = "r"\nlr = 0.5\nmin-ready = 20\nlayers = 2\n')
    assert run("train", "--config", str(config), "--lr", "0.25").exit_code == 0
    (resolved,) = seen
    assert (resolved.optim.lr, resolved.sampler.min_ready, resolved.network.layers) == (0.25, 20, 2)
    assert resolved.sampler.max_ready == 90


class _Done:
    stopped = None

    def text(self) -> str:
        return "done"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--min-ready", "91"], ["--min-ready 91", "--max-ready 90"]),
        (["--min-ready", "0"], ["min-ready", "0"]),
        (["--loss", "mse"], ["'mse'", "ce"]),
        (["--sampler", "random"], ["random", "stratified"]),
        (["--layers", "0"], ["--layers", "0"]),
        (["--lr", "0"], ["--lr", "0"]),
        (["--anchor-density", "2"], ["--anchor-density", "2"]),
        (["--epochs", "0"], ["--epochs", "0"]),
    ],
)
def test_bad_training_settings_are_one_line_that_names_flag_and_value(
    flags: list[str], words: list[str], tmp_path: Path
) -> None:
    error = fails("train", "--cache", str(tmp_path / "c"), "--out", str(tmp_path / "r"), *flags)
    assert all(word in error for word in words), error
    assert not (tmp_path / "r").exists()


def test_training_from_what_is_no_cache_says_so(tmp_path: Path) -> None:
    error = fails("train", "--cache", str(tmp_path / "none"), "--out", str(tmp_path / "r"))
    assert str(tmp_path / "none") in error


OOM = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 "
    "GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch. See documentation"
)


def test_a_gpu_without_memory_is_one_line_that_says_what_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import dflash.train.trainer

    def train(config: object, world: object) -> None:
        raise torch.OutOfMemoryError(OOM)

    monkeypatch.setattr(dflash.train.trainer, "train", train)
    error = fails("train", "--cache", str(tmp_path / "c"), "--out", str(tmp_path / "r"))
    assert error.startswith("Error: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")
    assert "1.20 GiB is free; lower --tokens-per-batch, or give --activation-checkpointing" in error
    assert "PyTorch" not in error


def test_other_errors_of_torch_keep_their_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dflash.train.trainer

    def train(config: object, world: object) -> None:
        raise RuntimeError("expected scalar type")

    monkeypatch.setattr(dflash.train.trainer, "train", train)
    result = run("train", "--cache", str(tmp_path / "c"), "--out", str(tmp_path / "r"))
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_how_cudas_allocator_works_is_said_before_torch_is_loaded_unless_the_user_has(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash import __main__ as program

    before: dict[str, str] = {} if own is None else {own: "max_split_size_mb:64"}
    monkeypatch.setattr(program, "cli", lambda prog_name: None)
    monkeypatch.setattr(os, "environ", dict(before))
    program.main()
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if own is None else before
    assert os.environ == expected


def test_taps_that_are_no_numbers_are_refused() -> None:
    result = run("extract", "--target", "t", "--data", "d", "--out", "o", "--taps", "1,x")
    assert result.exit_code == 2
    assert "'1,x'" in result.output


def test_a_map_of_columns_is_a_flag_or_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dflash.extract.pipeline

    seen = []
    monkeypatch.setattr(
        dflash.extract.pipeline, "extract", lambda config, world: seen.append(config) or _Done()
    )
    needed = ["--target", "t", "--data", "d", "--out", str(tmp_path / "o")]
    flags = ["--column-map", "question=prompt, answer=response", "--thinking", "strip", "--last-turn-only"]
    assert run("extract", *needed, *flags).exit_code == 0
    config = tmp_path / "run.toml"
    config.write_text(
        'thinking = "strip"\nlast-turn-only = true\n[column-map]\nquestion = "prompt"\nanswer = "response"\n'
    )
    assert run("extract", "--config", str(config), *needed).exit_code == 0
    assert seen[0] == seen[1]
    assert seen[0].corpus.column_map == (("question", "prompt"), ("answer", "response"))
    assert (seen[0].thinking, seen[0].last_turn_only) == ("strip", True)
    result = run("extract", *needed, "--column-map", "question")
    assert (result.exit_code, "'question'" in result.output) == (2, True)


def test_a_missing_target_is_one_line(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    error = fails(
        "extract", "--target", str(tmp_path / "no"), "--data", str(data), "--out", str(tmp_path / "c")
    )
    assert str(tmp_path / "no") in error


def test_a_drafter_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    error = fails("eval", "--target", "t", "--drafter", str(tmp_path / "r"), "--data", "d.jsonl")
    assert str(tmp_path / "r") in error
