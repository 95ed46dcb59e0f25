"""Speculative decoding: whatever the drafter says, the output is the target's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from overfit import answered, open_target, overfitted, random_prompts
from support import EOS, MASK, VOCAB, drafter_config, write_target
from torch import Tensor
from torch.nn import functional as F

from dflash.decode.config import DecodeConfig, Generation
from dflash.decode.drafting import BlockDrafter, check_fit
from dflash.decode.loop import generate
from dflash.decode.sampling import accept_length, reject
from dflash.drafter import Drafter, init_weights
from dflash.errors import CheckpointError, ConfigError

PROMPT_LENGTHS = [1, 2, 7, 23]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def _no_stop_token(target, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    return random_prompts(PROMPT_LENGTHS)


@pytest.fixture(scope="module")
def learnt(target, prompts) -> Drafter:
    """A drafter whose drafts are sometimes right: it has seen the answers to half of the prompts."""
    return overfitted(target, drafter_config(), [answered(target, p, 24) for p in prompts[::2]], steps=40)


def random_drafter(**changes) -> Drafter:
    drafter = Drafter(drafter_config(**changes))
    init_weights(drafter, seed=1)
    return drafter.requires_grad_(False)


def plain(target, prompt: Tensor, tokens: int, **settings) -> list[int]:
    return generate(target, None, prompt, DecodeConfig(tokens, **settings)).tokens


def prophet(monkeypatch, prompt: Tensor, truth: list[int], wrong_at: int | None = None) -> None:
    """Let every drafter propose the true continuation, but for the place `wrong_at` of the output."""

    def logits(self: BlockDrafter, anchor: int, slots: int) -> Tensor:
        place = self.context_length - len(prompt)
        assert anchor == truth[place]
        future = torch.tensor([*truth, *[5] * slots])[place + 1 : place + 1 + slots]
        if wrong_at is not None and place < wrong_at <= place + slots:
            future[wrong_at - place - 1] = (future[wrong_at - place - 1] + 1) % VOCAB
        return F.one_hot(future, VOCAB).float() * 50

    monkeypatch.setattr(BlockDrafter, "logits", logits)


def consistent(result: Generation) -> bool:
    """What is accepted is what was produced behind the token of the prefill, one pass each."""
    return sum(result.accepted) == len(result.tokens) - 1 and result.target_passes == len(result.accepted) + 1


def test_plain_decoding_is_the_greedy_search_of_transformers(target, prompts):
    for prompt in prompts:
        expected = target.model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=20, do_sample=False
        )
        assert plain(target, prompt, 20) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("block_size", [2, 3, 4, 9])
def test_greedy_output_is_that_of_plain_decoding_for_any_drafter(target, prompts, block_size):
    drafter = random_drafter(block_size=block_size)
    for prompt in prompts:
        expected = plain(target, prompt, 14)
        for tokens in (1, 2, 14):
            result = generate(target, drafter, prompt, DecodeConfig(tokens))
            assert result.tokens == expected[:tokens]
            assert consistent(result)


def test_a_drafter_that_is_sometimes_right_changes_the_passes_and_not_the_output(target, prompts, learnt):
    taus = []
    for prompt in prompts:
        result = generate(target, learnt, prompt, DecodeConfig(24))
        assert result.tokens == plain(target, prompt, 24)
        assert consistent(result)
        assert all(1 <= added <= 4 for added in result.accepted)
        taus.append(result.tau)
    assert max(taus) > 1.5


def test_a_drafter_that_has_learnt_an_answer_drafts_it_whole(target, prompts):
    prompt = prompts[2]
    drafter = overfitted(target, drafter_config(), [answered(target, prompt, 17)], steps=150)
    result = generate(target, drafter, prompt, DecodeConfig(17, measure_anchors=True))
    assert result.tokens == plain(target, prompt, 17)
    assert result.accepted == [4] * 4
    assert result.anchor_accepted == [4] * 13 + [3, 2, 1]


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_perfect_drafts_are_accepted_whole(target, prompts, monkeypatch, block_size):
    tokens = 1 + 3 * block_size
    for prompt in prompts:
        truth = plain(target, prompt, tokens)
        prophet(monkeypatch, prompt, truth)
        result = generate(target, random_drafter(block_size=block_size), prompt, DecodeConfig(tokens))
        assert result.tokens == truth
        assert result.accepted == [block_size] * 3
        assert result.tau == block_size
        assert result.target_passes == 4


@pytest.mark.parametrize("tokens", range(1, 12))
def test_a_block_that_reaches_past_the_limit_is_cut_there(target, prompts, monkeypatch, tokens):
    truth = plain(target, prompts[2], 20)
    prophet(monkeypatch, prompts[2], truth)
    result = generate(target, random_drafter(), prompts[2], DecodeConfig(tokens))
    assert result.tokens == truth[:tokens]
    assert consistent(result)


@pytest.mark.parametrize("wrong_at", range(1, 9))
def test_the_first_wrong_draft_is_replaced_by_the_targets_own_token(target, prompts, monkeypatch, wrong_at):
    truth = plain(target, prompts[3], 9)
    prophet(monkeypatch, prompts[3], truth, wrong_at)
    result = generate(target, random_drafter(block_size=9), prompts[3], DecodeConfig(9))
    assert result.tokens == truth
    # the last token of the limit is the target's own anyway, so a wrong draft there is never asked for
    assert result.accepted == ([8] if wrong_at == 8 else [wrong_at, 8 - wrong_at])


@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_anywhere_in_a_block_ends_the_output(target, prompts, monkeypatch, place):
    truth = plain(target, prompts[2], 12)
    stop = truth[place]
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", stop)
    expected = truth[: truth.index(stop) + 1]
    assert plain(target, prompts[2], 12) == expected
    prophet(monkeypatch, prompts[2], truth)
    result = generate(target, random_drafter(block_size=5), prompts[2], DecodeConfig(12))
    assert result.tokens == expected
    assert consistent(result)


def test_decoding_goes_on_behind_a_stop_token_where_that_is_asked_for(target, prompts, monkeypatch, learnt):
    truth = plain(target, prompts[2], 12)
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", truth[3])
    assert generate(target, learnt, prompts[2], DecodeConfig(12, ignore_stop=True)).tokens == truth


def test_a_mask_token_in_the_output_stays_there(target, prompts):
    truth = plain(target, prompts[2], 12)
    unused = next(token for token in truth if token not in (0, EOS))
    drafter = random_drafter(mask_token_id=unused)
    assert generate(target, drafter, prompts[2], DecodeConfig(12)).tokens == truth
    prompt = torch.cat([prompts[1], torch.tensor([MASK, MASK])])
    assert generate(target, random_drafter(), prompt, DecodeConfig(9)).tokens == plain(target, prompt, 9)


def test_drafting_from_every_position_holds_the_walk_that_was_decoded(target, prompts, learnt, monkeypatch):
    for prompt, stop in [(p, None) for p in prompts] + [(prompts[0], 6), (prompts[2], 13)]:
        truth = plain(target, prompt, 24)
        if stop is not None:
            monkeypatch.setattr(target.model.generation_config, "eos_token_id", truth[stop])
        result = generate(target, learnt, prompt, DecodeConfig(24, measure_anchors=True))
        assert len(result.anchor_accepted) == len(result.tokens) - 1
        walk, place = [], 0
        while place < len(result.anchor_accepted):
            walk.append(result.anchor_accepted[place])
            place += walk[-1]
        assert walk == result.accepted


def test_one_token_alone_has_no_anchor_to_draft_from(target, prompts, learnt):
    result = generate(target, learnt, prompts[0], DecodeConfig(1, measure_anchors=True))
    assert (result.anchor_accepted, result.accepted, result.target_passes, result.tau) == ([], [], 1, 1.0)


def test_the_context_of_a_drafter_is_all_but_the_last_token(target, prompts, learnt):
    drafter = BlockDrafter(learnt, target)
    assert drafter.context_length == 0
    _, features = target.forward(prompts[3], target.new_cache(), keep_logits=1)
    at_once = BlockDrafter(learnt, target)
    at_once.extend(features)
    for part in features.split([1, 9, 13]):
        drafter.extend(part)
    assert drafter.context_length == at_once.context_length == 23
    torch.testing.assert_close(drafter.logits(7, 3), at_once.logits(7, 3), atol=1e-4, rtol=1e-4)


def test_an_accepted_prefix_ends_at_the_first_difference():
    drafts = torch.tensor([4, 5, 6])
    assert accept_length(drafts, torch.tensor([4, 5, 6])) == 3
    assert accept_length(drafts, torch.tensor([4, 9, 6])) == 1
    assert accept_length(drafts, torch.tensor([9, 5, 6])) == 0
    assert accept_length(drafts[:0], drafts[:0]) == 0


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("trials", [25_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_rejection_sampling_keeps_the_targets_distribution(trials):
    generator = torch.Generator().manual_seed(0)
    tokens = 5
    wanted = torch.softmax(torch.randn(3, tokens, generator=generator), -1)
    proposed = torch.softmax(1.5 * torch.randn(2, tokens, generator=generator), -1)
    taken: Counter[tuple[int, int]] = Counter()
    drafts = torch.multinomial(proposed, trials, replacement=True, generator=generator).T
    for draft in drafts:
        kept, token = reject(draft, proposed, wanted, generator)
        taken.update(enumerate([*draft[:kept].tolist(), token]))
    counts = torch.tensor([[taken[place, token] for token in range(tokens)] for place in range(3)]).float()
    assert counts[0].sum() == trials
    for place in range(3):
        # 18.5 is the 99.9 % point with 4 degrees of freedom
        assert chi_square(counts[place], counts[place].sum() * wanted[place]) < 18.5
    # as many are kept as the two distributions have in common
    overlap = float(torch.minimum(wanted[0], proposed[0]).sum())
    assert float(counts[1].sum()) / trials == pytest.approx(overlap, abs=4 * 0.5 / trials**0.5)


def test_a_draft_that_the_target_never_makes_is_always_rejected():
    generator = torch.Generator().manual_seed(0)
    proposed, wanted = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert {reject(torch.tensor([0]), proposed, wanted, generator) for _ in range(20)} == {(0, 1)}


def test_equal_distributions_accept_everything():
    generator = torch.Generator().manual_seed(0)
    wanted = torch.softmax(torch.randn(4, 6, generator=generator), -1)
    drafts = torch.multinomial(wanted[:3], 1, generator=generator)[:, 0]
    assert all(reject(drafts, wanted[:3], wanted, generator)[0] == 3 for _ in range(50))


@pytest.mark.parametrize("runs", [75, pytest.param(600, marks=pytest.mark.long)])
def test_sampled_output_has_the_targets_distribution_with_a_drafter_too(target, prompts, learnt, runs):
    # the two likeliest second tokens behind a fixed first one are enough to see a bias
    config = {"temperature": 4.0}
    counts = torch.zeros(2, VOCAB)
    for which, drafter in enumerate((None, learnt)):
        for seed in range(runs):
            tokens = generate(target, drafter, prompts[0], DecodeConfig(3, seed=seed, **config)).tokens
            counts[which, tokens[1]] += 1
    top = counts.sum(0).topk(4).indices
    grouped = torch.cat([counts[:, top], runs - counts[:, top].sum(1, keepdim=True)], 1)
    expected = grouped.mean(0, keepdim=True).expand(2, -1)
    assert chi_square(grouped, expected) < 18.5


def test_the_same_seed_samples_the_same_tokens(target, prompts, learnt):
    config = DecodeConfig(12, temperature=1.0, seed=3)
    first, second = (generate(target, learnt, prompts[1], config).tokens for _ in range(2))
    other = generate(target, learnt, prompts[1], DecodeConfig(12, temperature=1.0, seed=4)).tokens
    assert first == second != other


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 16}, "hidden size is 16 in the drafter and 32 in the target"),
        ({"num_target_layers": 8}, "number of target layers is 8 in the drafter and 6"),
        ({"vocab_size": VOCAB + 1}, f"vocabulary size is {VOCAB + 1} in the drafter and {VOCAB}"),
        ({"target_layer_ids": (1, 4)}, r"taps is \(1, 4\) in the drafter and \(1, 3\)"),
    ],
)
def test_a_drafter_of_another_target_is_refused_naming_the_field(target, prompts, changes, text):
    drafter = Drafter(drafter_config(**changes))
    with pytest.raises(CheckpointError, match=text):
        check_fit(drafter, target)
    with pytest.raises(CheckpointError, match=text):
        generate(target, drafter, prompts[0], DecodeConfig(4))


def test_an_empty_prompt_is_refused(target):
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generate(target, None, torch.zeros(0, dtype=torch.int64), DecodeConfig(4))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0 must be 1 or more"),
        ({"temperature": -0.5}, "--temperature -0.5 must not be negative"),
    ],
)
def test_settings_that_decode_nothing_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        DecodeConfig(**settings)
