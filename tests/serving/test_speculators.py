"""vLLM's `speculators` 0.9 opens what `dflash export --to speculators` writes, and computes the same."""

from __future__ import annotations

import logging

import pytest
import torch
from clients import run_client
from safetensors.torch import load_file, save_file
from support import VOCAB, drafter_config, write_target

from dflash.attention import BlockLayout
from dflash.drafter import Drafter
from dflash.export.give import ExportConfig, export_drafter
from dflash.pretrained import load_drafter, write_drafter
from dflash.target import load_head

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]
ROWS = 40
ANCHORS = [1, 7, 8, 20]
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
log = logging.getLogger("speculators")


def random_drafter(config, seed=5):
    """Weights of which no two are alike; norms too, since left at one they would hide a mix-up."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config).requires_grad_(False)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.1 if parameter.ndim > 1 else 1 + noise * 0.3)
    return drafter


def compare(folder, target_folder, drafter, head, tmp_path):
    """Largest differences of states and logits behind random features, in float32."""
    config, generator = drafter.config, torch.Generator().manual_seed(9)
    features = torch.randn(ROWS, drafter.fc.in_features, generator=generator)
    ids = torch.randint(4, min(config.vocab_size, 1000), (ROWS,), generator=generator)
    save_file({"features": features, "ids": ids}, tmp_path / "inputs.safetensors")
    job = {
        "drafter": str(folder),
        "target": str(target_folder),
        "inputs": str(tmp_path / "inputs.safetensors"),
        "anchors": ANCHORS,
    }
    theirs = load_file(run_client("speculators", job, tmp_path, "forward"))
    anchors = theirs["anchors"]
    assert sorted(anchors.tolist()) == ANCHORS
    blocks = torch.full((len(anchors), config.block_size), config.mask_token_id)
    blocks[:, 0] = ids[anchors]
    positions = anchors[:, None] + torch.arange(config.block_size)
    layout = BlockLayout.build([0] * len(anchors), anchors.tolist())
    hidden = drafter(head.embed(blocks), positions, features, torch.arange(ROWS), layout)
    logits = head.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    found = {
        "states": float((hidden - theirs["hidden"]).abs().max()),
        "logits": float((logits - theirs["logits"]).abs().max()),
    }
    log.info("largest differences: %s", {name: f"{value:.1e}" for name, value in found.items()})
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_forward_pass_on_random_weights(tmp_path, network):
    """Taps, RoPE, norms and the target's embedding and `lm_head`: largest difference below 1e-5."""
    target_folder = write_target(tmp_path / "target", tied=network != "plain")
    drafter = random_drafter(drafter_config(**NETWORKS[network]))
    (tmp_path / "ours").mkdir()
    write_drafter(drafter, tmp_path / "ours", torch.float32)
    export_drafter(
        ExportConfig(tmp_path / "ours", tmp_path / "theirs", "speculators", target=str(target_folder))
    )
    head = load_head(str(target_folder), torch.float32)
    assert head.vocab_size == VOCAB
    assert max(compare(tmp_path / "theirs", target_folder, drafter, head, tmp_path).values()) < 1e-5


def test_the_demo_drafter_is_opened_and_computes_the_same(demo, tmp_path):
    """A real one: differences stay below a hundred-thousandth of the largest logit."""
    out = tmp_path / "theirs"
    export_drafter(ExportConfig(demo.drafter_folder, out, "speculators", "float32", str(demo.target_folder)))
    drafter = load_drafter(demo.drafter_folder, torch.float32).requires_grad_(False)
    found = compare(out, demo.target_folder, drafter, demo.target.head, tmp_path)
    assert max(found.values()) < 1e-3
