"""Extract, train, evaluate and generate from the command line on a tiny target; every bad input too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commandline import done, refused
from support import write_target

from dflash.cache.manifest import load_manifest, save_manifest
from dflash.pretrained import load_drafter, write_drafter

TRAIN = ("--layers", "1", "--block-size", "4", "--tokens-per-batch", "256", "--batches-per-step", "2")


def chats(path: Path, count: int) -> Path:
    words = ("sun", "moon", "a long walk by the sea", "rain")
    rows = [
        {
            "kind": "even" if n % 2 == 0 else "odd",
            "messages": [
                {"role": "user", "content": f"Say {words[n % 4]} {n}"},
                {"role": "assistant", "content": f"{words[n % 4]} " * (n % 5 + 1)},
            ],
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, data, a finished cache and a run of it."""
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(folder / "home"))
        write_target(folder / "target")
        chats(folder / "train.jsonl", 24)
        chats(folder / "heldout.jsonl", 4)
        done(*extract_flags(folder, folder / "cache"))
        done("train", "--cache", folder / "cache", "--out", folder / "run", "--max-steps", 3, *TRAIN)
    return folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))


def extract_flags(place: Path, out: Path, *more: object, data: Path | None = None) -> tuple[object, ...]:
    flags = ("--taps", "1,3", "--max-length", 128, "--bucket-edges", "48,128", "--dtype", "float32")
    return (
        "extract",
        "--target",
        place / "target",
        "--data",
        data or place / "train.jsonl",
        "--out",
        out,
        *flags,
        *more,
    )


def test_the_cache_tells_what_it_holds(place: Path) -> None:
    figures = json.loads(done("cache", "info", place / "cache", "--json"))
    assert (figures["samples"], figures["complete"]) == (24, True)
    assert figures["bytes_per_token"] > 2 * 32 * 4  # two taps of width 32 in float32, and ids and mask
    assert "24 of 24" in done("cache", "info", place / "cache")


def test_every_output_has_a_record_of_its_making(place: Path) -> None:
    for folder, command in (("cache", "extract"), ("run", "train")):
        record = json.loads((place / folder / "run.json").read_text())
        assert record["command"] == command
        assert record["versions"]["torch"] == torch.__version__
        assert record["config"]


def test_evaluation_finds_every_token_unchanged(place: Path) -> None:
    flags = (
        "eval",
        "--target",
        place / "target",
        "--drafter",
        place / "run",
        "--data",
        place / "heldout.jsonl",
    )
    report = json.loads(done(*flags, "--max-new-tokens", 12, "--json"))
    assert report["equal"] == report["prompts"] == 4
    assert set(report["kinds"]) == {"even", "odd"}
    assert report["walk_tau"] >= 1
    assert len(report["accepted_by_position"]) == 3
    assert "walk tau" in done(*flags, "--max-new-tokens", 4)


def test_generation_prints_what_the_target_would_say(place: Path) -> None:
    pair = ("generate", "--target", place / "target", "--drafter", place / "run", "--prompt", "Say sun")
    assert done(*pair, "--max-new-tokens", 8) == done(*pair, "--max-new-tokens", 8)


def test_extraction_again_has_nothing_left_to_do(place: Path) -> None:
    assert "nothing left to do" in done(*extract_flags(place, place / "cache"))


@pytest.mark.parametrize(
    ("content", "word"), [("", "empty"), ('{"messages": []}\n{"mess', "2"), (None, "no such")]
)
def test_data_that_cannot_be_read_is_named(
    place: Path, tmp_path: Path, content: str | None, word: str
) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    line = refused(*extract_flags(place, tmp_path / "cache", data=data))
    assert "data.jsonl" in line
    assert word in line
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_conversations_without_an_answer_are_counted(place: Path, tmp_path: Path) -> None:
    data = chats(tmp_path / "data.jsonl", 3)
    with data.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "and?"}]}\n')
    assert "1 no_assistant_turn" in done(*extract_flags(place, tmp_path / "cache", data=data))


def test_a_corpus_without_any_answer_is_refused(place: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "and?"}]}\n')
    assert "no_assistant_turn" in refused(*extract_flags(place, tmp_path / "cache", data=data))


@pytest.mark.parametrize(("taps", "word"), [("1,6", "tap 6"), ("1,1", "repeated"), ("3,1", "ascending")])
def test_taps_that_are_no_layers_are_refused(place: Path, tmp_path: Path, taps: str, word: str) -> None:
    assert word in refused(*extract_flags(place, tmp_path / "cache", "--taps", taps))


def test_a_folder_with_another_cache_is_refused_naming_the_difference(place: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(place / "cache", cache)
    line = refused(*extract_flags(place, cache, "--taps", "2,4"))
    assert "taps" in line
    assert "2, 4" in line


def test_an_incomplete_cache_is_not_trained_on(place: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(place / "cache", cache)
    save_manifest(
        cache, replace(load_manifest(cache), complete=False, content_digest=None, expected_samples=25)
    )
    line = refused("train", "--cache", cache, "--out", tmp_path / "run", *TRAIN)
    assert "24" in line
    assert "25" in line


@pytest.mark.parametrize(("mask", "word"), [(9999, "outside"), (2, "end-of-sequence"), (0, "padding")])
def test_mask_tokens_that_mean_something_are_refused(
    place: Path, tmp_path: Path, mask: int, word: str
) -> None:
    out = tmp_path / "run"
    line = refused("train", "--cache", place / "cache", "--out", out, *TRAIN, "--mask-token-id", mask)
    assert word in line
    assert not out.exists()


def test_a_run_is_not_overwritten(place: Path) -> None:
    line = refused("train", "--cache", place / "cache", "--out", place / "run", "--max-steps", 3, *TRAIN)
    assert "--resume" in line


def test_a_sample_longer_than_a_micro_batch_is_named(place: Path, tmp_path: Path) -> None:
    flags = ("--cache", place / "cache", "--out", tmp_path / "run", *TRAIN, "--tokens-per-batch", 20)
    assert "--tokens-per-batch" in refused("train", *flags)


def test_words_about_waiting_without_following_are_refused(place: Path, tmp_path: Path) -> None:
    flags = ("train", "--cache", place / "cache", "--out", tmp_path / "run", *TRAIN)
    assert "add --follow" in refused(*flags, "--max-wait", 5)
    assert "needs --max-wait" in refused(*flags, "--follow", "--on-starved", "reweight")
    assert "needs --sampler stratified" in refused(*flags, "--follow", "--sampler", "fifo")


def test_a_cache_that_never_comes_is_an_error_behind_max_wait(tmp_path: Path) -> None:
    flags = ("--cache", tmp_path / "cache", "--out", tmp_path / "run", *TRAIN)
    assert "has no manifest.json" in refused("train", *flags, "--follow", "--max-wait", 0.2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": 64}, "hidden size"),
        ({"num_target_layers": 8}, "layers"),
        ({"target_layer_ids": (1, 7), "num_target_layers": 8}, "tap 7"),
    ],
)
def test_a_drafter_of_another_target_is_refused(place: Path, tmp_path: Path, change: dict, word: str) -> None:
    from dflash.drafter import Drafter
    from dflash.train.checkpoint import resolve_drafter

    other = replace(load_drafter(resolve_drafter(place / "run")).config, **change)
    write_drafter(Drafter(other), tmp_path)
    flags = ("--target", place / "target", "--drafter", tmp_path, "--data", place / "heldout.jsonl")
    assert word in refused("eval", *flags)
