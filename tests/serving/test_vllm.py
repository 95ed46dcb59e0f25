"""vLLM serves the folder that `dflash train` leaves, and accepts as many drafts as we do."""

from __future__ import annotations

import json
import logging

import pytest
from clients import NEW_TOKENS, acceptance_length, run_client

pytestmark = [pytest.mark.serving, pytest.mark.timeout(1800)]
log = logging.getLogger("vllm")


@pytest.fixture(scope="module")
def served(demo, tmp_path_factory):
    job = {
        "target": str(demo.target_folder),
        "drafter": str(demo.drafter_folder),
        "drafts": demo.drafter.config.block_size - 1,
        "prompts": demo.prompts,
        "max_new_tokens": NEW_TOKENS,
        # behind the last token that is wanted a whole block is still drafted
        "max_model_len": max(map(len, demo.prompts)) + NEW_TOKENS + 2 * demo.drafter.config.block_size,
    }
    return json.loads(run_client("vllm", job, tmp_path_factory.mktemp("vllm"), timeout=1500).read_text())


def test_every_token_is_ours(ours, served):
    assert served["tokens"] == [generation.tokens for generation in ours]


def test_the_acceptance_length_is_ours_within_a_tenth(demo, ours, served):
    """By vLLM's counters: accepted drafts a cycle, and the target's own token.

    It counts drafts beyond the end of a text too, which we do not use: hence the tenth.
    """
    assert served["num_draft_tokens"] == served["num_drafts"] * (demo.drafter.config.block_size - 1)
    theirs = 1 + served["num_accepted_tokens"] / served["num_drafts"]
    own = acceptance_length(ours)
    log.info("acceptance length on %d prompts: vLLM %.3f, ours %.3f", len(ours), theirs, own)
    assert theirs == pytest.approx(own, abs=0.1)
    assert theirs > 1.2  # a server that had lost the weights would hardly ever accept
