"""Shared by all tests: no network, one torch thread, a tiny target built from a config."""

from __future__ import annotations

import gc
import os
import socket

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Numbers are compared bit for bit, and GPUs are not for that: only `make cuda-test` lets the tests see them.
if "DFLASH_CUDA_TESTS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from object_store import Proxy, environment, google_environment, make_bucket, proxy, s3_server

from dflash import store

if TYPE_CHECKING:
    import torch

_connect = socket.socket.connect


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays: nobody needs to look for cycles in a million objects again.

    Ranks that are forked later do not have their pages copied for it either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _loopback_only(self: socket.socket, address: object) -> None:
    if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
        raise AssertionError(f"a test tried to reach {address[0]}: tests use no network")
    _connect(self, address)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _loopback_only)


@pytest.fixture(autouse=True)
def _no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests write many small files; flushing each to the disk would take much of their time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# A GPU compiles first; what torch warns of there nobody has seen yet.
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")],
)


def _device(name: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU is visible: run `make cuda-test` on a machine with one and torch built for CUDA")
    if name == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return torch.device(name)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU, and with `make cuda-test` a GPU; what runs uses it by itself too."""
    return _device(request.param, monkeypatch)


@pytest.fixture(params=[CUDA])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, for what there is on none else."""
    return _device(request.param, monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def _little_padding() -> Iterator[None]:
    """Micro-batches of tests hold a few dozen rows and blocks; nearly all of what is computed was padding."""
    from dflash.train import padding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "ON_CPU", padding.Multiples(64, 16))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_launcher() -> Iterator[None]:
    """Ranks that tests fork have no launcher, for which the one that failed would have to end first."""
    from dflash import board

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "_ECHO_S", 0.1)
        yield


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Port of an S3 server on loopback, one for the session."""
    with s3_server() as port:
        yield port


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy that can be told to fail, before an S3 server; mirrors are in `tmp_path`."""
    with proxy(s3_port) as server:
        for name, value in environment(server.server_address[1]).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path / "mirrors"))
        monkeypatch.setattr(store, "RETRY_S", 15.0)
        monkeypatch.setattr(store, "TIMEOUT_S", 0.5)
        yield server


@pytest.fixture
def bucket(s3_port: int, s3: Proxy) -> str:
    """URL of a new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    make_bucket(s3_port, name)
    return f"s3://{name}"


@pytest.fixture(params=["s3", "gs"])
def anywhere(request: pytest.FixtureRequest, bucket: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new bucket, by each scheme of a network's store."""
    for name, value in google_environment(s3.server_address[1]).items():
        monkeypatch.setenv(name, value)
    return bucket.replace("s3://", f"{request.param}://")
