"""Transformers opens an exported drafter and decodes with it exactly as our own decoder does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from overfit import answered, open_target, overfitted, random_prompts
from support import drafter_config, write_target
from transformers import AutoModel, AutoModelForCausalLM

from dflash.attention import BlockLayout
from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.errors import ConfigError
from dflash.export.give import ExportConfig, export_drafter, export_network
from dflash.export.transformers import write_config
from dflash.pretrained import load_drafter, write_drafter

NEW_TOKENS = 40
LENGTHS = [5, 9, 14, 3, 21, 1]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("export") / "target")


@pytest.fixture(scope="module")
def target(target_folder):
    return open_target(target_folder)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def drafter(target, prompts):
    known = [answered(target, prompt, NEW_TOKENS) for prompt in prompts[:3]]
    return overfitted(target, drafter_config(block_size=6), known, steps=60)


@pytest.fixture(scope="module")
def folder(drafter, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "drafter"
    export_network(drafter, out, "transformers", torch.float32)
    return out


@pytest.fixture(scope="module")
def assistant(folder):
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(target_folder):
    """The target as a user of Transformers opens it, with a counter of its forward passes."""
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    model.passes = 0

    def count(*_args):
        model.passes += 1

    model.register_forward_hook(count)
    return model


@pytest.fixture(scope="module")
def assisted(model, assistant, prompts):
    """What Transformers decodes with the drafter, by number of the prompt and new tokens."""

    @cache
    def of(number: int, tokens: int):
        how = {"assistant_model": assistant, "speculation_type": "dflash"}
        return generated(model, prompts[number], max_new_tokens=tokens, **how)

    return of


def generated(model, prompt, **how):
    """New tokens and how many forward passes of the target they took."""
    before = model.passes
    ids = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, **how)
    return ids[0, len(prompt) :].tolist(), model.passes - before


def test_no_weight_is_missing_unknown_or_newly_drawn(folder):
    """A name that does not match would leave random weights behind a mere warning."""
    _, loading = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_same_network_in_float32(drafter, assistant):
    """One block behind a context: largest difference below 1e-5."""
    generator = torch.Generator().manual_seed(3)
    rows, size = 17, drafter.config.block_size
    features = torch.randn(rows, drafter.fc.in_features, generator=generator)
    block = torch.randn(1, size, drafter.config.hidden_size, generator=generator)
    positions = torch.arange(rows + size)
    ours = drafter(block, positions[None, rows:], features, positions[:rows], BlockLayout.build([0], [rows]))
    theirs = assistant(
        noise_embeds=block, context_hidden_states=features[None], position_ids=positions[None]
    ).last_hidden_state
    assert (ours - theirs).abs().max() < 1e-5


def test_generate_gives_the_greedy_text(model, assisted, prompts):
    for number, prompt in enumerate(prompts):
        plain, passes = generated(model, prompt, max_new_tokens=NEW_TOKENS)
        drafted, fewer = assisted(number, NEW_TOKENS)
        assert drafted == plain
        assert fewer <= passes == len(plain)


# A pass adds up to 6 tokens, so these lengths end a block at each of its slots.
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 8, NEW_TOKENS])
def test_as_many_target_passes_as_our_decoder(target, drafter, assisted, prompts, tokens):
    """Same tokens, same passes, prefill included: acceptance is counted alike."""
    for number in range(len(prompts)) if tokens == NEW_TOKENS else (2, 3, 4):
        ours = generate(target, drafter, prompts[number], DecodeConfig(tokens))
        assert assisted(number, tokens) == (ours.tokens, ours.target_passes)


def test_the_comparison_sees_drafts_accepted_and_refused(target, drafter, prompts):
    """Without this, a drafter that never succeeds would pass everything above."""
    accepted = [
        count for prompt in prompts for count in generate(target, drafter, prompt, DecodeConfig(40)).accepted
    ]
    assert min(accepted) == 1
    assert max(accepted) == drafter.config.block_size


def test_an_existing_folder_is_not_written_into(drafter, folder):
    with pytest.raises(ConfigError, match="exists already"):
        export_network(drafter, folder, "transformers")


def test_attention_biases_have_no_counterpart():
    with pytest.raises(ConfigError, match="attention biases"):
        write_config(drafter_config(attention_bias=True), torch.float32, None)


def test_a_tap_that_transformers_would_read_behind_the_final_norm_is_refused():
    """The network would load and draft, only worse."""
    with pytest.raises(ConfigError, match="tap 5 is the target's last layer"):
        write_config(drafter_config(target_layer_ids=(1, 5)), torch.float32, None)


def test_a_servable_folder_survives_the_way_to_transformers(drafter, tmp_path):
    """What `dflash train` leaves in bf16 and what is exported from it hold the same values."""
    write_drafter(drafter, tmp_path)
    export_drafter(ExportConfig(tmp_path, tmp_path / "exported", "transformers"))
    theirs = AutoModel.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    ours = load_drafter(tmp_path, torch.float32).state_dict()
    for name, tensor in ours.items():
        renamed = name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc.")
        assert torch.equal(theirs[renamed], tensor), name
