"""Codecs: exact where they promise it, close where they do not, and never trusting what they are given."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from cache_samples import IDENTITY, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.cache.codec import codec_of, decoded
from dflash.cache.codec_error import CODECS, LOSSY_CODECS
from dflash.cache.extents import extent_bounds
from dflash.cache.manifest import Manifest
from dflash.cache.quantised import CodedStates, Fp8Codec, Int8Codec, join
from dflash.cache.scales import calibrate, channel_scales, scales_text
from dflash.errors import CacheCorrupt, CacheError

STEP = {"int8": 0.5 / 127, "fp8": 0.5 / 8}
"""Largest error of a code: half a step of the row's peak (int8), of the value itself (fp8)."""


def manifest_of(codec, layers=2, hidden=8, scales=None):
    text, digest = scales_text(torch.ones(layers, hidden) if scales is None else scales)
    identity = replace(
        IDENTITY,
        taps=tuple(range(layers)),
        num_target_layers=max(layers, 4),
        hidden_size=hidden,
        codec=codec,
        codec_digest=digest if codec == "int8" else None,
    )
    return Manifest(identity, 1, channel_scales=text if codec == "int8" else None)


def round_trip(codec, states, scales=None):
    layers, hidden = states.shape[1:]
    manifest = manifest_of(codec, layers, hidden, scales)
    one = codec_of(manifest)
    extent = torch.from_numpy(one.encode(states))
    low, high = extent_bounds(manifest.identity, np.array([len(states)]))
    assert low[0] <= len(extent) <= high[0]
    assert codec == "raw" or len(extent) % 8 == 0
    return decoded(one.parse(extent, len(states)))


def gaussian(tokens, layers, hidden, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, layers, hidden, generator=generator) * size).bfloat16()


def relative_error(exact, found):
    exact, found = exact.double(), found.double()
    return ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median()


shapes = st.tuples(st.integers(1, 70), st.integers(1, 4), st.integers(1, 40).map(lambda n: 4 * n))


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 1 << 30), st.sampled_from(["raw", "lossless"]))
def test_exact_codecs_give_back_every_bit_pattern(shape, seed, codec):
    patterns = np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16).view(np.int16)
    states = torch.from_numpy(patterns).view(torch.bfloat16)  # NaN, infinities, subnormals, negative zero
    assert torch.equal(round_trip(codec, states).view(torch.int16), states.view(torch.int16))


@settings(max_examples=80, deadline=None)
@given(
    shapes,
    st.integers(0, 1 << 30),
    st.floats(-30, 30).map(lambda power: 2.0**power),
    st.sampled_from(LOSSY_CODECS),
)
def test_lossy_codecs_keep_every_value_within_half_a_step(shape, seed, size, codec):
    states = gaussian(*shape, seed=seed, size=size)
    found = round_trip(codec, states).double()
    peak = states.double().abs().amax(-1, keepdim=True)
    # the scale is rounded to bfloat16 and so is the result
    bound = STEP[codec] * (peak if codec == "int8" else states.double().abs() + peak / 2**14)
    assert bool(((found - states.double()).abs() <= 1.02 * bound + found.abs() / 256).all())


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.010), ("fp8", 0.030)])
def test_the_usual_error_of_a_usual_row_is_below_the_bar(codec, bound):
    states = gaussian(200, 2, 576)
    assert relative_error(states, round_trip(codec, states)) < bound


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 63), st.integers(0, 1), st.floats(5_000, 25_000), st.integers(0, 1 << 20))
def test_a_massive_value_spoils_neither_its_row_nor_its_neighbours(channel, layer, massive, seed):
    states = gaussian(9, 2, 64, seed, 2.0)
    states[4, layer, channel] = massive
    found = round_trip("int8", states)
    assert torch.equal(found[4, layer], states[4, layer])  # escaped: exact to the bit
    others = states.clone()
    others[4, layer] = 0
    assert float((found - states).abs().amax()) <= 1.1 * STEP["int8"] * float(others.abs().amax()) + 0.05
    coarse = round_trip("fp8", states)
    assert float(((coarse - states)[4, layer].abs() / states[4, layer].abs().clamp_min(1)).amax()) < 0.08


@pytest.mark.parametrize("codec", LOSSY_CODECS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -9.2e-41, 2.0**-126, 3.3e38, -3.3e38])
def test_zeros_subnormals_and_the_largest_values_stay_what_they_are(codec, value):
    states = torch.full((3, 2, 8), value, dtype=torch.bfloat16)
    found = round_trip(codec, states).double()
    assert bool(((found - states.double()).abs() <= max(abs(value) / 100, 2.0**-117)).all())


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_row_of_zeros_between_others_stays_zero(codec):
    states = gaussian(5, 2, 8)
    states[2] = 0
    assert not round_trip(codec, states)[2].any()


@pytest.mark.parametrize("codec", LOSSY_CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(codec, value):
    states = gaussian(5, 2, 8)
    states[3, 1, 7] = value
    with pytest.raises(ValueError, match="NaN or Inf"):
        codec_of(manifest_of(codec)).encode(states)


def test_channel_scales_even_out_channels_of_different_size():
    sizes = torch.logspace(-2, 2, 64)
    states = (gaussian(300, 2, 64).float() * sizes).bfloat16()
    plain, scaled = round_trip("int8", states), round_trip("int8", states, calibrate(states))
    small = slice(0, 32)
    assert relative_error(states[..., small], scaled[..., small]) < 0.02
    assert relative_error(states[..., small], plain[..., small]) > 0.2


def test_calibration_ignores_massive_rows_and_survives_channels_of_zeros():
    states = gaussian(100, 2, 64)
    usual = calibrate(states)
    states[7, 0, 3] = 20_000
    assert torch.equal(calibrate(states)[1], usual[1])
    assert torch.allclose(calibrate(states), usual, rtol=0.2)
    for empty in (
        torch.zeros(4, 2, 8).bfloat16(),
        gaussian(4, 2, 8) * torch.tensor([0.0] + [1.0] * 7).bfloat16(),
    ):
        scales = calibrate(empty)
        assert bool((scales > 0).all())
        assert bool(torch.isfinite(round_trip("int8", empty, scales)).all())


def test_channel_scales_pass_through_the_manifest():
    scales = calibrate(gaussian(50, 2, 8))
    manifest = manifest_of("int8", scales=scales)
    assert torch.equal(channel_scales(manifest), scales)
    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert again == manifest
    for damaged in (None, "", "####", scales_text(scales * 2)[0]):
        with pytest.raises(CacheCorrupt, match="channel scales"):
            codec_of(replace(manifest, channel_scales=damaged))


@pytest.mark.parametrize("codec", LOSSY_CODECS)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4), keep=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_joined_and_shortened_states_decode_like_the_parts(codec, cuts, keep):
    one = codec_of(manifest_of(codec))
    parts = []
    for number, tokens in enumerate(cuts):
        states = gaussian(tokens, 2, 8, number)
        states[0, 1, 2] = 20_000.0
        parts.append(one.parse(torch.from_numpy(one.encode(states)), tokens))
    shortened = [part.first(min(keep, len(part.codes))) for part in parts]
    expected = torch.cat([part.decode()[:keep] for part in parts])
    assert torch.equal(join(shortened).decode(), expected)


def test_decoding_in_pieces_and_as_a_whole_gives_the_same_bits(monkeypatch):
    states = gaussian(50, 2, 8)
    whole = [round_trip(codec, states) for codec in LOSSY_CODECS]
    monkeypatch.setattr("dflash.cache.quantised._CHUNK", 48)
    assert all(map(torch.equal, whole, [round_trip(codec, states) for codec in LOSSY_CODECS]))


def test_int8_states_are_decoded_by_the_products_that_the_format_names():
    scales = calibrate(gaussian(50, 2, 8))
    one = Int8Codec(scales)
    coded = one.parse(torch.from_numpy(one.encode(gaussian(6, 2, 8))), 6)
    product = (coded.scales.float()[..., None] * scales) * coded.codes.view(torch.int8).float()
    assert torch.equal(coded.decode(), product.to(torch.bfloat16))


def damaged_extents():
    """Extents of 3 tokens, broken in ways that a checksum would not show where they were made so."""
    states = gaussian(3, 2, 8)
    states[1, 1, 0] = states[2, 0, 0] = 20_000.0
    whole = {codec: codec_of(manifest_of(codec)).encode(states) for codec in CODECS if codec != "raw"}
    eight, packed = whole["int8"], whole["lossless"]
    rows = 8 + 48 + 16
    yield (
        "int8",
        np.concatenate([struct.pack("<I", 7) and np.frombuffer(struct.pack("<I", 7), np.uint8), eight[4:]]),
    )
    yield "int8", np.concatenate([eight[:4], np.ones(4, np.uint8), eight[8:]])
    for numbers in ((3, 3), (4, 3), (3, 6), (3, 0xFFFFFFFF)):
        yield (
            "int8",
            np.concatenate(
                [eight[:rows], np.frombuffer(struct.pack("<2I", *numbers), np.uint8), eight[rows + 8 :]]
            ),
        )
    for codec, extent in whole.items():
        yield codec, extent[:-8]
        yield codec, np.concatenate([extent, np.zeros(8, np.uint8)])
    bomb = zstandard.compress(bytes(1 << 20))
    for frame in (bomb, zstandard.compress(bytes(47)), b"no frame", packed[56:-12].tobytes()):
        head = np.frombuffer(struct.pack("<Q", len(frame)), np.uint8)
        body = np.concatenate([head, packed[8:56], np.frombuffer(frame, np.uint8)])
        yield "lossless", np.concatenate([body, np.zeros(-len(body) % 8, np.uint8)])
    yield "lossless", np.concatenate([np.full(8, 255, np.uint8), packed[8:]])


@pytest.mark.parametrize(("codec", "extent"), list(damaged_extents()))
def test_an_extent_that_makes_no_sense_is_refused(codec, extent):
    with pytest.raises(ValueError, match=r"."):
        codec_of(manifest_of(codec)).parse(torch.from_numpy(extent.copy()), 3)


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "int8"},
        {"codec": "raw", "codec_digest": "ab"},
        {"codec": "fp8", "codec_digest": "ab"},
        {"codec": "lossless", "dtype": "float32"},
        {"codec": "zstd"},
    ],
)
def test_an_identity_with_a_codec_that_does_not_fit_is_refused(change):
    with pytest.raises(CacheError, match="codec"):
        replace(IDENTITY, **change)


def test_a_raw_identity_is_digested_as_before_there_were_codecs():
    assert "codec_digest" not in IDENTITY.plain()
    assert Manifest(IDENTITY, 1).digest() != manifest_of("int8").digest()


def test_coded_states_know_their_kind():
    states = make_sample(3, length=4).hidden_states.nan_to_num(0, 0, 0)
    assert isinstance(
        Fp8Codec((2, 4)).parse(torch.from_numpy(Fp8Codec((2, 4)).encode(states)), 4), CodedStates
    )
