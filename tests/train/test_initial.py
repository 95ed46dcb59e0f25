"""A run may start from another drafter; what does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import drafter_config, write_cache
from tiny_runs import LENGTHS, tiny_config, trained

from dflash.drafter import Drafter, init_weights
from dflash.errors import CheckpointError, ConfigError
from dflash.pretrained import load_drafter, write_drafter
from dflash.train.network import NetworkConfig
from dflash.train.objective import ObjectiveConfig
from dflash.train.optim import OptimConfig
from dflash.train.run import Run
from dflash.train.trainer import train
from dflash.world import World

ALONE = World()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return write_cache(tmp_path_factory.mktemp("initial") / "cache", LENGTHS)


@pytest.fixture
def source(tmp_path):
    """A drafter folder as others publish them: narrower MLP than the target's, bf16."""
    drafter = Drafter(drafter_config(intermediate_size=40))
    init_weights(drafter, 9)
    folder = tmp_path / "published"
    folder.mkdir()
    write_drafter(drafter, folder)
    return folder


def test_training_goes_on_from_the_weights_of_a_folder(cache, source, tmp_path):
    run = Run.open(tiny_config(cache, tmp_path / "run", init_from=source), ALONE)
    theirs = load_drafter(source).state_dict()
    for name, tensor in run.drafter.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, theirs[name].float()), name
    assert run.drafter.config.intermediate_size == 40
    result = train(tiny_config(cache, tmp_path / "tuned", init_from=source, max_steps=2), ALONE)
    assert load_drafter(result.checkpoint).config.intermediate_size == 40
    moved = trained(result.checkpoint)
    assert all((moved[f"master.{n}"] != t.float()).any() for n, t in theirs.items())


def test_training_goes_on_from_the_newest_checkpoint_of_a_run_with_blocks_of_another_size(cache, tmp_path):
    first = train(tiny_config(cache, tmp_path / "run", max_steps=2), ALONE)
    config = tiny_config(
        cache,
        tmp_path / "longer",
        init_from=tmp_path / "run",
        network=NetworkConfig(2, 6),
        objective=ObjectiveConfig(6),
        optim=OptimConfig(lr=1e-9),
        max_steps=1,
    )
    second = train(config, ALONE)
    ours, before = load_drafter(second.checkpoint), load_drafter(first.checkpoint)
    assert ours.config == replace(before.config, block_size=6)
    assert torch.equal(ours.fc.weight, before.fc.weight)
    resumed = train(replace(config, resume=True), ALONE)
    assert resumed.steps == 1
    with pytest.raises(ConfigError, match="init_from: was"):
        train(replace(config, resume=True, init_from=None), ALONE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"target_layer_ids": (1, 4)}, r"its target_layer_ids is \(1, 4\), this cache and run have \(1, 3\)"),
        ({"num_hidden_layers": 3}, "its num_hidden_layers is 3, this cache and run have 2; give --layers 3"),
        ({"mask_token_id": 7}, "its mask_token_id is 7, .* give --mask-token-id 7"),
        ({"hidden_size": 16}, "its hidden_size is 16"),
        ({"vocab_size": 300}, "its vocab_size is 300"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(cache, tmp_path, change, text):
    folder = tmp_path / "other"
    folder.mkdir()
    write_drafter(Drafter(drafter_config(**change)), folder)
    with pytest.raises(ConfigError, match=text):
        train(tiny_config(cache, tmp_path / "run", init_from=folder), ALONE)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_drafter_is_refused(cache, tmp_path):
    with pytest.raises(CheckpointError, match="neither a drafter folder nor a run with a checkpoint"):
        train(tiny_config(cache, tmp_path / "run", init_from=tmp_path), ALONE)
