"""Trees of drafts: the likeliest paths, verified in one pass, and never a changed token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overfit import answered, open_target, overfitted, random_prompts
from support import drafter_config, write_target

from dflash.decode.config import DecodeConfig
from dflash.decode.drafting import BlockDrafter
from dflash.decode.loop import generate
from dflash.decode.tree import DraftTree, best_first, follow, tree_mask
from dflash.errors import ConfigError

LENGTHS = [5, 1, 14, 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def learnt(target, prompts):
    return overfitted(target, drafter_config(), [answered(target, p, 24) for p in prompts[::2]], steps=25)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Each node as the tokens from the anchor to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@given(
    slots=st.integers(1, 4),
    vocabulary=st.integers(1, 5),
    budget=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_the_tree_holds_the_likeliest_paths(slots, vocabulary, budget, seed):
    logits = torch.randn(slots, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    log = torch.log_softmax(logits, dim=-1)
    scores = {
        path: sum(float(log[slot, token]) for slot, token in enumerate(path))
        for depth in range(1, slots + 1)
        for path in itertools.product(range(vocabulary), repeat=depth)
    }
    tree = best_first(logits, budget)
    taken = paths(tree)
    assert len(set(taken)) == len(taken) == min(budget, len(scores))
    worst = min(scores[path] for path in taken)
    left_out = [score for path, score in scores.items() if path not in set(taken)]
    assert max(left_out, default=-math.inf) <= worst + 1e-4
    assert [len(path) for path in taken] == list(tree.depths)


def test_a_node_sees_the_context_its_ancestors_and_itself():
    tree = DraftTree(tokens=(7, 8, 9, 7), parents=(-1, -1, 0, 2), depths=(1, 1, 2, 3))
    seen = tree_mask(tree, 2, torch.float32, torch.device("cpu"))[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1, 1],
    ]


def test_the_walk_follows_the_targets_own_tokens():
    tree = DraftTree(tokens=(7, 8, 9, 7), parents=(-1, -1, 0, 2), depths=(1, 1, 2, 3))
    assert follow(tree, [7, 9, 1, 5, 2]) == ([0, 2], 5)
    assert follow(tree, [8, 9, 1, 5, 2]) == ([1], 1)
    assert follow(tree, [3, 9, 1, 5, 2]) == ([], 3)


@pytest.fixture(scope="module")
def undrafted(target, prompts):
    return [generate(target, None, prompt, DecodeConfig(24)) for prompt in prompts]


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_output_is_that_of_plain_decoding(target, prompts, undrafted, learnt, budget):
    accepted = []
    for prompt, plain in zip(prompts, undrafted, strict=True):
        grown = generate(target, learnt, prompt, DecodeConfig(24, draft="tree", budget=budget))
        assert grown.tokens == plain.tokens
        assert sum(grown.accepted) == len(grown.tokens) - 1
        accepted += grown.accepted
    assert max(accepted) > 1


def test_alternatives_are_kept_where_the_likeliest_draft_is_wrong(target, prompts, learnt):
    tau = [
        sum(sum(g.accepted) for g in runs) / sum(len(g.accepted) for g in runs)
        for settings_ in ({"draft": "block"}, {"draft": "tree", "budget": 64})
        for runs in [[generate(target, learnt, p, DecodeConfig(24, **settings_)) for p in prompts]]
    ]
    assert tau[1] > tau[0]


@pytest.mark.parametrize("draws", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_sampled_tokens_of_a_tree_are_distributed_as_the_target_says(target, learnt, draws):
    """Chi-square over three tokens: with a temperature each node is followed by a draw from the target."""
    prompt = random_prompts([6], seed=5)[0]
    config = {"temperature": 1.5, "top_k": 3}
    counts: dict[bool, dict[tuple[int, ...], int]] = {True: {}, False: {}}
    for seed, tree in itertools.product(range(draws), (True, False)):
        drafter = learnt if tree else None
        settings_ = DecodeConfig(
            3, seed=seed + draws * tree, draft="tree" if tree else "block", budget=8, **config
        )
        tokens = tuple(generate(target, drafter, prompt, settings_).tokens)
        counts[tree][tokens] = counts[tree].get(tokens, 0) + 1
    keys = set(counts[True]) | set(counts[False])
    pairs = [(counts[True].get(key, 0), counts[False].get(key, 0)) for key in keys]
    # Two samples of the same size: sum (a - b)^2 / (a + b), one degree of freedom less than there are kinds.
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    freedom = len(pairs) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_no_drafts_no_tree():
    assert best_first(torch.zeros(0, 5), 8) == DraftTree((), (), ())


def test_attention_that_takes_no_mask_is_refused(target, prompts, learnt, monkeypatch):
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError, match="--draft tree needs sdpa or eager attention"):
        generate(target, learnt, prompts[0], DecodeConfig(4, draft="tree"))


def test_a_drafter_for_the_test_drafts(target, learnt, prompts):
    drafter = BlockDrafter(learnt, target)
    _, features = target.forward(prompts[0], target.new_cache(), keep_logits=1)
    drafter.extend(features)
    assert drafter.logits(5, 2).shape[0] == 2
