"""The frozen target: the tapped states are the right ones, to the layer; it is known by its content."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import EOS, VOCAB, write_target
from transformers import AutoModelForCausalLM, masking_utils

from dflash.errors import ConfigError, TargetError
from dflash.target import (
    Target,
    TruncatedTarget,
    decoder_layers,
    final_norm,
    inspect_target,
    load_config,
    load_head,
    load_tokenizer,
    truncated_config,
)

LAYERS = 6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target") / "model", layers=LAYERS)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def reference(model, ids: np.ndarray) -> list[torch.Tensor]:
    """The stream `[T, H]` behind each layer: `hidden_states[T + 1]`; the last one before the final norm."""
    before_norm = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    with torch.no_grad():
        states = model(torch.from_numpy(ids)[None].long(), output_hidden_states=True).hidden_states
    handle.remove()
    assert len(states) == LAYERS + 1
    return [state[0] for state in states[1:-1]] + before_norm


def test_taps_of_a_padded_batch_are_taken_without_waiting_for_the_device(folder, monkeypatch):
    """Nothing can be read from torch's device `meta`, nor does it have shapes that depend on values.

    Transformers looks once, before the first layer, whether the batch is packed.
    """
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    meta = torch.device("meta")
    target = TruncatedTarget(str(folder), (1, 3), dtype=torch.float32, device=meta)
    target.capture(random_sequences(1, 9, 4), torch.empty(14, 2, target.hidden_size, device=meta))


@pytest.mark.parametrize("device", ["cuda:3", "cpu"])
@pytest.mark.parametrize("whole", [True, False])
def test_weights_go_straight_to_a_gpu(folder, monkeypatch, device, whole):
    """Through the host's memory each of eight ranks would hold a copy of all of them there."""
    asked = []

    def load(_kind, _name, **options):
        asked.append(options.get("device_map"))
        raise torch.OutOfMemoryError

    monkeypatch.setattr("dflash.target.load_model", load)
    kind = Target if whole else TruncatedTarget
    with pytest.raises(torch.OutOfMemoryError):
        kind(str(folder), (1, 3), dtype=torch.bfloat16, device=torch.device(device))
    assert asked == [{"": torch.device("cuda", 3)} if device == "cuda:3" else None]


def test_too_little_memory_is_no_fault_of_the_target(folder, monkeypatch):
    """The command line then says what takes less of it."""

    def load(*_names, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        Target(str(folder), (1, 3), dtype=torch.bfloat16, device=CPU)


def random_sequences(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("lengths", [(7,), (5, 5), (1, 9, 4)], ids=["one", "equal", "padded"])
@pytest.mark.parametrize("tap", range(LAYERS))
def test_each_tap_is_the_residual_stream_behind_its_layer(folder, model, tap, lengths):
    target = TruncatedTarget(str(folder), (tap,), dtype=torch.float32, device=CPU)
    sequences = random_sequences(*lengths)
    out = torch.full((sum(lengths), 1, target.hidden_size), float("nan"))
    target.capture(sequences, out)
    expected = torch.cat([reference(model, ids)[tap] for ids in sequences])
    torch.testing.assert_close(out[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_several_taps_are_captured_side_by_side(folder, model):
    target = TruncatedTarget(str(folder), (0, 2, 4), dtype=torch.float32, device=CPU)
    sequences = random_sequences(3, 8)
    out = torch.empty(11, 3, 32)
    target.capture(sequences, out)
    states = [reference(model, ids) for ids in sequences]
    for k, tap in enumerate((0, 2, 4)):
        torch.testing.assert_close(out[:, k], torch.cat([s[tap] for s in states]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("deepest", [0, 3, 5])
def test_layers_above_the_deepest_tap_are_not_loaded(folder, deepest):
    target = TruncatedTarget(str(folder), (deepest,), dtype=torch.float32, device=CPU)
    assert len(target.model.layers) == deepest + 1
    assert not any("lm_head" in name for name, _ in target.model.named_modules())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_decoding_taps_the_same_states_in_one_go_or_piece_by_piece(folder, model):
    target = Target(str(folder), (0, 3, 5), dtype=torch.float32, device=CPU)
    (ids,) = random_sequences(9)
    states = reference(model, ids)
    expected = torch.cat([states[tap] for tap in (0, 3, 5)], dim=-1)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)[None].long()).logits[0]
    for cuts in ([9], [4, 1, 4]):
        cache, taken, logits = target.new_cache(), [], []
        for part in torch.from_numpy(ids).long().split(cuts):
            out, features = target.forward(part, cache, keep_logits=len(part))
            logits.append(out)
            taken.append(features)
        torch.testing.assert_close(torch.cat(taken), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat(logits), wanted, atol=1e-4, rtol=1e-5)


def test_only_the_logits_that_are_asked_for_are_computed(folder):
    target = Target(str(folder), (1,), dtype=torch.float32, device=CPU)
    logits, features = target.forward(torch.arange(4, 12), target.new_cache(), keep_logits=1)
    assert logits.shape == (1, VOCAB)
    assert features.shape == (8, 32)


@pytest.mark.parametrize("kind", [TruncatedTarget, Target])
@pytest.mark.parametrize(
    ("taps", "text"),
    [
        ((1, LAYERS), rf"tap {LAYERS} is outside the target's layers 0\.\.{LAYERS - 1}"),
        ((-1,), "tap -1 is outside"),
        ((2, 2), "tap 2 is repeated in 2,2"),
        ((3, 1), "taps 3,1 are not in ascending order"),
        ((), "no taps"),
    ],
)
def test_bad_taps_are_refused_before_anything_runs(folder, kind, taps, text):
    with pytest.raises(ConfigError, match=text):
        kind(str(folder), taps, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_loaded_without_the_decoder(tmp_path, tied):
    folder = write_target(tmp_path, tied=tied)
    whole = Target(str(folder), (1,), dtype=torch.float32, device=CPU).head
    head = load_head(str(folder), torch.float32)
    assert head.tied is tied
    assert head.facts == whole.facts
    for name in ("embedding", "lm_head", "final_norm"):
        assert torch.equal(getattr(head, name), getattr(whole, name))


def test_stop_tokens_are_those_of_the_generation_config(folder):
    target = Target(str(folder), (1,), dtype=torch.float32, device=CPU)
    assert target.stop_tokens == {EOS}
    target.model.generation_config.eos_token_id = [EOS, 9]
    assert target.stop_tokens == {EOS, 9}
    target.model.generation_config.eos_token_id = None
    assert target.stop_tokens == frozenset()


def digests(folder) -> tuple[str, str]:
    facts = inspect_target(str(folder))
    return facts.config_digest, facts.weights_digest


def test_moving_or_renaming_the_folder_changes_no_digest(tmp_path):
    folder = write_target(tmp_path / "a", layers=2)
    before = digests(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    (moved / "model.safetensors").rename(moved / "weights.safetensors")
    assert digests(moved) == before


def test_a_changed_weight_or_config_value_changes_its_digest(tmp_path):
    folder = write_target(tmp_path, layers=2)
    config, weights = digests(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert digests(folder)[0] == config
    assert digests(folder)[1] != weights
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 2e-6}))
    assert digests(folder)[0] != config


def test_the_dtype_a_folder_names_does_not_change_its_identity(tmp_path):
    folder = write_target(tmp_path, layers=2)
    before = digests(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": "float16", "transformers_version": "9"}))
    assert digests(folder) == before


def test_a_target_is_described_without_loading_it(folder):
    facts = inspect_target(str(folder))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (LAYERS, 32, VOCAB)
    assert facts.config["num_attention_heads"] == 4
    assert facts.name == str(folder)


@pytest.mark.parametrize(
    "load", [inspect_target, load_config, load_tokenizer, lambda name: load_head(name, None)]
)
def test_a_missing_target_is_one_clear_line(tmp_path, load):
    with pytest.raises(TargetError, match="give a model folder or a hub name") as caught:
        load(str(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_refused(tmp_path):
    write_target(tmp_path, layers=1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no"):
        inspect_target(str(tmp_path))
    with pytest.raises(TargetError, match="cannot load the target"):
        Target(str(tmp_path), (0,), dtype=torch.float32, device=CPU)


def test_damaged_weights_are_one_clear_line(tmp_path):
    path = write_target(tmp_path, layers=1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TargetError, match="cannot load the target"):
        Target(str(tmp_path), (0,), dtype=torch.float32, device=CPU)


def test_lists_with_one_entry_a_layer_are_cut_with_the_layers(folder):
    config = load_config(str(folder))
    config.layer_types = ["full_attention"] * LAYERS
    config = truncated_config(config, 2)
    assert config.num_hidden_layers == 2
    assert config.layer_types == ["full_attention"] * 2


def test_a_model_of_another_build_is_refused(model):
    with pytest.raises(TargetError, match="no list of 7 decoder layers"):
        decoder_layers(model, 7)
    with pytest.raises(TargetError, match="no final norm with a weight of 33"):
        final_norm(model.model, 33)


def test_weights_that_are_missing_from_the_file_are_not_filled_with_random_ones(tmp_path):
    path = write_target(tmp_path, layers=2) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights, e\.g\. [a-z.]*layers\.0\.mlp\.up_proj\.weight"):
        TruncatedTarget(str(tmp_path), (1,), dtype=torch.float32, device=CPU)
    with pytest.raises(TargetError, match=r"lacks 1 weights, e\.g\. [a-z.]*layers\.0\.mlp\.up_proj\.weight"):
        Target(str(tmp_path), (1,), dtype=torch.float32, device=CPU)
