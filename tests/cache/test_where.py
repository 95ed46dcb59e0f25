"""The language of `--where`: what it means, and that nothing else is ever run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cache_samples import IDENTITY, make_samples, write_cache
from hypothesis import given
from hypothesis import strategies as st

from dflash.cache.reader import CacheReader
from dflash.cache.where import select
from dflash.errors import ConfigError

EDGES = IDENTITY.bucket_edges


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    cache: Path = write_cache(tmp_path_factory.mktemp("where") / "cache", make_samples(24))
    return CacheReader(cache).index


def rows_where(index, condition):
    """The same by plain Python, over (id, length, bucket, supervised)."""
    columns = (index.ids, index.lengths, index.buckets, index.supervised)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        place
        for place, (name, length, bucket, supervised) in enumerate(rows)
        if condition(name, length, EDGES[bucket], supervised)
    ]


CONDITIONS = {
    "length < 8": lambda i, n, b, s: n < 8,
    "length<8 and bucket = 4": lambda i, n, b, s: n < 8 and b == 4,
    "length < 3 or bucket = 16 and supervised > 4": lambda i, n, b, s: n < 3 or (b == 16 and s > 4),
    "(length < 3 or bucket = 16) and supervised > 4": lambda i, n, b, s: (n < 3 or b == 16) and s > 4,
    "not length < 3 AND NOT bucket == 16": lambda i, n, b, s: n >= 3 and b != 16,
    "3 <= length <= 1_0": lambda i, n, b, s: 3 <= n <= 10,
    "share >= 0.5": lambda i, n, b, s: s / n >= 0.5,
    "length in (3, 5, 7)": lambda i, n, b, s: n in (3, 5, 7),
    "supervised != length": lambda i, n, b, s: s != n,
    "id > 9223372036854775808": lambda i, n, b, s: i > 1 << 63,
    "length < 0": lambda i, n, b, s: False,
    "((((1 = 1))))": lambda i, n, b, s: True,
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_means_what_it_says(index, text):
    assert select(index, EDGES, text).tolist() == rows_where(index, CONDITIONS[text])


def test_no_condition_takes_all(index):
    assert select(index, EDGES, None).tolist() == list(range(24))


def test_an_id_is_told_exactly(index):
    for row, sample_id in enumerate(index.ids.tolist()):
        assert select(index, EDGES, f"id = {sample_id}").tolist() == [row]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the end"),
        ("length", "comparison"),
        ("length <", "number or one of id, length"),
        ("length < 3 and", "number"),
        ("length < 3 bucket = 4", "'bucket'"),
        ("(length < 3", "`)`"),
        ("lenght < 3", "'lenght'"),
        ("length in ()", "number"),
        ("length in (3", "`)`"),
        ("__import__('os').system('x')", '"\'"'),
        ("__import__(os)", "'__import__'"),
        ("length < 3; x", "';'"),
        ("length < 'a'", '"\'"'),
        ("not", "number"),
        ("length = -1", "'-'"),
        ("(" * 5000 + "length<3", "more than 1000"),
    ],
)
def test_anything_else_is_one_line_that_says_what_was_expected(index, text, words):
    with pytest.raises(ConfigError) as caught:
        select(index, EDGES, text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="()<>=!,.0123456789 abdeghilnoprstuv_", max_size=40))
def test_any_text_is_a_condition_or_a_clear_error(index, text):
    try:
        rows = select(index, EDGES, text)
    except ConfigError:
        return
    assert np.all(np.diff(rows) > 0)
