"""`vllm serve DIR` with nothing but an export: its texts, and its counters by `dflash eval --server`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from clients import NEW_TOKENS, acceptance_length, vllm_server

from dflash.evaluate.client import Client
from dflash.export.give import ExportConfig, export_drafter

pytestmark = [pytest.mark.serving, pytest.mark.timeout(2400)]
CONCURRENCY = 4
log = logging.getLogger("vllm-serve")


@pytest.fixture(scope="module")
def exported(demo, tmp_path_factory):
    """The demo's drafter as speculators has it: the folder names target, method and number of drafts."""
    out = tmp_path_factory.mktemp("serve") / "speculators"
    export_drafter(ExportConfig(demo.drafter_folder, out, "speculators", target=str(demo.target_folder)))
    return out


@pytest.fixture(scope="module")
def servers(demo, exported):
    """URLs of a server with the drafter and of one without."""
    length = max(map(len, demo.prompts)) + NEW_TOKENS + 2 * demo.drafter.config.block_size
    limit, folder = ("--max-model-len", str(length)), exported.parent
    with (
        vllm_server(demo.target_folder, folder / "plain.log", *limit) as plain,
        vllm_server(exported, folder / "drafting.log", *limit) as drafting,
    ):
        yield drafting, plain


@pytest.fixture(scope="module")
def data(demo, exported):
    """The prompts as rows of token ids; what stands behind the prompt is not used."""
    rows = [
        {"id": str(n), "input_ids": [*ids, 0], "loss_mask": [0] * len(ids) + [1]}
        for n, ids in enumerate(demo.prompts)
    ]
    path = exported.parent / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def dflash(*arguments):
    """What a command prints, run as users run it."""
    command = [sys.executable, "-m", "dflash", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(demo, servers, data):
    """What `dflash eval --server` prints as JSON."""
    to, plain = servers
    who = ("--server", to, "--plain-server", plain, "--target", demo.target_folder)
    how = ("--max-new-tokens", NEW_TOKENS, "--concurrency", CONCURRENCY)
    return json.loads(dflash("eval", *who, "--data", data, *how, "--json"))


def test_every_text_is_that_of_the_server_without_the_drafter(demo, report):
    assert (report["equal"], report["prompts"]) == (len(demo.prompts), len(demo.prompts))


def test_the_acceptance_length_is_that_of_our_own_decoding(demo, report, ours):
    """Within a tenth: vLLM counts drafts beyond the end of a text too, which we do not use."""
    own = acceptance_length(ours)
    log.info("acceptance length: dflash eval --server %.3f, our decoder %.3f", report["walk_tau"], own)
    log.info("tokens/s with %d requests at once: %.1f", CONCURRENCY, report["tokens_per_s"])
    assert report["walk_tau"] == pytest.approx(own, abs=0.1)
    assert report["block_size"] == demo.drafter.config.block_size
    assert report["tokens"] == sum(len(generation.tokens) for generation in ours)


def test_every_token_is_ours(demo, servers, ours):
    """Asked once more, so that answers do not depend on what else the server is doing."""
    sampling = {"max_tokens": NEW_TOKENS, "temperature": 0.0}
    with Client(servers[0], CONCURRENCY, 600) as client:
        replies, _ = client.complete(demo.prompts, sampling)
    stops = demo.target.stop_tokens
    own = [[token for token in generation.tokens if token not in stops] for generation in ours]
    assert [[token for token in reply.ids if token not in stops] for reply in replies] == own


def test_it_answers_for_regeneration_too(demo, servers, tmp_path):
    """`dflash regenerate` against the real thing, over the chat interface."""
    questions = ["Name a colour.", "What is 2 + 2?", "Say hello."]
    path, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(f'{{"prompt": "{question}"}}\n' for question in questions))
    how = ("--max-new-tokens", 12, "--concurrency", 4, "--keep-truncated")
    dflash("regenerate", "--data", path, "--out", out, "--server", servers[1], *how)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == questions
    assert all(row["messages"][-1]["content"].strip() for row in rows)
