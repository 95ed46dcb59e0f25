"""Every family of targets: taps to the layer, the truncated model equal to the full one, and the head."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
from target_families import FAMILIES, HIDDEN, LAYERS, VOCAB, write_family
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config, Qwen3_5Config

from dflash import target as target_module
from dflash.target import Target, TruncatedTarget, final_norm, inspect_target, load_head

CPU = torch.device("cpu")
families = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp("targets") / name, name)
        return made[name]

    return of


@pytest.fixture(scope="module")
def full_model(folder_of):
    """The whole model of a family as Transformers opens it, to look at only."""

    @cache
    def of(name):
        return AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()

    return of


def reference(model, ids):
    """The stream `[T, H]` behind each layer as the full model gives it; the last before the final norm."""
    before = []
    norm = final_norm(model.get_decoder(), HIDDEN)
    handle = norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0][0]))
    with torch.no_grad():
        output = model(torch.from_numpy(ids)[None].long(), output_hidden_states=True)
    handle.remove()
    assert len(output.hidden_states) == LAYERS + 1
    return [state[0] for state in output.hidden_states[1:-1]] + before[:1], output.logits[0]


def sequences(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, length).astype(np.int32) for length in lengths]


@families
@pytest.mark.parametrize("deepest", range(LAYERS))
def test_truncated_taps_are_the_full_models_layers(folder_of, full_model, name, deepest):
    """For every T, in a batch of several lengths: hidden_states[T + 1], and the last before the norm."""
    folder, ids = folder_of(name), sequences(13, 9, 3)
    taps = tuple(range(deepest + 1))
    target = TruncatedTarget(str(folder), taps, dtype=torch.float32, device=CPU)
    out = torch.full((sum(map(len, ids)), len(taps), HIDDEN), float("nan"))
    target.capture(ids, out)
    states = [reference(full_model(name), one)[0] for one in ids]
    for tap in taps:
        expected = torch.cat([state[tap] for state in states])
        torch.testing.assert_close(out[:, tap], expected, atol=2e-5, rtol=1e-4, msg=f"layer {tap}")


NOT_PACKABLE = {"qwen3.5", "gpt-oss"}
"""Linear attention carries its state on; Transformers' gpt-oss ignores where a sequence begins."""


def truncated(folder, *taps):
    return TruncatedTarget(str(folder), taps, dtype=torch.float32, device=CPU)


@families
def test_whether_a_model_can_be_packed_is_found_by_looking(folder_of, name):
    assert truncated(folder_of(name), 0, LAYERS - 1).packs_exactly() is (name not in NOT_PACKABLE)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_PACKABLE))
def test_packed_sequences_do_not_see_each_other(folder_of, name):
    """One row of all samples gives the states that each gives alone."""
    ids, target = sequences(13, 3, 9), truncated(folder_of(name), 0, LAYERS - 1)
    assert not target.packed  # on the CPU a mask over all pairs would cost more than padding
    assert target.computed_tokens([13, 3, 9]) == 39
    alone = torch.empty(25, 2, HIDDEN)
    for number, part in enumerate(torch.split(alone, [13, 3, 9])):
        target.capture([ids[number]], part)
    target.packed = True
    assert target.computed_tokens([13, 3, 9]) == 25
    packed = torch.full_like(alone, float("nan"))
    target.capture(ids, packed)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("flash", "flex", "exact", "tried"),
    [
        (True, True, {"flash_attention_2"}, ["flash_attention_2"]),
        (True, True, {"flex_attention"}, ["flash_attention_2", "flex_attention"]),
        (False, True, {"flex_attention"}, ["flex_attention"]),
        (False, False, set(), ["sdpa"]),
        (True, True, set(), ["flash_attention_2", "flex_attention", "sdpa"]),
    ],
)
def test_the_first_attention_that_packs_exactly_is_used(folder_of, monkeypatch, flash, flex, exact, tried):
    """And the model's own one, with padding, where none does."""
    monkeypatch.setattr(target_module, "is_flash_attn_2_available", lambda: flash)
    monkeypatch.setattr(target_module, "is_torch_flex_attn_available", lambda: flex)
    target, chosen = truncated(folder_of("llama"), 0), []
    monkeypatch.setattr(type(target.model), "set_attn_implementation", lambda _, name: chosen.append(name))
    monkeypatch.setattr(target, "packs_exactly", lambda: chosen[-1] in exact)
    with torch._dynamo.config.patch(recompile_limit=8):
        assert target.use_packing() is bool(exact)
        # one kind of shape too many would be attended to without the compiler
        assert (torch._dynamo.config.recompile_limit > 8) == ("flex_attention" in tried)
    assert chosen == tried


def test_attention_that_does_not_run_is_passed_over_with_a_warning(folder_of, monkeypatch, capsys):
    """Flash attention takes no float32 and no old GPU, flex attention needs a compiler."""
    monkeypatch.setattr(target_module, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(target_module, "is_torch_flex_attn_available", lambda: True)
    target, chosen = truncated(folder_of("llama"), 0), []
    monkeypatch.setattr(type(target.model), "set_attn_implementation", lambda _, name: chosen.append(name))

    def packs_exactly():
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type\nsomewhere")

    monkeypatch.setattr(target, "packs_exactly", packs_exactly)
    assert target.use_packing() is False
    assert chosen == ["flash_attention_2", "flex_attention", "sdpa"]
    warning = (
        "flash_attention_2 does not run here, so batches are not packed with it: FlashAttention only support"
    )
    assert warning in capsys.readouterr().err


@families
def test_no_two_layers_put_out_the_same(full_model, name):
    """Otherwise the test above could not tell a tap that is one layer off."""
    states, _ = reference(full_model(name), *sequences(9))
    for tap in range(1, LAYERS):
        assert (states[tap] - states[tap - 1]).abs().max() > 1e-2


@families
def test_the_head_is_the_full_models(folder_of, full_model, name):
    """Its embedding gives the decoder's input, and its `lm_head` the model's logits behind the final norm."""
    (ids,) = sequences(9)
    model, head = full_model(name), load_head(str(folder_of(name)), torch.float32)
    tokens = torch.from_numpy(ids).long()
    torch.testing.assert_close(head.embed(tokens), model.get_input_embeddings()(tokens).detach())
    states, logits = reference(model, ids)
    norm = final_norm(model.get_decoder(), HIDDEN)
    assert torch.equal(head.final_norm, norm.weight)
    with torch.no_grad():
        torch.testing.assert_close(head.logits(norm(states[-1])), logits, atol=1e-4, rtol=1e-4)
    assert head.tied is bool(model.config.tie_word_embeddings)


def test_the_families_differ_where_it_matters(folder_of):
    """Some tie the head, one scales its embedding and offsets its norm."""
    heads = {
        name: load_head(str(folder_of(name)), torch.float32) for name in ("llama", "llama-tied", "gemma3")
    }
    assert [head.tied for head in heads.values()] == [False, True, True]
    assert heads["gemma3"].facts.embed_scale == pytest.approx(HIDDEN**0.5, rel=1e-3)
    facts = {name: load_head(str(folder_of(name)), torch.float32).facts for name in FAMILIES}
    assert {name for name in FAMILIES if facts[name].norm_unit_offset} == {"gemma3", "qwen3.5"}


@families
def test_decoding_taps_the_same_states(folder_of, full_model, name):
    folder, (ids,) = folder_of(name), sequences(9)
    target = Target(str(folder), (0, LAYERS - 1), dtype=torch.float32, device=CPU)
    states, logits = reference(full_model(name), ids)
    found, features = target.forward(torch.from_numpy(ids).long(), target.new_cache(), keep_logits=9)
    torch.testing.assert_close(features, torch.cat([states[0], states[-1]], -1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)


@families
def test_a_target_is_identified_without_its_weights(folder_of, name):
    facts = inspect_target(str(folder_of(name)))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (LAYERS, HIDDEN, VOCAB)


WRAPPED = {
    "qwen3.5": (
        Qwen3_5Config,
        {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": HIDDEN,
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
    ),
    "gemma3": (
        Gemma3Config,
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
}


@pytest.fixture(params=WRAPPED)
def wrapped(request, tmp_path):
    """A model with an image tower around its text decoder, as these families are published."""
    kind, vision = WRAPPED[request.param]
    torch.manual_seed(0)
    config = kind(text_config=FAMILIES[request.param]().to_dict(), vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_text_decoder_is_found_inside_a_multimodal_target(wrapped):
    (ids,) = sequences(9)
    target = TruncatedTarget(str(wrapped), (0, 2), dtype=torch.float32, device=CPU)
    out = torch.empty(9, 2, HIDDEN)
    target.capture([ids], out)
    model = AutoModelForImageTextToText.from_pretrained(wrapped, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=torch.from_numpy(ids)[None].long(), output_hidden_states=True).hidden_states
    for k, tap in enumerate((0, 2)):
        torch.testing.assert_close(out[:, k], states[tap + 1][0], atol=2e-5, rtol=1e-4)
    assert load_head(str(wrapped), torch.float32).vocab_size == VOCAB
    assert inspect_target(str(wrapped)).num_layers == LAYERS


def quantised(folder, **changes):
    path = folder / "config.json"
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": how | changes}))
    return inspect_target(str(folder)).config_digest


def test_the_identity_records_the_quantisation(wrapped, tmp_path):
    """Whether it stands in the text model's configuration or around it."""
    for folder in (wrapped, write_family(tmp_path / "plain", "llama")):
        before = inspect_target(str(folder)).config_digest
        digests = {before, quantised(folder), quantised(folder, weight_block_size=[64, 64])}
        assert len(digests) == 3
