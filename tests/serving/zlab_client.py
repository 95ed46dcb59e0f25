"""Runs in the environment of z-lab's `dflash`: what its own classes make of our checkpoints.

Usage: python zlab_client.py forward|draft|generate JOB.json

`forward`   drafts behind random context features that our side wrote
`draft`     drafts behind the context of given tokens, whose features it takes from the target itself
`generate`  its own decoding loop

Each writes what it found to the file that the job calls `out`.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _make_cache,
    _output_head,
    _raw_input_embeddings,
    extract_context_feature,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def load_pair(job: dict[str, Any]) -> tuple[Any, Any]:
    """Drafter and target in float32."""
    drafter = DFlashDraftModel.from_pretrained(job["drafter"], dtype=torch.float32)
    return drafter.eval(), AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()


def draft_cycles(drafter: Any, target: Any, features: list[Tensor], anchors: list[int]) -> dict[str, Tensor]:
    """Draft behind a context that grows, with z-lab's cache and, each time, without.

    Args:
        drafter: z-lab's model.
        target: Lends its embedding and `lm_head`.
        features: What each cycle adds to the context, `[T_i, K*H]`.
        anchors: Each cycle's anchor token.

    Returns:
        By name and cycle: hidden states `[B, H]` with and without the cache, logits `[B-1, V]`.
    """
    size, cache, found = drafter.block_size, _make_cache(drafter.config), {}
    for cycle, anchor in enumerate(anchors):
        ids = torch.tensor([[anchor] + [drafter.mask_token_id] * (size - 1)])
        block = _raw_input_embeddings(target, ids)
        new, whole = features[cycle], torch.cat(features[: cycle + 1])
        positions = torch.arange(len(whole) + size)[None]
        cached = drafter(
            target_hidden=new[None],
            noise_embedding=block,
            position_ids=positions[:, len(whole) - len(new) :],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, len(whole))
        found[f"cached.{cycle}"] = cached[0]
        found[f"whole.{cycle}"] = drafter(
            target_hidden=whole[None], noise_embedding=block, position_ids=positions
        )[0]
        found[f"logits.{cycle}"] = drafter.compute_logits(cached[0, 1:], _output_head(target))
    return found


def forward(job: dict[str, Any]) -> None:
    """Draft behind random features."""
    inputs = load_file(job["inputs"])
    features = [inputs[f"features.{cycle}"] for cycle in range(len(job["anchors"]))]
    save_file(draft_cycles(*load_pair(job), features, job["anchors"]), job["out"])


def draft(job: dict[str, Any]) -> None:
    """Draft at the given places of token sequences."""
    drafter, target = load_pair(job)
    drafts = []
    for ids, places in zip(job["sequences"], job["places"], strict=True):
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = extract_context_feature(states, drafter.target_layer_ids)[0]
        parts = [features[start:end] for start, end in zip([0, *places], places, strict=False)]
        found = draft_cycles(drafter, target, parts, [ids[place] for place in places])
        drafts.append([found[f"logits.{cycle}"].argmax(-1).tolist() for cycle in range(len(places))])
    Path(job["out"]).write_text(json.dumps(drafts))


def generate(job: dict[str, Any]) -> None:
    """Decode with z-lab's loop, noting at which position each pass of the target starts."""
    drafter, target = load_pair(job)
    starts: list[int] = []
    target.register_forward_pre_hook(
        lambda _module, _args, kwargs: starts.append(int(kwargs["position_ids"][0, 0])), with_kwargs=True
    )
    results = []
    for prompt in job["prompts"]:
        starts.clear()
        ids = drafter.spec_generate(target, torch.tensor([prompt]), job["max_new_tokens"], job["stop_tokens"])
        # The first pass is the prefill; behind the last, the next anchor would be the last token.
        anchors = [*starts[1:], ids.shape[1] - 1]
        results.append(
            {
                "tokens": ids[0, len(prompt) :].tolist(),
                "accepted": [after - before for before, after in pairwise(anchors)],
            }
        )
    Path(job["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    with torch.inference_mode():
        {"forward": forward, "draft": draft, "generate": generate}[sys.argv[1]](
            json.loads(Path(sys.argv[2]).read_text())
        )
