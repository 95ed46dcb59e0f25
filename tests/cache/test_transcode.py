"""Transcoding: the same samples in another codec, exactly once whatever happens, the source untouched."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_samples import IDENTITY, bits, make_manifest, make_samples, read_all, same_samples
from click.testing import CliRunner

from dflash.cache import transcode as module
from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.manifest import create_cache, load_manifest
from dflash.cache.reader import CacheReader
from dflash.cache.recipes import Choice, drop_taps, rebucket, subset
from dflash.cache.repair import repair
from dflash.cache.scales import channel_scales
from dflash.cache.transcode import transcode
from dflash.cache.verify import verify
from dflash.cache.writer import CacheWriter, finalize
from dflash.cli import cli
from dflash.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch


def smooth(sample):
    """States like a residual stream's: normal, with massive values now and then."""
    generator = torch.Generator().manual_seed(sample.id % (1 << 31))
    states = torch.randn(sample.hidden_states.shape, generator=generator).bfloat16()
    states[0, 1, 2] = 20_000.0
    return replace(sample, hidden_states=states)


WIDE = replace(IDENTITY, hidden_size=64)
SAMPLES = [smooth(sample) for sample in make_samples(40, WIDE)]


def write_source(cache, samples=SAMPLES, identity=WIDE):
    manifest = create_cache(cache, replace(make_manifest(len(samples), identity), dropped={"empty": 3}))
    (cache / "tokenizer").mkdir()
    (cache / "tokenizer" / "tokenizer.json").write_text("{}")
    (cache / "head.safetensors").write_bytes(b"head")
    with CacheWriter(cache, manifest, "rank0", 3000) as writer:
        for sample in samples:
            writer.write(sample)
    finalize(cache)
    return cache


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("transcode") / "raw")


THREE = replace(WIDE, taps=(0, 2, 3))


@pytest.fixture(scope="module")
def three_taps(tmp_path_factory):
    """Caches of the same samples with three taps, by codec; every layer has rows that escape."""
    folder, samples = tmp_path_factory.mktemp("three"), []
    for number, sample in enumerate(make_samples(40, THREE)):
        samples.append(smooth(sample))
        samples[-1].hidden_states[-1, number % 3, 7] = -9_000.0
    write_source(folder / "raw", samples, THREE)
    for codec in CODECS:
        if codec != "raw":
            transcode(folder / "raw", folder / codec, codec, 1)
    return {codec: folder / codec for codec in CODECS}


def fingerprint(folder):
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


@pytest.mark.parametrize("jobs", [1, 3])
def test_lossless_there_and_back_gives_the_same_samples(source, tmp_path, jobs):
    before = fingerprint(source)
    there = transcode(source, tmp_path / "lossless", "lossless", jobs)
    transcode(tmp_path / "lossless", tmp_path / "raw", "raw", jobs)
    assert there.samples == 40
    assert same_samples(read_all(tmp_path / "lossless"), SAMPLES)
    assert same_samples(read_all(tmp_path / "raw"), SAMPLES)
    assert load_manifest(tmp_path / "raw").digest() == load_manifest(source).digest()
    assert (tmp_path / "raw" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "raw" / "head.safetensors").read_bytes() == b"head"
    assert load_manifest(tmp_path / "raw").dropped == {"empty": 3}
    assert fingerprint(source) == before


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_lossy_copy_differs_in_the_codec_alone_and_says_what_it_costs(source, tmp_path, codec):
    done = transcode(source, tmp_path / "out", codec, 2)
    fields = {
        line.split(":")[0] for line in load_manifest(source).identity.differences(done.manifest.identity)
    }
    assert fields == {"codec"} | ({"codec_digest"} if codec == "int8" else set())
    error = done.manifest.codec_error
    assert load_manifest(tmp_path / "out").codec_error == error
    assert error.tokens == sum(len(sample.input_ids) for sample in SAMPLES)
    assert 0 < max(error.relative_error) < 0.05
    assert error.escaped[0] == 0
    assert error.escaped[1] == (pytest.approx(40 / error.tokens, abs=1e-5) if codec == "int8" else 0)
    assert error.kl == ()
    exact = {sample.id: sample.hidden_states.float() for sample in SAMPLES}
    for sample in read_all(tmp_path / "out"):
        off = (sample.hidden_states.float() - exact[sample.id]).abs()
        assert float((off / exact[sample.id].abs().clamp_min(3)).max()) < 0.08
    assert done.bytes < done.source_bytes


@pytest.mark.parametrize("codec", ["int8", "lossless"])
def test_a_run_that_died_goes_on_and_ends_with_the_bytes_of_an_undisturbed_one(
    source, tmp_path, monkeypatch, codec
):
    transcode(source, tmp_path / "whole", codec, 1)
    real, calls = module._transcode_shard, []

    def dies(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise OSError("the machine is gone")
        real(*arguments)

    monkeypatch.setattr(module, "_transcode_shard", dies)
    with pytest.raises(OSError, match="gone"):
        transcode(source, tmp_path / "out", codec, 1)
    assert not load_manifest(tmp_path / "out").complete
    (tmp_path / "out" / "index" / "left.tmp").write_bytes(b"rubbish")
    monkeypatch.setattr(module, "_transcode_shard", real)
    again = transcode(source, tmp_path / "out", codec, 2)
    assert 0 < again.new_tokens < again.tokens
    whole, parts = fingerprint(tmp_path / "whole"), fingerprint(tmp_path / "out")
    assert {k: v for k, v in whole.items() if "shards" in k} == {
        k: v for k, v in parts.items() if "shards" in k
    }
    assert transcode(source, tmp_path / "out", codec).new_tokens == 0


def transcode_slowly(source, out):
    real = module._transcode_shard

    def slow(*arguments):
        real(*arguments)
        time.sleep(0.05)

    module._transcode_shard = slow
    transcode(source, out, "int8", 2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_process_loses_nothing(tmp_path):
    source = write_source(tmp_path / "raw", [smooth(s) for s in make_samples(150, WIDE)])
    fork = multiprocessing.get_context("fork")  # importing torch anew would take longer than all the rest
    process = fork.Process(target=transcode_slowly, args=(source, tmp_path / "out"))
    process.start()
    while process.is_alive() and len(list((tmp_path / "out").glob("index/*.arrow"))) < 3:
        time.sleep(0.01)
    process.kill()
    process.join()
    frozen = load_manifest(tmp_path / "out")
    assert not frozen.complete
    done = transcode(source, tmp_path / "out", "int8", 2)
    assert done.new_tokens < done.tokens
    assert done.manifest.channel_scales == frozen.channel_scales
    assert sorted(s.id for s in read_all(tmp_path / "out")) == sorted(s.id for s in read_all(source))


def test_memory_is_bounded_by_small_batches_and_order_is_that_of_the_file(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 4000)
    seen, real = [], CacheReader.read

    def watch(self, rows, *arguments, **options):
        seen.append(int(self.index.lengths[np.asarray(rows)].sum()) * WIDE.bytes_per_token)
        return real(self, rows, *arguments, **options)

    monkeypatch.setattr(CacheReader, "read", watch)
    transcode(source, tmp_path / "out", "lossless", 1)
    assert max(seen) < 4000 + 16 * WIDE.bytes_per_token
    monkeypatch.undo()
    assert same_samples(read_all(tmp_path / "out"), SAMPLES)


@pytest.mark.parametrize("old", LOSSY_CODECS)
@pytest.mark.parametrize("new", CODECS)
def test_what_is_lost_does_not_come_back_so_it_is_refused(three_taps, tmp_path, old, new):
    with pytest.raises(CacheError, match=r"already|does not come back"):
        transcode(three_taps[old], tmp_path / "out", new)
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_clear_error_and_change_nothing(source, tmp_path):
    unfinished = tmp_path / "unfinished"
    create_cache(unfinished, make_manifest(3))
    floats = write_source(
        tmp_path / "f32",
        make_samples(3, replace(IDENTITY, dtype="float32")),
        replace(IDENTITY, dtype="float32"),
    )
    cases = [
        (source, source, "int8", CacheError, "source itself"),
        (source, tmp_path / "a", "raw", CacheError, "already"),
        (source, tmp_path / "a", "zip", CacheError, "zip"),
        (floats, tmp_path / "a", "int8", CacheError, "float32"),
        (unfinished, tmp_path / "a", "int8", CacheIncomplete, "0 of 3"),
        (tmp_path / "absent", tmp_path / "a", "int8", CacheError, "not a cache"),
        (source, floats, "int8", CacheMismatch, "another cache"),
    ]
    for one, out, codec, error, text in cases:
        with pytest.raises(error, match=text):
            transcode(one, out, codec)
    assert not (tmp_path / "a").exists()
    assert same_samples(read_all(floats), make_samples(3, replace(IDENTITY, dtype="float32")))


def test_a_damaged_source_is_named_and_the_copy_stays_unfinished(tmp_path):
    source = write_source(tmp_path / "raw")
    shard = sorted((source / "shards").glob("*/*"))[1]
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CacheCorrupt, match=shard.name):
        transcode(source, tmp_path / "out", "lossless")
    assert not load_manifest(tmp_path / "out").complete


def test_the_command_prints_a_summary_or_json(source, tmp_path):
    arguments = ["cache", "transcode", str(source), "--codec", "fp8", "--out", str(tmp_path / "out")]
    plain = CliRunner().invoke(cli, [*arguments, "--jobs", "1"])
    assert plain.exit_code == 0
    assert "40 samples" in plain.stdout
    assert "relative error" in plain.stdout
    figures = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert figures["codec"] == "fp8"
    assert figures["new_tokens"] == 0
    assert len(figures["codec_error"]["relative_error"]) == 2
    assert figures["bytes"] < figures["source_bytes"]
    assert all(bits(sample) for sample in read_all(tmp_path / "out"))
    wrong = CliRunner().invoke(cli, [*arguments[:4], "int8", "--out", str(source)])
    assert wrong.exit_code == 2
    assert len(wrong.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "raw"])
def test_tools_copy_coded_samples_byte_for_byte(source, tmp_path, codec):
    """Decoding and coding again would lose a little more each time."""
    transcode(source, tmp_path / "coded", codec)
    rebucket(tmp_path / "coded", tmp_path / "buckets", (9, 16))
    subset(tmp_path / "coded", tmp_path / "few", Choice(where="length > 4"))
    stored = {}
    for name in ("coded", "buckets", "few"):
        with CacheReader(tmp_path / name) as reader:
            samples = reader.read_stored(np.arange(len(reader.index)))
            stored[name] = {sample.id: sample.hidden_states.numpy().tobytes() for sample in samples}
        assert verify(tmp_path / name, deep=True).whole
    assert stored["buckets"] == stored["coded"]
    assert 0 < len(stored["few"]) < len(stored["coded"])
    assert stored["few"].items() <= stored["coded"].items()


@pytest.mark.parametrize("keep", [(2,), (3,), (3, 0), (3, 2, 0), (0, 2, 3)])
@pytest.mark.parametrize("codec", CODECS)
def test_kept_taps_decode_to_the_same_bits_in_every_codec(three_taps, tmp_path, codec, keep):
    before, out = three_taps[codec], tmp_path / "cut"
    columns = [THREE.taps.index(tap) for tap in keep]
    drop_taps(before, out, keep)
    assert verify(out, deep=True, show=False).whole
    cut = [replace(s, hidden_states=s.hidden_states[:, columns].contiguous()) for s in read_all(before)]
    assert same_samples(read_all(out), cut)
    old, new = load_manifest(before), load_manifest(out)
    assert new.identity.taps == keep
    assert (new.identity.codec, new.complete) == (codec, True)
    if codec == "int8":
        assert torch.equal(channel_scales(new), channel_scales(old)[columns])
    else:
        assert new.channel_scales is None
    if codec in LOSSY_CODECS:
        for name in ("relative_error", "escaped"):
            whole, kept = getattr(old.codec_error, name), getattr(new.codec_error, name)
            assert kept == tuple(whole[column] for column in columns)
        assert (new.codec_error.tokens, new.codec_error.kl) == (old.codec_error.tokens, ())


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_codes_and_scales_of_kept_taps_are_the_bytes_that_were_there(three_taps, tmp_path, codec):
    drop_taps(three_taps[codec], tmp_path / "cut", (3, 0))
    with CacheReader(three_taps[codec]) as whole, CacheReader(tmp_path / "cut") as cut:
        rows = np.arange(len(whole.index))
        escaped = 0
        for before, after in zip(*(r.read(rows, keep_coded=True) for r in (whole, cut)), strict=True):
            assert torch.equal(after.coded.codes, before.coded.codes[:, [2, 0]])
            assert torch.equal(after.coded.scales, before.coded.scales[:, [2, 0]])
            escaped += 0 if after.coded.escaped is None else len(after.coded.escaped)
        assert escaped > 0 or codec == "fp8"


def test_an_extent_that_is_none_is_refused_when_taps_are_dropped(three_taps, tmp_path, monkeypatch):
    read = CacheReader.read_stored

    def shortened(self, rows):
        return [replace(s, hidden_states=s.hidden_states[:-8]) for s in read(self, rows)]

    monkeypatch.setattr(CacheReader, "read_stored", shortened)
    with pytest.raises(CacheCorrupt, match=r"sample \d+ fits its checksum, but not its codec"):
        drop_taps(three_taps["int8"], tmp_path / "cut", (0,))


def test_a_flipped_bit_in_a_copy_is_found_and_repaired_by_the_same_command(source, tmp_path):
    out = tmp_path / "out"
    transcode(source, out, "int8")
    before = fingerprint(out / "shards")
    shard = sorted((out / "shards").glob("*/*"))[2]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 4
    shard.write_bytes(data)
    assert not verify(out, deep=True).whole
    assert "transcode" in repair(out).text()
    again = transcode(source, out, "int8")
    assert 0 < again.new_tokens < again.tokens
    assert verify(out, deep=True).whole
    assert sorted(before.values()) == sorted(fingerprint(out / "shards").values())


def test_another_source_of_the_same_identity_does_not_join_a_copy(source, tmp_path):
    transcode(source, tmp_path / "out", "fp8")
    other = write_source(tmp_path / "other", [smooth(sample) for sample in make_samples(44, WIDE)[4:]])
    with pytest.raises(CacheMismatch, match="another cache"):
        transcode(other, tmp_path / "out", "fp8")
