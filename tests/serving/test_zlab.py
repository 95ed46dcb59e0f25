"""z-lab's own `dflash` 0.1.0 loads our checkpoints, computes what we compute, drafts what we draft."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from clients import decode_all, run_client
from overfit import answered, open_target, overfitted, random_prompts
from safetensors.torch import load_file, save_file
from support import VOCAB, drafter_config, write_target

from dflash.attention import BlockLayout
from dflash.decode.drafting import BlockDrafter
from dflash.drafter import Drafter
from dflash.pretrained import write_drafter

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]
CYCLES = (7, 1, 4, 6)
"""Context rows that each cycle adds: a prefill, nothing accepted, a part, a whole block."""
NEW_TOKENS = 40
log = logging.getLogger("z-lab")
NETWORKS = {
    "plain": {},
    "biased": {"attention_bias": True, "rope_theta": 1e6, "block_size": 8},
    "wide heads": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "target_layer_ids": (0, 2, 4),
        "rms_norm_eps": 1e-5,
    },
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("zlab") / "target")


@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_forward_pass_on_random_weights(target_folder, tmp_path, network):
    """In float32, with and without cache, over cycles: largest difference below 1e-5."""
    config = drafter_config(**NETWORKS[network])
    generator = torch.Generator().manual_seed(5)
    drafter = Drafter(config).requires_grad_(False)
    for parameter in drafter.parameters():  # norms too: left at one they would hide a mix-up
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.1 if parameter.ndim > 1 else 1 + noise * 0.3)
    write_drafter(drafter, tmp_path, torch.float32)
    features = [torch.randn(rows, drafter.fc.in_features, generator=generator) for rows in CYCLES]
    anchors = torch.randint(4, VOCAB, (len(CYCLES),), generator=generator).tolist()
    save_file(
        {f"features.{cycle}": part for cycle, part in enumerate(features)}, tmp_path / "inputs.safetensors"
    )
    job = {
        "drafter": str(tmp_path),
        "target": str(target_folder),
        "inputs": str(tmp_path / "inputs.safetensors"),
        "anchors": anchors,
    }
    theirs = load_file(run_client("zlab", job, tmp_path, "forward"))
    at_work = BlockDrafter(drafter, open_target(target_folder, config.target_layer_ids))
    for cycle, anchor in enumerate(anchors):
        at_work.extend(features[cycle])
        logits = at_work.logits(anchor, config.block_size - 1)
        hidden = whole_forward(drafter, at_work, torch.cat(features[: cycle + 1]), anchor)
        differences = {
            "no cache": (hidden - theirs[f"whole.{cycle}"]).abs().max(),
            "its cache": (hidden - theirs[f"cached.{cycle}"]).abs().max(),
            "our cache": (logits - theirs[f"logits.{cycle}"]).abs().max(),
        }
        log.info("cycle %d, largest differences: %s", cycle, {k: f"{v:.1e}" for k, v in differences.items()})
        assert max(differences.values()) < 1e-5


def whole_forward(drafter, at_work, features, anchor):
    """Normed states `[B, H]` by the training pass, which knows no cache."""
    rows, config = len(features), drafter.config
    ids = torch.tensor([anchor] + [config.mask_token_id] * (config.block_size - 1))
    positions = torch.arange(rows + config.block_size)
    layout = BlockLayout.build([0], [rows])
    return drafter(at_work.head.embed(ids)[None], positions[None, rows:], features, positions[:rows], layout)[
        0
    ]


@pytest.fixture(scope="module")
def tiny(target_folder, tmp_path_factory):
    """A tiny target and a drafter that knows half of what it is asked, in float32 on both sides."""
    target = open_target(target_folder)
    prompts = random_prompts([5, 9, 14, 3, 21, 1])
    samples = [answered(target, prompt, 40) for prompt in prompts[:3]]
    drafter = overfitted(target, drafter_config(block_size=6), samples, steps=60)
    folder = tmp_path_factory.mktemp("drafter")
    write_drafter(drafter, folder, torch.float32)
    return target_folder, folder, target, drafter, [prompt.tolist() for prompt in prompts]


@pytest.fixture(params=["tiny", "demo"])
def pair(request):
    """Folders of target and drafter, both opened here, and prompts."""
    *opened, prompts = request.getfixturevalue(request.param)
    # The demo's take seconds each: some of every kind will do.
    return *opened, prompts if request.param == "tiny" else prompts[::3]


def test_the_same_drafts_for_the_same_context(pair, tmp_path):
    """Token for token, while the context grows; z-lab reads the features off the target by its own rule."""
    target_folder, drafter_folder, target, drafter, prompts = pair
    generations = decode_all(target, drafter, prompts, 24)
    sequences = [prompt + generation.tokens for prompt, generation in zip(prompts, generations, strict=True)]
    places = [list(range(len(prompt), len(ids), 3)) for prompt, ids in zip(prompts, sequences, strict=True)]
    job = {
        "target": str(target_folder),
        "drafter": str(drafter_folder),
        "sequences": sequences,
        "places": places,
    }
    theirs = json.loads(run_client("zlab", job, tmp_path, "draft").read_text())
    ours = [our_drafts(target, drafter, ids, at) for ids, at in zip(sequences, places, strict=True)]
    assert theirs == ours
    assert len({tuple(draft) for drafts in ours for draft in drafts}) > len(prompts)  # they are not all one


def our_drafts(target, drafter, ids, places):
    _, features = target.forward(torch.tensor(ids), target.new_cache(), keep_logits=1)
    at_work = BlockDrafter(drafter, target)
    drafts = []
    for start, end in zip([0, *places], places, strict=False):
        at_work.extend(features[start:end])
        drafts.append(at_work.logits(ids[end], drafter.config.block_size - 1).argmax(-1).tolist())
    return drafts


def test_its_decoding_loop_gives_our_tokens_in_our_steps(pair, tmp_path):
    """The same text, and as many tokens accepted in each cycle that has room for a whole block.

    Where less is left, z-lab's loop gives the drafter a shorter block than it was trained on; we and the
    servers do not, so the drafts differ there.
    """
    target_folder, drafter_folder, target, drafter, prompts = pair
    ours = decode_all(target, drafter, prompts, NEW_TOKENS)
    job = {
        "target": str(target_folder),
        "drafter": str(drafter_folder),
        "prompts": prompts,
        "max_new_tokens": NEW_TOKENS,
        "stop_tokens": sorted(target.stop_tokens),
    }
    theirs = json.loads(run_client("zlab", job, tmp_path, "generate").read_text())
    size = drafter.config.block_size
    assert [run["tokens"] for run in theirs] == [run.tokens for run in ours]
    steps = [whole_blocks(run.accepted, size) for run in ours]
    assert [whole_blocks(run["accepted"], size) for run in theirs] == steps
    counts = [count for run in steps for count in run]
    log.info("%d cycles, up to %d tokens in one", len(counts), max(counts))
    assert max(counts) > 1


def whole_blocks(accepted, size):
    """The leading cycles whose block fits before the limit."""
    before = [
        1 + sum(accepted[:cycle]) for cycle in range(len(accepted))
    ]  # tokens produced, prefill's included
    return [count for count, done in zip(accepted, before, strict=True) if done - 1 + size <= NEW_TOKENS]
