"""Mixes by name and by shares, and what is refused."""

from __future__ import annotations

import pytest

from dflash.errors import ConfigError
from dflash.train.mix import bucket_weights, parse_shares

EDGES, TOKENS = (256, 512, 1024), (100, 0, 900)


def shares(mix: str, tokens: tuple[int, ...] = TOKENS) -> list[float]:
    weights = bucket_weights(mix, EDGES, tokens)
    return [weight / sum(weights) for weight in weights]


def test_named_mixes_weigh_tokens_buckets_or_roots_and_never_an_empty_bucket() -> None:
    assert shares("natural") == [0.1, 0, 0.9]
    assert shares("uniform") == [0.5, 0, 0.5]
    assert shares("sqrt") == pytest.approx([0.25, 0, 0.75])


def test_explicit_shares_are_exact_and_may_leave_a_bucket_out_by_name() -> None:
    assert bucket_weights("256:0.1,1024:0.9", EDGES, TOKENS) == [1, 0, 9]
    assert bucket_weights("256:0, 512:0, 1024:1", EDGES, TOKENS) == [0, 0, 1]
    assert shares("256:0.333333,512:0.333333,1024:0.333333", (1, 1, 1)) == pytest.approx([1 / 3] * 3)
    assert shares("256:1e-4,1024:0.9999") == [1e-4, 0, 0.9999]


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("256:0.5,768:0.5", ["no bucket 768", "256, 512, 1024"]),
        ("256:0.5,1024:0.6", ["sum to 1.1"]),
        ("256:0.5", ["sum to 0.5"]),
        ("256:1", ["bucket 1024", "900", "1024:0"]),
        ("256:0.1,512:0.1,1024:0.8", ["bucket 512 is empty", "0.1"]),
        ("256:0.5,256:0.5", ["256", "twice"]),
        ("256:-0.5,1024:1.5", ["256", "negative"]),
        ("short", ["short", "natural"]),
        ("256:half", ["256:half"]),
        ("256=1", ["256=1"]),
        ("256:0.5,,1024:0.5", ["empty entry"]),
        ("256:nan", ["256:nan"]),
        ("256:1/0", ["256:1/0"]),
    ],
)
def test_a_wrong_mix_is_refused_in_words_that_name_the_fault(mix: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        bucket_weights(mix, EDGES, TOKENS)
    assert all(word in str(caught.value) for word in ["--mix", *words])


def test_syntax_is_checked_before_a_corpus_is_known() -> None:
    assert parse_shares("256:0.25,512:0.75") == {256: 0.25, 512: 0.75}
    with pytest.raises(ConfigError, match="sum to 0"):
        parse_shares("256:0")
