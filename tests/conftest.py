"""Shared by all tests: no network, one torch thread, a tiny target built from a config."""

from __future__ import annotations

import os
import socket

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest

_connect = socket.socket.connect


def _loopback_only(self: socket.socket, address: object) -> None:
    if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
        raise AssertionError(f"a test tried to reach {address[0]}: tests use no network")
    _connect(self, address)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _loopback_only)
