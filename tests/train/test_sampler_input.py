"""What the sampler refuses, and the words it does so with."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from corpora import log_normal, make_corpus

from dflash.errors import CacheMismatch, CheckpointError, ConfigError, DflashError
from dflash.train.sampler import Corpus, Sampler, SamplerConfig, batches_for, check_world
from dflash.world import World


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_ready": 0}, ["--min-ready", "0", "at least 1"]),
        ({"max_ready": 0}, ["--max-ready", "0"]),
        ({"min_ready": 91}, ["--min-ready 91", "--max-ready 90"]),
        ({"tokens_per_batch": 0}, ["--tokens-per-batch", "0"]),
        ({"batches_per_step": -1}, ["--batches-per-step", "-1"]),
        ({"policy": "random"}, ["--sampler random", "stratified, shuffle, fifo"]),
        ({"compose": "padded"}, ["--compose padded", "mixed, bucketed"]),
        ({"mix": "256:0.7"}, ["--mix 256:0.7", "0.7"]),
        ({"mix": "sqrt", "policy": "fifo"}, ["--mix sqrt", "--sampler stratified", "fifo"]),
        ({"supply": 0.0}, ["supply", "at least 0.001"]),
        ({"epoch_size": 0, "mix": "sqrt"}, ["--epoch-size is 0", "at least 1"]),
        ({"epoch_size": 5000}, ["--epoch-size 5000", "--mix natural", "--max-steps"]),
        ({"cost_linear": 0.0}, ["cost", "above 0"]),
        ({"cost_quadratic": -1.0}, ["cost", "at least 0"]),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_value(settings: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplerConfig(**settings)
    assert all(word in str(caught.value) for word in words)


def test_a_sample_longer_than_a_micro_batch_is_named_with_the_flag_that_helps() -> None:
    corpus = Corpus(np.array([10, 900, 30, 700]), np.zeros(4, np.int16), (1024,), "d")
    with pytest.raises(ConfigError, match=r"row 1 has 900 tokens.*512.*2 of 4 .*--tokens-per-batch 900"):
        Sampler(corpus, SamplerConfig(tokens_per_batch=512))


@pytest.mark.parametrize(
    ("lengths", "buckets", "words"),
    [
        ([], [], "no samples"),
        ([5, 5], [0], "2 lengths but 1 buckets"),
        ([5, 0], [0, 0], "row 1 has 0 tokens"),
        ([5, 5], [0, 2], "bucket 2"),
        ([5, 5], [-1, 0], "bucket -1"),
    ],
)
def test_an_impossible_corpus_is_refused(lengths: list[int], buckets: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Corpus(np.array(lengths, np.int32), np.array(buckets, np.int16), (256, 512), "d")


def test_a_mix_that_does_not_suit_the_corpus_is_refused_at_construction() -> None:
    corpus = make_corpus([3, 0, 2], 100, 0)
    with pytest.raises(ConfigError, match="bucket 512 is empty"):
        Sampler(corpus, SamplerConfig(mix="256:0.4,512:0.2,768:0.4"))
    with pytest.raises(ConfigError, match=r"bucket 768 holds .* 768:0"):
        Sampler(corpus, SamplerConfig(mix="256:1"))
    with pytest.raises(ConfigError, match="--epochs is 0"):
        Sampler(corpus, SamplerConfig(), epochs=0)


@pytest.mark.parametrize(
    ("slots", "ranks", "nearest"), [(8, 3, "6 or 9"), (8, 16, "use 16,"), (10, 4, "8 or 12")]
)
def test_ranks_that_do_not_divide_the_step_are_refused_with_numbers_that_work(
    slots: int, ranks: int, nearest: str
) -> None:
    config = SamplerConfig(batches_per_step=slots)
    with pytest.raises(ConfigError) as caught:
        check_world(config, World(0, ranks))
    assert all(
        word in str(caught.value) for word in [f"--batches-per-step {slots}", f"{ranks} ranks", nearest]
    )
    step = Sampler(log_normal(300), config).next_step()
    assert step is not None
    with pytest.raises(ConfigError, match=f"{ranks} ranks"):
        batches_for(step, World(0, ranks))


def saved_position() -> tuple[Corpus, SamplerConfig, dict]:
    corpus, config = log_normal(300), SamplerConfig()
    sampler = Sampler(corpus, config)
    sampler.next_step()
    return corpus, config, json.loads(json.dumps(sampler.state()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, ["seed: was 0, now 5"]),
        ({"tokens_per_batch": 8192}, ["tokens_per_batch: was 16384, now 8192"]),
        (
            {"policy": "fifo", "min_ready": 10},
            ["policy: was 'stratified', now 'fifo'", "min_ready: was 30, now 10"],
        ),
    ],
)
def test_resume_with_other_settings_names_each_with_both_values(change: dict, words: list[str]) -> None:
    corpus, config, state = saved_position()
    with pytest.raises(ConfigError) as caught:
        Sampler(corpus, replace(config, **change), state=state)
    assert all(word in str(caught.value) for word in words)
    assert str(caught.value).count(": was") == len(words)


def test_resume_with_another_cache_is_a_mismatch() -> None:
    corpus, config, state = saved_position()
    other = Corpus(corpus.lengths, corpus.buckets, corpus.bucket_edges, "other")
    with pytest.raises(CacheMismatch, match="corpus: was 'log-normal-0', now 'other'"):
        Sampler(other, config, state=state)
    fewer = Corpus(corpus.lengths[:-1], corpus.buckets[:-1], corpus.bucket_edges, corpus.digest)
    with pytest.raises(CacheMismatch, match="samples: was 300, now 299"):
        Sampler(fewer, config, state=state)


@pytest.mark.parametrize("compose", ["mixed", "bucketed"])
@pytest.mark.parametrize("policy", ["stratified", "shuffle", "fifo"])
def test_a_damaged_position_is_a_one_line_error_and_never_another_order(policy: str, compose: str) -> None:
    """Each number and list of it is removed or replaced in turn."""
    corpus, config = make_corpus([9, 4, 1], 50, 0), SamplerConfig(policy, compose, tokens_per_batch=60)
    sampler = Sampler(corpus, config)
    sampler.next_step()
    good = json.dumps(sampler.state())
    for key in json.loads(good):
        state = json.loads(good)
        del state[key]
        with pytest.raises(CheckpointError):
            Sampler(corpus, config, state=state)
    for key in json.loads(good)["stream"]:
        for wrong in ("7", -1, 1.5, None, ["x"]):
            state = json.loads(good)
            state["stream"][key] = wrong
            with pytest.raises(CheckpointError) as caught:
                Sampler(corpus, config, state=state)
            assert isinstance(caught.value, DflashError)
            assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="format 3"):
        Sampler(corpus, config, state={**json.loads(good), "version": 3})
