"""Speeds by bucket: later runs add to them, and damage means that there are none."""

from __future__ import annotations

import json

import pytest

from dflash.cache.speeds import SPEEDS_NAME, check_speeds, load_speeds, save_speeds

EDGES = (256, 512, 1024)


def test_a_bucket_keeps_its_newest_speed_and_one_without_gets_the_slowest(tmp_path) -> None:
    save_speeds(tmp_path, {256: 300.0, 1024: 90.0})
    save_speeds(tmp_path, {1024: 100.0})
    save_speeds(tmp_path, {})
    assert load_speeds(tmp_path, EDGES) == [300.0, 100.0, 100.0]


@pytest.mark.parametrize("record", ["{}", "[1, 2]", '{"256": 0}', '{"256": "fast"}', "{"])
def test_what_cannot_be_used_is_no_record(tmp_path, record: str) -> None:
    (tmp_path / SPEEDS_NAME).write_text(record)
    assert load_speeds(tmp_path, EDGES) is None


def test_a_flipped_bit_anywhere_means_that_there_is_no_record(tmp_path) -> None:
    save_speeds(tmp_path, {256: 1234.56789, 1024: 90.0})
    whole = (tmp_path / SPEEDS_NAME).read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            (tmp_path / SPEEDS_NAME).write_bytes(
                whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
            )
            assert load_speeds(tmp_path, EDGES) is None
            with pytest.raises(ValueError, match=r"."):
                check_speeds(tmp_path)
    save_speeds(tmp_path, {512: 5.0})  # damage is not carried on
    assert load_speeds(tmp_path, EDGES) == [5.0, 5.0, 5.0]


def test_nothing_recorded_is_no_file(tmp_path) -> None:
    save_speeds(tmp_path, {})
    assert not list(tmp_path.iterdir())
    assert load_speeds(tmp_path, EDGES) is None


def test_the_file_is_plain_json_by_edge(tmp_path) -> None:
    save_speeds(tmp_path, {256: 1234.56789})
    value = json.loads((tmp_path / SPEEDS_NAME).read_text())
    assert len(value.pop("digest")) == 64
    assert value == {"256": 1234.568}
