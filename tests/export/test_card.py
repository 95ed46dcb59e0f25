"""`dflash export` from a run: which checkpoint, and a card whose figures are those of the run's files."""

from __future__ import annotations

import json
import re

import pytest
import torch
from click.testing import CliRunner
from strange_folders import folder_of, released_by_zlab, weights
from support import drafter_config, write_cache, write_target
from train.tiny_runs import LENGTHS, tiny_config

from dflash.cache.manifest import load_manifest
from dflash.cli import cli
from dflash.errors import CheckpointError, ConfigError
from dflash.export.card import model_card
from dflash.export.give import ExportConfig, export_drafter
from dflash.export.history import History, history_of
from dflash.export.layouts import LAYOUTS
from dflash.export.take import read_drafter
from dflash.pretrained import load_drafter
from dflash.train.checkpoint import checkpoint_path
from dflash.train.holdout import HoldoutConfig
from dflash.train.trainer import train
from dflash.world import World


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of 6 steps with two walks over held-out samples."""
    folder = tmp_path_factory.mktemp("card")
    cache = write_cache(folder / "cache", LENGTHS)
    (cache / "run.json").write_text(json.dumps({"config": {"data": ["chats.jsonl", "more | of it"]}}))
    config = tiny_config(
        cache, folder / "run", max_steps=6, save_every=3, holdout=HoldoutConfig(0.3), eval_every=3
    )
    train(config, World())
    return folder / "run"


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def card_of(run, out, layout="zlab", **settings):
    export_drafter(ExportConfig(run, out, layout, **settings))
    return (out / "README.md").read_text()


def test_a_runs_newest_checkpoint_is_exported_without_the_trainers_state(run, tmp_path):
    card_of(run, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    ours, theirs = load_drafter(checkpoint_path(run, 6)), load_drafter(tmp_path / "out")
    assert ours.config == theirs.config
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_the_card_has_the_figures_of_the_runs_files(run, tmp_path):
    card = card_of(run, tmp_path / "out")
    walk = [line for line in lines_of(run) if line.get("kind") == "evaluation"][-1]
    last = [line for line in lines_of(run) if "kind" not in line][-1]
    assert f"| all | {walk['walk_tau']:.2f} | {walk['heldout_anchor_tau']:.2f} |" in card
    assert f"at step {walk['step']}" in card
    shares = zip((16, 32, 64), last["mix"]["quota"], last["mix"]["shares"], strict=True)
    for edge, owed, drawn in shares:
        assert f"| up to {edge} tokens | {owed:.2%} | {drawn:.2%} |" in card
    identity = load_manifest(run.parent / "cache").identity
    assert identity.corpus_digest in card
    assert "| data | chats.jsonl, more \\| of it |" in card
    assert "| optim.lr | 0.001 |" in card
    assert f"| loss at the end | {last['loss']:.2f} |" in card


def test_an_older_checkpoint_gets_the_figures_of_its_own_step(run, tmp_path):
    card = card_of(checkpoint_path(run, 3), tmp_path / "out")
    assert "| steps done | 3 |" in card
    assert "held-out answers at step 3:" in card


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 8, 16])
def test_every_server_command_has_its_own_count_of_the_block(layout, size):
    card = model_card(drafter_config(block_size=size), layout, "Qwen/Qwen3-8B", History())
    assert re.findall(r"--speculative-num-draft-tokens (\d+)", card) == [str(size)]
    if layout == "speculators":
        assert "vllm serve .\n" in card or "vllm serve .  #" in card
    else:
        assert re.findall(r'"num_speculative_tokens": (\d+)', card) == [str(size - 1)]
    assert f"B - 1 = {size - 1}." in card
    assert 'speculation_type="dflash"' in card
    assert "base_model: Qwen/Qwen3-8B" in card


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_client_of_another_layout_is_told_how_to_get_its_own(layout):
    card = model_card(drafter_config(), layout, None, History())
    wanted = set(re.findall(r"dflash export \. --to (\w+)", card))
    assert wanted == {"zlab", "transformers"} - {layout}


def test_a_drafter_without_a_run_has_a_card_without_its_sections(tmp_path):
    alone = folder_of(tmp_path / "alone", released_by_zlab(), weights(drafter_config()))
    card = card_of(alone, tmp_path / "out")
    assert re.findall(r"^## (\w+)", card, re.MULTILINE) == ["Serving"]
    assert history_of(alone) == History()


def test_a_run_without_metrics_or_cache_still_has_its_recipe(run, tmp_path):
    settings = json.loads((run / "run.json").read_text())
    settings["config"]["cache"] = str(tmp_path / "gone")
    folder = tmp_path / "run"
    source = checkpoint_path(folder, 6)
    source.parent.mkdir(parents=True)
    checkpoint_path(run, 6).rename(source)
    try:
        (folder / "run.json").write_text(json.dumps(settings))
        card = card_of(source, tmp_path / "out")
    finally:
        source.rename(checkpoint_path(run, 6))
    assert re.findall(r"^## (\w+)", card, re.MULTILINE) == ["Serving", "Recipe"]


def test_speculators_names_the_target_and_checks_that_it_fits(run, tmp_path):
    target = write_target(tmp_path / "target")
    card = card_of(run, tmp_path / "out", "speculators", target=str(target))
    verifier = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target.resolve()), "architectures": ["LlamaForCausalLM"]}
    assert "vllm serve ." in card
    deeper = write_target(tmp_path / "deeper", layers=8)
    with pytest.raises((ConfigError, CheckpointError), match="8"):
        card_of(run, tmp_path / "other", "speculators", target=str(deeper))
    assert not (tmp_path / "other").exists()


def test_speculators_without_a_target_that_can_be_found_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="give --target"):  # the cache was made from one called `tiny`
        card_of(run, tmp_path / "out", "speculators")
    alone = folder_of(tmp_path / "alone", released_by_zlab(), weights(drafter_config()))
    with pytest.raises(ConfigError, match="give --target"):
        card_of(alone, tmp_path / "out", "speculators")


def test_a_scaled_embedding_has_no_place_in_speculators_layout(tmp_path):
    with pytest.raises(ConfigError, match="serve the z-lab layout"):
        LAYOUTS["speculators"].write_config(
            drafter_config(input_embedding_scale=5.5), torch.float32, _verifier()
        )


def _verifier():
    from dflash.export.facts import Verifier

    return Verifier("somebody/target")


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"to": "gguf"}, "'gguf' is not one of zlab"), ({"to": "zlab", "dtype": "float16"}, "'float16'")],
)
def test_unknown_layouts_and_dtypes_are_named(run, tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        ExportConfig(run, tmp_path / "out", **settings)


def test_the_command_and_an_existing_folder(run, tmp_path):
    arguments = [
        "export",
        str(run),
        "--to",
        "transformers",
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "out"),
    ]
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, done.output) == (0, f"transformers layout, 25 tensors: {tmp_path / 'out'}\n")
    assert read_drafter(tmp_path / "out").layout == "transformers"
    again = CliRunner().invoke(cli, arguments)
    assert again.exit_code == 2
    assert again.stderr.count("\n") == 1
    assert "exists already" in again.stderr


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither a drafter folder nor a run"):
        export_drafter(ExportConfig(tmp_path, tmp_path / "out", "zlab"))
