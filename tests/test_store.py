"""Object stores: what fails for a while is waited for, what fails for good is one clear line."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from object_store import FAULTS

from dflash import store as store_module
from dflash.errors import ConfigError, StoreError
from dflash.store import Store, is_url, path_of_url


@pytest.mark.parametrize("fault", FAULTS)
def test_every_request_survives_every_kind_of_failure(s3, anywhere, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(store_module, "PIECE_BYTES", 1000)
    store, content = Store(f"{anywhere}/a"), bytes(range(250)) * 10
    s3.once(fault)
    store.create("k", content)
    s3.once(fault, fault)
    assert store.read("k") == content
    s3.once(fault)
    assert store.sizes() == {"k": 2500}
    s3.once(fault)
    store.download("k", tmp_path / "file", 2500)
    assert (tmp_path / "file").read_bytes() == content
    s3.once(fault)
    store.replace("k", b"new")
    s3.once(fault)
    store.remove("k")
    assert store.sizes() == {}


def test_of_two_writers_one_wins_whatever_happens_to_the_answers(s3, anywhere):
    for number, fault in enumerate([None, *FAULTS]):
        if fault is not None:
            s3.once(fault, method="PUT")
        stores = [Store(anywhere), Store(anywhere)]

        def write(writer, number=number, stores=stores):
            try:
                stores[writer].create(f"k{number}", bytes([writer]) * 50)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(write, range(2)))
        assert sorted(won) == [False, True]
        assert stores[0].read(f"k{number}") == bytes([won.index(True)]) * 50


def test_a_server_that_stays_away_is_one_line_within_the_time_given(s3, anywhere):
    s3.away = True
    started = time.monotonic()
    with pytest.raises(
        StoreError, match=r"cannot read (s3|gs)://.*/k: .*; tried for \d s; run the same"
    ) as caught:
        Store(anywhere, retry_s=1).read("k")
    assert time.monotonic() - started < 4
    assert "\n" not in str(caught.value)


def test_what_waiting_does_not_help_is_raised_at_once(s3, anywhere):
    with pytest.raises(FileNotFoundError):
        Store(anywhere).read("nothing")
    with pytest.raises(StoreError, match=r"cannot write .*/k: there is no such bucket$"):
        Store(anywhere + "-not-there").create("k", b"1")
    with pytest.raises(StoreError, match="no such bucket"):
        Store(anywhere + "-not-there").sizes()


def test_keys_are_below_the_url_and_nowhere_else(s3, anywhere):
    Store(f"{anywhere}/one/").create("x/y", b"1")
    Store(f"{anywhere}/one-more").create("z", b"2")
    assert Store(f"{anywhere}/one").sizes() == {"x/y": 1}
    assert Store(f"{anywhere}/one").sizes("x") == {"x/y": 1}


def test_memory_is_a_store_of_this_process():
    Store("memory://m/a").create("k", b"1")
    assert Store("memory://m/a").read("k") == b"1"
    with pytest.raises(FileExistsError):
        Store("memory://m/a").create("k", b"2")
    assert Store("memory://m/b").sizes() == {}


def test_urls_are_told_from_paths():
    assert not is_url("folder/cache")
    assert path_of_url("file:///a%20b/c") == Path("/a b/c")
    assert path_of_url("s3://bucket/c") is None
    for url in ("ftp://host/x", "s3:///x", "file://host/x", "file://"):
        with pytest.raises(ConfigError, match=url):
            path_of_url(url)


def test_seconds_that_are_no_number_are_named(monkeypatch):
    for name in ("DFLASH_STORE_RETRY_S", "DFLASH_STORE_TIMEOUT_S"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "soon")
            with pytest.raises(ConfigError, match=f"{name}='soon'"):
                Store("memory://m/a")


def test_a_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'dflash-trainer\[remote\]'"):
        Store("s3://bucket/a")
