"""`dflash import`: checkpoints of other packages become drafters here, or are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from strange_folders import (
    FOREIGN,
    NETWORK,
    folder_of,
    released_by_zlab,
    released_for_transformers,
    saved_by_speculators,
    sharded,
    weights,
)
from support import drafter_config, write_target

from dflash.cli import cli
from dflash.errors import CheckpointError
from dflash.export.folder import renamed
from dflash.export.layouts import LAYOUTS
from dflash.export.take import import_drafter, read_drafter
from dflash.head import HeadFacts
from dflash.pretrained import load_drafter
from dflash.train.initial import initial_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(write_target(tmp_path_factory.mktemp("take") / "target"))


def foreign(path, layout, **changes):
    """A folder of that layout with weights of `NETWORK`."""
    tensors = renamed(weights(NETWORK), LAYOUTS[layout].RENAMED)
    return folder_of(path, FOREIGN[layout](**changes), tensors)


def refusal(folder, target=None):
    with pytest.raises(CheckpointError) as caught:
        read_drafter(folder, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", FOREIGN)
def test_other_peoples_checkpoints_give_the_same_network(tmp_path, target, layout):
    """Defaults that a file leaves out are filled in; theta and taps come out in our terms."""
    import_drafter(foreign(tmp_path / "theirs", layout), tmp_path / "ours", target)
    loaded = load_drafter(tmp_path / "ours")
    for name in (
        "target_layer_ids",
        "rope_theta",
        "head_dim",
        "num_target_layers",
        "vocab_size",
        "block_size",
    ):
        assert getattr(loaded.config, name) == getattr(NETWORK, name), name
    for name, tensor in weights(NETWORK).items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("layout", FOREIGN)
def test_training_goes_on_from_what_was_imported(tmp_path, target, layout):
    import_drafter(foreign(tmp_path / "theirs", layout), tmp_path / "ours", target)
    drafter = initial_drafter(replace(NETWORK, block_size=8), HeadFacts(), 0, tmp_path / "ours")
    assert drafter.config.block_size == 8
    for name, tensor in weights(NETWORK).items():
        assert torch.equal(drafter.state_dict()[name], tensor.float()), name


@pytest.mark.parametrize("layout", ["speculators", "transformers"])
def test_a_checkpoint_that_does_not_know_its_target_asks_for_it(tmp_path, layout):
    assert refusal(foreign(tmp_path / "theirs", layout)).endswith("give --target")


@pytest.mark.parametrize("layout", FOREIGN)
def test_weights_in_several_files(tmp_path, target, layout):
    taken = read_drafter(sharded(foreign(tmp_path / "theirs", layout)), target)
    assert taken.config.target_layer_ids == (1, 3)
    assert all(torch.equal(taken.tensors[name], tensor) for name, tensor in weights(NETWORK).items())


def test_copies_of_the_targets_weights_are_left_out(tmp_path, target):
    """Earlier versions of speculators save the verifier's embedding and `lm_head` too."""
    tensors = weights(NETWORK)
    copies = {name: torch.zeros(260, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    folder = folder_of(tmp_path / "theirs", saved_by_speculators(), tensors | copies)
    assert read_drafter(folder, target).tensors.keys() == tensors.keys()


def test_mixed_dtypes_are_widened_not_rounded(tmp_path):
    tensors = weights(NETWORK) | {"norm.weight": torch.full((32,), 1.0001)}
    taken = read_drafter(folder_of(tmp_path / "theirs", released_by_zlab(), tensors))
    assert {tensor.dtype for tensor in taken.tensors.values()} == {torch.float32}
    assert torch.equal(taken.tensors["norm.weight"], tensors["norm.weight"])


@pytest.mark.parametrize("layout", FOREIGN)
@pytest.mark.parametrize(
    ("change", "said"),
    [("missing", "1 tensors are missing"), ("extra", "1 unknown"), ("shape", "has shape"), ("nan", "NaN")],
)
def test_tensors_must_be_exactly_those_of_the_network(tmp_path, target, layout, change, said):
    folder = foreign(tmp_path / "theirs", layout)
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors["norm.weight"]
    elif change == "extra":
        tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(1)
    else:
        tensors["norm.weight"] = torch.ones(31) if change == "shape" else torch.full((32,), torch.nan)
    save_file(tensors, folder / "model.safetensors")
    assert said in refusal(folder, target)


def _layer(**layer):
    return saved_by_speculators(layer)


REFUSED = {
    "sliding attention": (
        released_for_transformers(layer_types=["sliding_attention"] * 2),
        "sliding_attention",
    ),
    "Muse's default of sliding attention": (
        {k: v for k, v in released_for_transformers().items() if k != "layer_types"},
        "sliding_attention",
    ),
    "stretched RoPE": (released_by_zlab(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
    "partial RoPE": (released_by_zlab(partial_rotary_factor=0.25), "0.25 of a head"),
    "partial RoPE inside": (
        _layer(rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        "0.5 of a head",
    ),
    "part of the vocabulary": (saved_by_speculators(draft_vocab_size=100), "100 of the target's 260"),
    "sampling from the anchor": (saved_by_speculators(sample_from_anchor=True), "sample_from_anchor"),
    "another algorithm": (saved_by_speculators(speculators_model_type="eagle3"), "'eagle3'"),
    "the embedding as a tap": (saved_by_speculators(aux_hidden_state_layer_ids=[0, 2]), "tap -1"),
    "no taps": (released_by_zlab(dflash_config={"mask_token_id": 3}), "target_layer_ids"),
    "taps that are no numbers": (saved_by_speculators(aux_hidden_state_layer_ids=None), "not the config"),
    "another target": (_layer(vocab_size=300) | {"draft_vocab_size": 300}, "that of --target has 260"),
    "another model": ({"model_type": "llama"}, "model_type is 'llama'"),
    "a list": ([], "not a JSON object"),
    "words for numbers": (released_for_transformers(hidden_size="wide"), "not the config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_with_the_reason(tmp_path, target, case):
    config, said = REFUSED[case]
    assert said in refusal(folder_of(tmp_path / "theirs", config, weights(NETWORK)), target)


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    folder = sharded(foreign(tmp_path / "theirs", "zlab"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../other.safetensors"}}))
    assert "outside its folder" in refusal(folder)


def test_a_folder_without_anything_is_refused(tmp_path):
    assert "holds no drafter" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "holds no drafter" in refusal(tmp_path)


def test_the_command(tmp_path, target):
    source = foreign(tmp_path / "theirs", "speculators")
    out = str(tmp_path / "ours")
    arguments = ["import", str(source), "--target", target, "--out", out]
    done = CliRunner().invoke(cli, arguments)
    assert done.output == f"speculators layout, 25 tensors: {out}\n"
    again = CliRunner().invoke(cli, arguments)
    assert (again.exit_code, again.stderr) == (
        2,
        f"Error: {out} exists already; give a folder that does not\n",
    )


def test_nothing_is_left_of_an_import_that_fails(tmp_path):
    folder = foreign(tmp_path / "theirs", "zlab")
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError):
        import_drafter(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_is_imported_can_be_exported_for_its_own_client_again(tmp_path, target):
    """A speculators checkpoint names its target, so an export of what was imported asks for nothing more."""
    taken = read_drafter(foreign(tmp_path / "theirs", "speculators"), target)
    assert taken.target == "somebody/target"
    assert taken.config == drafter_config(
        rope_theta=1e6,
        max_position_embeddings=taken.config.max_position_embeddings,
        eos_token_id=taken.config.eos_token_id,
        pad_token_id=taken.config.pad_token_id,
        bos_token_id=taken.config.bos_token_id,
    )
