"""Values that are not finite, memory that does not suffice, and data that is added later."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_families import dialogue, write_jsonl
from extract_runs import same, samples_of
from hypothesis import given
from hypothesis import strategies as st
from support import write_target

from dflash.cache.manifest import load_manifest
from dflash.errors import CacheIncomplete, CacheMismatch, ConfigError, TargetError, lacks_memory
from dflash.extract import capture as capture_module
from dflash.extract.capture import Capturer
from dflash.extract.pipeline import ExtractConfig, extract
from dflash.extract.token_store import corpus_from
from dflash.target import TruncatedTarget, load_tokenizer
from dflash.world import World

SAMPLES = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target", layers=4)


def rows(first, last):
    return [
        {"messages": dialogue(f"question {n}", "word " * (1 + 5 * n % 23)), "id": f"row-{n}"}
        for n in range(first, last)
    ]


@pytest.fixture
def config(tmp_path, target, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return config_of(tmp_path, target)


def config_of(folder, target):
    data = write_jsonl(folder / "a.jsonl", *rows(0, SAMPLES))
    return ExtractConfig(
        str(target), (data,), folder / "cache", (0, 2, 3), 160, (64, 160), 2, 400, "float32", 50_000
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target):
    """The samples of an undisturbed run."""
    undisturbed = config_of(tmp_path_factory.mktemp("whole"), target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(undisturbed.out.parent / "home"))
        extract(undisturbed, World())
    return samples_of(undisturbed.out)


def damage(monkeypatch, config, value):
    """Spoil tap 1 at position 3 of the sample that asks question 5.

    Returns a list that grows by the size of the batch whenever that happens.
    """
    capture, tokenizer = TruncatedTarget.capture, load_tokenizer(config.target)
    spoilt = []

    def damaged(self, sequences, out):
        capture(self, sequences, out)
        start = 0
        for ids in sequences:
            if "question 5<" in tokenizer.decode(ids):
                out[start + 3, 1, 7] = value
                spoilt.append(len(sequences))
            start += len(ids)

    monkeypatch.setattr(TruncatedTarget, "capture", damaged)
    return spoilt


NOT_FINITE = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


@NOT_FINITE
def test_more_bad_samples_than_allowed_stop_the_run_naming_layer_and_position(config, monkeypatch, value):
    damage(monkeypatch, config, value)
    with pytest.raises(
        TargetError,
        match=r"sample \d+ \(row-5\): the output of layer 2 at position 3, token \d+, holds NaN or Inf; "
        r"1 of 20 samples are bad, more than --max-bad 0\.001",
    ):
        extract(config, World())
    assert not load_manifest(config.out).complete


@NOT_FINITE
def test_a_bad_sample_is_tried_alone_once_then_left_out_and_listed(config, whole, monkeypatch, value):
    spoilt = damage(monkeypatch, config, value)
    report = extract(replace(config, max_bad=0.05), World())
    assert len(spoilt) == 2
    assert spoilt[-1] == 1
    manifest = load_manifest(config.out)
    (bad,) = manifest.bad
    assert (bad.name, bad.layer, bad.position) == ("row-5", 2, 3)
    assert bad.token == whole[bad.id].input_ids[3]
    assert manifest.complete
    assert (manifest.expected_samples, report.samples, report.bad) == (SAMPLES - 1, SAMPLES - 1, 1)
    assert same(samples_of(config.out), {key: value for key, value in whole.items() if key != bad.id})
    again = extract(config, World())
    assert (again.new_tokens, again.bad, len(spoilt)) == (0, 1, 2)
    assert "NaN or Inf: 1, listed in manifest.json" in again.text()


def test_a_sample_that_is_spoilt_in_company_alone_is_kept(config, whole, monkeypatch):
    capture, spoilt = TruncatedTarget.capture, []

    def damaged(self, sequences, out):
        capture(self, sequences, out)
        if len(sequences) > 1:
            out[3, 1, 7] = math.nan
            spoilt.append(len(sequences))

    monkeypatch.setattr(TruncatedTarget, "capture", damaged)
    extract(config, World())
    assert spoilt
    samples = samples_of(config.out)
    assert samples.keys() == whole.keys()
    for key, sample in samples.items():
        torch.testing.assert_close(sample.hidden_states, whole[key].hidden_states)
    assert load_manifest(config.out).bad == ()


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_of_bad_samples_is_a_share(config, share):
    with pytest.raises(ConfigError, match=f"--max-bad {share}"):
        replace(config, max_bad=share)


def with_memory(monkeypatch, tokens):
    """A device on which no more than so many padded tokens fit; returns the sizes that were tried."""
    capture, tried = TruncatedTarget.capture, []

    def limited(self, sequences, out):
        tried.append(len(sequences) * max(map(len, sequences)))
        if tried[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        capture(self, sequences, out)

    monkeypatch.setattr(TruncatedTarget, "capture", limited)
    return tried


@pytest.mark.parametrize("tokens", [160, 250, 399])
def test_batches_that_do_not_fit_are_halved_and_the_size_is_remembered(config, whole, monkeypatch, tokens):
    tried = with_memory(monkeypatch, tokens)
    report = extract(config, World())
    samples = samples_of(config.out)
    assert samples.keys() == whole.keys()
    for key, sample in samples.items():
        torch.testing.assert_close(sample.hidden_states, whole[key].hidden_states)
    too_large = [size for size in tried if size > tokens]
    assert report.halved == len(too_large) <= 3
    assert too_large == sorted(too_large, reverse=True)
    assert ("batches halved" in report.text()) is bool(too_large)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("expected scalar type Float but found BFloat16"), False),
    ],
)
def test_want_of_memory_is_told_from_other_errors(error, expected):
    assert lacks_memory(error) is expected


def test_a_sample_that_does_not_fit_alone_is_an_error(config, monkeypatch):
    with_memory(monkeypatch, 100)
    with pytest.raises(TargetError, match=r"memory of cpu does not suffice for one sample of \d+ tokens"):
        extract(config, World())


class Echo:
    """A target whose states are the token ids, on a device of any memory."""

    taps, hidden_size, device = (0,), 4, torch.device("cpu")

    def __init__(self, memory):
        self.memory, self.model = memory, torch.zeros(1)

    def computed_tokens(self, lengths):
        return len(lengths) * max(lengths)

    def capture(self, sequences, out):
        if len(sequences) * max(map(len, sequences)) > self.memory:
            raise torch.OutOfMemoryError
        out[:] = torch.from_numpy(np.concatenate(sequences)).float()[:, None, None]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 200))
def test_however_often_a_batch_is_halved_each_sample_comes_out_once(lengths, memory):
    lengths = sorted(lengths, reverse=True)
    samples = [
        (n, np.full(length, n, np.int32), np.ones(length, np.uint8), None, None)
        for n, length in enumerate(lengths)
    ]
    corpus = corpus_from(samples, {}, {})
    capturer = Capturer(Echo(memory), corpus)
    order = np.arange(len(lengths))
    found = []
    for rows in np.array_split(order, 2):
        if len(rows):
            for flight in capturer.start(rows):
                found += capturer.finish(flight).samples
    assert [sample.id for sample in found] == order.tolist()
    assert all((sample.hidden_states == sample.id).all() for sample in found)
    assert capturer.padded_tokens >= sum(lengths)


def test_states_are_read_only_when_their_copy_has_arrived(monkeypatch):
    """As on a GPU: the host's tensor is filled by the time `wait` returns, not before."""
    corpus = corpus_from([(7, np.arange(3, dtype=np.int32), np.ones(3, np.uint8), None, None)], {}, {})

    def later(states, sums):
        hosts = torch.full_like(states, math.nan), torch.full_like(sums, math.nan)

        def wait():
            hosts[0].copy_(states)
            hosts[1].copy_(sums)

        return *hosts, wait

    monkeypatch.setattr(capture_module, "_stay", later)
    capturer = Capturer(Echo(100), corpus)
    (flight,) = capturer.start(np.asarray([0]))
    assert flight.states.isnan().all()
    captured = capturer.finish(flight)
    assert captured.bad == []
    assert captured.samples[0].hidden_states[:, 0, 0].tolist() == [0, 1, 2]


def added(config, first, last):
    data = write_jsonl(config.out.parent / f"{first}-{last}.jsonl", *rows(first, last))
    return replace(config, data=(data,), append=True)


def test_appended_data_joins_what_is_there(config, whole):
    """Samples that are there already are not extracted again; the manifest knows both corpora."""
    extract(config, World())
    first = load_manifest(config.out)
    more = added(config, 10, 30)
    report = extract(more, World())
    manifest = load_manifest(config.out)
    assert manifest.complete
    assert manifest.identity == first.identity
    assert manifest.digest() == first.digest()
    assert manifest.content_digest != first.content_digest
    assert manifest.corpora == (first.identity.corpus_digest, *manifest.appended)
    assert len(set(manifest.corpora)) == 2
    assert manifest.dropped == {"already_in_cache": 10}
    samples = samples_of(config.out)
    assert (len(samples), report.samples) == (30, 30)
    assert same({key: samples[key] for key in whole}, whole)
    assert report.new_tokens == sum(len(s.input_ids) for key, s in samples.items() if key not in whole)
    for again in (config, more, replace(config, append=True)):
        assert extract(again, World()).new_tokens == 0


def test_appending_needs_to_be_asked_for_and_to_fit(config):
    extract(config, World())
    more = added(config, 20, 30)
    with pytest.raises(CacheMismatch, match=r"corpus_digest: this .*, other .*--append to add this data"):
        extract(replace(more, append=False), World())
    with pytest.raises(
        CacheMismatch, match=r"taps: this \[0, 2\], other \[0, 2, 3\]; use another folder"
    ) as caught:
        extract(replace(more, taps=(0, 2)), World())
    assert "corpus_digest" not in str(caught.value)
    assert "--append" not in str(caught.value)
    assert load_manifest(config.out).appended == ()


def test_appending_to_nothing_begins_a_cache(config, whole):
    extract(replace(config, append=True), World())
    assert same(samples_of(config.out), whole)


def test_appending_can_be_interrupted_and_must_be_finished_first(config, monkeypatch):
    extract(config, World())
    more = added(config, 20, 30)

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TruncatedTarget, "capture", stopped)
        with pytest.raises(KeyboardInterrupt):
            extract(more, World())
    assert not load_manifest(config.out).complete
    with pytest.raises(CacheIncomplete, match=r"run the `dflash extract` of each of its corpora"):
        extract(config, World())
    with pytest.raises(CacheIncomplete, match="before data is added"):
        extract(added(config, 30, 35), World())
    assert extract(more, World()).samples == 30
