"""Runs in the environment of vLLM's `speculators`: what its own class makes of our exports.

Usage: python speculators_client.py forward JOB.json

The job names `drafter`, `target`, `inputs` (a safetensors file with `features` `[T, K*H]` and `ids` `[T]`),
`anchors` (positions) and `out`, to which go the states `[A, B, H]` and logits `[A, B, V]` of blocks at those
anchors, and the anchors in the order in which the model took them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def open_model(job: dict[str, Any]) -> Any:
    """The drafter in float32: as users open it, then again with plain attention, which needs no compiler."""
    opened = SpeculatorModel.from_pretrained(job["drafter"], verifier=job["target"])
    config = SpeculatorModelConfig.from_pretrained(job["drafter"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(
        job["drafter"], config=config, verifier=job["target"], dtype=torch.float32
    )
    for name, tensor in opened.state_dict().items():
        if not torch.equal(tensor.float(), model.state_dict()[name].float()):
            raise SystemExit(f"{name} differs between two ways of opening")
    return model.eval()


def forward(job: dict[str, Any]) -> None:
    """States and logits behind random features."""
    model, inputs = open_model(job), load_file(job["inputs"])
    features, ids = inputs["features"][None], inputs["ids"][None]
    # Anchors are drawn from supervised positions: with as many of them as are wanted, all are taken.
    supervised = torch.zeros_like(ids)
    supervised[0, job["anchors"]] = 1
    hidden, logits, _, _, places = model._backbone_forward(
        hidden_states=features,
        input_ids=ids,
        loss_mask=supervised,
        verifier_last_hidden_states=torch.zeros(1, ids.shape[1], model.hidden_size),
        document_ids=torch.zeros_like(ids),
        max_anchors=len(job["anchors"]),
    )
    size = model.block_size
    save_file(
        {
            "hidden": hidden[0].unflatten(0, (-1, size)).contiguous(),
            "logits": logits[0].unflatten(0, (-1, size)).contiguous(),
            "anchors": places[::size].contiguous(),
        },
        job["out"],
    )


if __name__ == "__main__":
    with torch.inference_mode():
        {"forward": forward}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))
