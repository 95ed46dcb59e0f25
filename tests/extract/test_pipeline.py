"""Extraction gives the target's own hidden states, once each, and goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from chat_families import dialogue, write_jsonl
from extract_runs import same, samples_of
from support import MASK, write_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.cache.manifest import load_manifest
from dflash.cache.speeds import SPEEDS_NAME, load_speeds
from dflash.errors import CacheError, CacheMismatch, ConfigError, CorpusError
from dflash.extract import prepare, space
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.head import HEAD_NAME, TargetHead
from dflash.target import TruncatedTarget
from dflash.world import World


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def config(tmp_path, target, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    conversations = [
        {"messages": dialogue(f"question {n}", "word " * (1 + 5 * n % 17)), "id": f"row-{n}"}
        for n in range(17)
    ]
    data = write_jsonl(tmp_path / "data.jsonl", *conversations, {"messages": dialogue("unanswered")})
    return ExtractConfig(
        target=str(target),
        data=(data,),
        out=tmp_path / "cache",
        taps=(0, 2, 5),
        max_length=128,
        bucket_edges=(64, 128),
        tokens_per_batch=256,
        dtype="float32",
        shard_bytes=100_000,
    )


def test_the_cache_holds_the_full_targets_states_without_padding(config, target):
    """Tap T is index T + 1 of `hidden_states`, and the last layer's is the state before the final norm."""
    report = extract(config, World())
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    before_norm = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    samples = samples_of(config.out)
    assert len(samples) == 17
    for sample in samples.values():
        before_norm.clear()
        with torch.inference_mode():
            states = model(
                torch.tensor(sample.input_ids, dtype=torch.long)[None], output_hidden_states=True
            ).hidden_states
        expected = torch.stack([states[1][0], states[3][0], before_norm[0][0]], dim=1)
        torch.testing.assert_close(sample.hidden_states, expected, rtol=1e-4, atol=1e-4)
        assert sample.loss_mask[-1] == 1
    assert report.tokens == report.new_tokens == sum(len(s.input_ids) for s in samples.values())
    assert report.dropped == {"no_assistant_turn": 1}
    assert report.bytes == sum(path.stat().st_size for path in config.out.glob("shards/*/*"))
    assert 0 <= report.pad_share < 0.5


def test_the_cache_holds_all_that_training_needs(config, target):
    extract(config, World())
    tokenizer = AutoTokenizer.from_pretrained(config.out / "tokenizer")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(target).get_vocab()
    assert tokenizer.chat_template
    head = TargetHead.load(config.out / HEAD_NAME)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.testing.assert_close(head.embedding, model.get_input_embeddings().weight.detach())
    stored = json.loads((config.out / "target_config.json").read_text())
    assert stored["mask_token_id"] == MASK
    assert stored["config"]["num_hidden_layers"] == 6
    record = json.loads((config.out / "run.json").read_text())
    assert (record["command"], record["config"]["taps"]) == ("extract", [0, 2, 5])
    manifest = load_manifest(config.out)
    assert manifest.complete
    assert manifest.identity.bucket_edges == (64, 128)
    assert not list(config.out.rglob("*.tmp"))


def test_the_speed_of_each_bucket_is_recorded(config):
    extract(config, World())
    speeds = load_speeds(config.out, config.edges)
    assert speeds is not None
    assert min(speeds) > 0
    assert list(json.loads((config.out / SPEEDS_NAME).read_text())) == ["128", "64", "digest"]


def test_a_second_run_has_nothing_to_do(config):
    first = extract(config, World())
    second = extract(config, World())
    assert second.new_tokens == 0
    assert (second.tokens, second.bytes) == (first.tokens, first.bytes)
    assert "nothing left to do" in second.text()


@pytest.mark.parametrize("batches", [0, 2, 4, 6])
def test_a_run_that_stopped_anywhere_goes_on_and_ends_with_the_same_states(config, monkeypatch, batches):
    """Bit for bit those of an undisturbed run; nothing that was committed is run again."""
    whole = replace(config, out=config.out.with_name("whole"))
    tokens = extract(whole, World()).tokens
    capture, count = TruncatedTarget.capture, iter(range(batches))

    def stopping(*args):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return capture(*args)

    monkeypatch.setattr(TruncatedTarget, "capture", stopping)
    with pytest.raises(KeyboardInterrupt):
        extract(config, World())
    monkeypatch.setattr(TruncatedTarget, "capture", capture)
    assert not load_manifest(config.out).complete
    done = sum(len(s.input_ids) for s in samples_of(config.out, allow_incomplete=True).values())
    report = extract(config, World())
    assert report.new_tokens == tokens - done
    assert same(samples_of(config.out), samples_of(whole.out))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"taps": (0, 2)}, "taps"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"min_supervised": 3}, "corpus_digest"),
        ({"bucket_edges": (32, 128)}, "bucket_edges"),
    ],
)
def test_another_identity_is_refused_naming_what_differs(config, change, named):
    extract(config, World())
    with pytest.raises(CacheMismatch, match=f"{named}: this .*, other "):
        extract(replace(config, **change), World())


def test_moving_the_target_changes_nothing(config, target, tmp_path):
    extract(config, World())
    (tmp_path / "moved").symlink_to(target)
    assert extract(replace(config, target=str(tmp_path / "moved")), World()).new_tokens == 0


def test_bfloat16_is_computed_and_stored(config):
    extract(replace(config, dtype="bfloat16"), World())
    assert {s.hidden_states.dtype for s in samples_of(config.out).values()} == {torch.bfloat16}


def test_a_folder_of_something_else_is_refused(config):
    config.out.mkdir()
    (config.out / "thesis.txt").write_text("")
    with pytest.raises(CacheError, match="not empty and not a cache"):
        extract(config, World())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "--dtype 'float16'"),
        ({"bucket_edges": (64, 32, 128)}, "--bucket-edges 64,32,128 must be ascending"),
        ({"bucket_edges": (64, 100)}, "must be ascending and end with --max-length 128"),
        ({"tokens_per_batch": 0}, "--tokens-per-batch 0"),
        ({"order": "shortest-first"}, "--order shortest-first is not one of longest-first, mixed"),
        ({"max_length": 1, "bucket_edges": None}, "max_length 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(config, change, message):
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)


def test_taps_outside_the_target_are_refused_before_anything_is_created(config):
    with pytest.raises(ConfigError, match=r"tap 6 is outside the target's layers 0\.\.5"):
        extract(replace(config, taps=(1, 6)), World())
    assert not config.out.exists()


def test_a_disk_that_is_too_small_is_refused_before_the_target_is_loaded(config, monkeypatch):
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: space.shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(ConfigError, match=r"are still to be written, 0\.0 GB are free"):
        extract(config, World())


def test_a_tokenizer_of_another_model_is_refused(config, monkeypatch):
    facts = prepare.inspect_target(config.target)
    monkeypatch.setattr(prepare, "inspect_target", lambda *_, **__: replace(facts, vocab_size=20))
    with pytest.raises(CorpusError, match="the target's embedding 20 rows"):
        extract(config, World())


@pytest.mark.parametrize(
    ("length", "edges"),
    [
        (3072, (256, 512, 1024, 2048, 3072)),
        (4096, (256, 512, 1024, 2048, 4096)),
        (256, (256,)),
        (100, (100,)),
        (300, (256, 300)),
    ],
)
def test_default_bucket_edges_double_up_to_the_longest(config, length, edges):
    assert replace(config, max_length=length, bucket_edges=None).edges == edges


def test_flags_make_a_configuration(tmp_path):
    made = ExtractConfig.from_flags(target="t", data=("d",), out=tmp_path, shard_mb=2)
    assert (made.shard_bytes, made.edges[-1], made.taps) == (2 << 20, 3072, None)
