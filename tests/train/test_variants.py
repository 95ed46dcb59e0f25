"""Settings on one line: the flags of `dflash train`, strictly parsed."""

from __future__ import annotations

import pytest

from dflash.errors import ConfigError
from dflash.train.sampler import SamplerConfig
from dflash.train.variants import DEFAULT_TEXTS, parse_variant


def test_every_key_reaches_its_setting() -> None:
    text = (
        "sampler=fifo, compose=bucketed,tokens-per-batch=4096,batches-per-step=4,"
        "min-ready=10,max-ready=60,supply=0.5,seed=3"
    )
    variant = parse_variant(text)
    assert variant.label == text
    assert variant.config == SamplerConfig("fifo", "bucketed", "natural", 4096, 4, 10, 60, 0.5, 3)


def test_the_commas_of_a_mix_belong_to_it() -> None:
    config = parse_variant("mix=256:0.2,512:0.8,seed=1").config
    assert (config.mix, config.seed) == ("256:0.2,512:0.8", 1)


@pytest.mark.parametrize("text", DEFAULT_TEXTS)
def test_what_is_compared_by_default_can_be_given(text: str) -> None:
    assert parse_variant(text).config.max_ready >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min-redy=10", ["'min-redy'", "min-ready"]),
        ("min_ready=10", ["'min_ready'", "min-ready"]),
        ("min-ready=ten", ["min-ready", "'ten'", "whole number"]),
        ("supply=much", ["supply", "'much'", "a number"]),
        ("min-ready=0", ["--min-ready is 0", "at least 1"]),
        ("min-ready=91", ["--min-ready 91", "--max-ready 90"]),
        ("seed=1,seed=2", ["seed is given twice"]),
        ("sampler", ["sampler is not KEY=VALUE"]),
        ("seed=1,,compose=mixed", ["an empty entry"]),
        ("", ["an empty entry"]),
        ("seed=", ["seed= is not KEY=VALUE"]),
        ("sampler=random", ["--sampler random", "stratified, shuffle, fifo"]),
    ],
)
def test_a_wrong_setting_is_named_with_the_line_it_is_on(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_variant(text)
    assert str(caught.value).startswith(f"--settings {text}: ")
    assert all(word in str(caught.value) for word in words)
