"""The manifest: strict, digested, and the judge of who may write into a folder."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from cache_samples import IDENTITY, make_manifest, renamed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.cache.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    BadSample,
    Identity,
    Manifest,
    bucket_name,
    bucket_of,
    create_cache,
    load_manifest,
    save_manifest,
)
from dflash.errors import CacheCorrupt, CacheError, CacheMismatch

ELSEWHERE = {
    "config_digest": "c1",
    "weights_digest": "w1",
    "tokenizer_digest": "t1",
    "template_digest": "p1",
    "taps": (1, 3),
    "num_target_layers": 6,
    "hidden_size": 8,
    "vocab_size": 101,
    "dtype": "float32",
    "bucket_edges": (8, 16),
    "corpus_digest": "d1",
}


def test_a_saved_manifest_loads_as_the_same_value(tmp_path):
    manifest = replace(make_manifest(3), dropped={"empty": 2}, complete=True, content_digest="ab")
    save_manifest(tmp_path, manifest)
    assert load_manifest(tmp_path) == manifest


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_field_that_decides_bytes_is_named_when_it_differs(tmp_path, name):
    create_cache(tmp_path / "cache", make_manifest(3))
    other = replace(IDENTITY, **{name: ELSEWHERE[name]})
    assert Manifest(other, 3).digest() != make_manifest(3).digest()
    with pytest.raises(CacheMismatch, match=rf"{name}: this .*, other ") as caught:
        create_cache(tmp_path / "cache", Manifest(other, 3))
    assert "\n" not in str(caught.value)


def test_the_grid_of_differences_covers_every_field():
    constant = {
        "target",
        "revision",
        "codec",
        "codec_digest",
        "max_length",
    }  # names; below; tied to the edges
    assert set(ELSEWHERE) | constant == {field.name for field in fields(Identity)}


def test_moving_the_target_is_not_a_difference():
    assert IDENTITY.differences(renamed()) == []
    assert make_manifest(3).digest() == make_manifest(3, renamed()).digest()


def test_a_cache_of_the_same_identity_is_opened_as_it_is(tmp_path):
    first = create_cache(tmp_path / "cache", make_manifest(3))
    save_manifest(tmp_path / "cache", replace(first, complete=True))
    assert create_cache(tmp_path / "cache", make_manifest(9, renamed())) == replace(first, complete=True)


def test_a_new_cache_is_never_complete(tmp_path):
    assert not create_cache(tmp_path / "a" / "b", replace(make_manifest(3), complete=True)).complete
    assert not load_manifest(tmp_path / "a" / "b").complete


def test_a_foreign_folder_and_a_file_are_refused_untouched(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for path, text in (("folder", "not a cache"), ("file", "cannot use")):
        with pytest.raises(CacheError, match=text):
            create_cache(tmp_path / path, make_manifest(3))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]


def test_a_crash_while_the_first_manifest_was_written_leaves_a_usable_folder(tmp_path):
    (tmp_path / f"{MANIFEST_NAME}.17.tmp").write_text("{")
    assert create_cache(tmp_path, make_manifest(3)) == load_manifest(tmp_path)


def test_a_folder_without_manifest_is_not_a_cache(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CacheError, match="not a cache"):
            load_manifest(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "int8"}, "int8"),
        ({"codec": "zip"}, "zip"),
        ({"taps": ()}, "taps"),
        ({"taps": (1, 1)}, "taps"),
        ({"taps": (4,)}, "taps"),
        ({"taps": (-1,)}, "taps"),
        ({"hidden_size": 6}, "hidden size 6"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"bucket_edges": (8, 4, 16)}, "ascending"),
        ({"bucket_edges": ()}, "ascending"),
        ({"bucket_edges": (4, 8)}, "maximum length 16"),
    ],
)
def test_an_impossible_identity_is_refused(change, text):
    with pytest.raises(CacheError, match=text):
        replace(IDENTITY, **change)


def damage(value, change):
    value = json.loads(json.dumps(value))
    change(value)
    return value


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.update(extra=1), "unknown key 'extra'"),
        (lambda v: v.pop("complete"), "missing key 'complete'"),
        (lambda v: v["identity"].pop("taps"), "missing key 'taps'"),
        (lambda v: v["identity"].update(taps=[True]), "taps must be"),
        (lambda v: v.update(expected_samples="3"), "expected_samples must be int"),
        (lambda v: v.update(expected_samples=-1), "expected_samples must be int"),
        (lambda v: v.update(complete=1), "complete must be bool"),
        (lambda v: v.update(dropped={"a": "b"}), "dropped must be"),
        (lambda v: v.update(identity=[]), "identity must be"),
        (lambda v: v.update(expected_samples=4), "does not fit its digest"),
        (lambda v: v.pop("digest"), "does not fit its digest"),
        (lambda v: v.update(format_version=2), "newer"),
    ],
)
def test_a_manifest_that_is_not_exactly_right_is_a_one_line_error(change, text):
    with pytest.raises(CacheError, match=text) as caught:
        Manifest.from_json(damage(make_manifest(3).to_json(), change))
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_in_a_manifest_is_detected(tmp_path, data):
    save_manifest(tmp_path, make_manifest(3))
    path = tmp_path / MANIFEST_NAME
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        loaded = load_manifest(tmp_path)
    except CacheError:
        return
    assert loaded == make_manifest(3)  # a space became another white space


def test_a_huge_manifest_is_refused_without_being_read(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(b" " * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(CacheCorrupt, match="larger than"):
        load_manifest(tmp_path)


def test_a_bucket_is_the_first_edge_that_is_long_enough():
    assert [bucket_of(length, (4, 8, 16)) for length in (1, 4, 5, 8, 9, 16)] == [0, 0, 1, 1, 2, 2]
    for length in (0, 17):
        with pytest.raises(CacheError, match="fits no bucket"):
            bucket_of(length, (4, 8, 16))
    assert bucket_name(256) == "len-00256"


def test_later_keys_are_left_out_where_they_hold_nothing_and_come_back_where_they_do():
    plain = make_manifest(3)
    assert not {"appended", "bad"} & plain.to_json().keys()
    bad = (BadSample(7, None, 2, 0, 5), BadSample(2**64 - 1, "row", 0, 3, 1))
    full = replace(plain, appended=("a" * 64,), bad=bad)
    assert Manifest.from_json(json.loads(json.dumps(full.to_json()))) == full
    assert full.digest() == plain.digest()
    for spoilt in ({"bad": [{"id": 1}]}, {"bad": [3]}, {"appended": [1]}, {"appended": "x"}):
        with pytest.raises(CacheCorrupt, match=r"bad|appended|missing key"):
            Manifest.from_json(full.to_json() | spoilt)
