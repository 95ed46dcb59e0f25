"""Taps: the published rule, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import ConfigError
from dflash.taps import check_taps, default_taps


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),
        (32, (1, 8, 15, 22, 29)),
        (24, (1, 6, 11, 16, 21)),
        (30, (1, 8, 14, 20, 27)),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(layers, taps):
    assert default_taps(layers, 5) == taps


@given(st.integers(8, 200), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_default_taps_are_valid_for_every_depth(layers, count):
    taps = default_taps(layers, count)
    assert len(taps) == count
    check_taps(taps, layers)


def test_one_default_tap_is_the_middle_layer():
    assert default_taps(30, 1) == (15,)


def test_a_target_too_shallow_for_the_taps_is_refused():
    with pytest.raises(ConfigError, match="is repeated"):
        default_taps(5, 5)


@pytest.mark.parametrize(
    ("taps", "text"),
    [
        ((), "no taps: name at least one"),
        ((1, 30), r"tap 30 is outside the target's layers 0\.\.29"),
        ((-1, 3), r"tap -1 is outside the target's layers 0\.\.29"),
        ((1, 4, 4), "tap 4 is repeated in 1,4,4"),
        ((8, 1), "taps 8,1 are not in ascending order"),
    ],
)
def test_bad_taps_are_named(taps, text):
    with pytest.raises(ConfigError, match=text):
        check_taps(taps, 30)
