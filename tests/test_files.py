"""Publishing a file leaves the old state or the new one, whatever happens in between."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash import files
from dflash.files import digest_file, digest_json, json_bytes, publish, publish_bytes, publish_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_published_file_has_its_bytes_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "a.bin"
    for data in (b"one", b"two"):
        publish_bytes(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [True, False])
def test_a_failing_write_changes_nothing(tmp_path, replace):
    path = tmp_path / "a.bin"
    publish_bytes(path, b"old")

    def write(tmp):
        tmp.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(path, write, replace=replace)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_kept_where_replacing_is_forbidden(tmp_path):
    path = tmp_path / "a.bin"
    publish_bytes(path, b"first", replace=False)
    with pytest.raises(FileExistsError):
        publish_bytes(path, b"second", replace=False)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_name_is_there(tmp_path, monkeypatch):
    path, seen = tmp_path / "a.bin", []
    real = files.fsync_path
    monkeypatch.setattr(
        files, "fsync_path", lambda what: (seen.append((what.name, path.exists())), real(what))
    )
    publish_bytes(path, b"data")
    assert [(name.endswith(files.TMP_SUFFIX), exists) for name, exists in seen] == [
        (True, False),
        (False, True),
    ]
    assert seen[1][0] == tmp_path.name


@settings(max_examples=25, deadline=None)
@given(JSON)
def test_json_and_its_digest_do_not_depend_on_the_order_of_keys(value):
    turned = json.loads(json_bytes(value), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert turned == value
    assert json_bytes(turned) == json_bytes(value)
    assert digest_json(turned) == digest_json(value)


def test_another_value_has_another_digest():
    values = [None, 0, False, "", "0", [], {}, [0], {"a": 1}, {"a": 2}, {"b": 1}]
    assert len({digest_json(value) for value in values}) == len(values)


def test_published_json_is_text_that_a_person_can_read(tmp_path):
    publish_json(tmp_path / "a.json", {"b": "ü", "a": 1})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": 1,\n  "b": "ü"\n}\n'


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 3])
def test_the_digest_of_a_file_is_that_of_its_bytes_on_every_python(tmp_path, size, monkeypatch):
    path = tmp_path / "a.bin"
    data = bytes(range(256)) * (size // 256 + 1)
    path.write_bytes(data[:size])
    expected = hashlib.sha256(data[:size]).hexdigest()
    assert digest_file(path) == expected
    monkeypatch.delattr(hashlib, "file_digest", raising=False)
    assert digest_file(path) == expected
    assert digest_file(path, "md5") == hashlib.md5(data[:size]).hexdigest()
