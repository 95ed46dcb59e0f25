"""An S3 server on loopback, and a proxy before it that fails the way stores and networks do."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

import pytest

from dflash.cache import claim

FAULTS = ("busy", "hang", "truncate", "drop", "lose answer")
"""503; no answer in time; half a body; the connection closed before and after the work is done."""
HANG_S = 0.7
_ANY_KEY = (
    "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
_SERVER = """
import logging, sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
logging.getLogger("werkzeug").setLevel(logging.ERROR)
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def s3_server() -> Iterator[int]:
    """An S3 server of moto in a process of its own; yields its port."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the S3 server, unless it is told otherwise.

    Attributes:
        fault: Given method and path, the fault of this request, or None.
        away: Whether nobody answers at all, as when the server has been killed.
        requests: How often each `METHOD key` was asked for.
    """

    daemon_threads = True

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.reset()

    def reset(self) -> None:
        self.fault: Callable[[str, str], str | None] = lambda _method, _path: None
        self.away = False
        self.requests: Counter[str] = Counter()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that have given up are no news."""

    def once(self, *faults: str, method: str = "") -> None:
        """The next requests of this method fail like this, one after another."""
        left = list(faults)
        self.fault = lambda asked, _path: left.pop(0) if left and method in asked else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_args: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.path.partition("?")[0]
        self.server.requests[f"{self.command} {key}"] += 1
        fault = "drop" if self.server.away else self.server.fault(self.command, key)
        if fault == "busy":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "hang":
            time.sleep(HANG_S)
        if fault in {"hang", "drop"}:
            self.close_connection = True
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=30)
        try:
            behind.request(self.command, *_for_s3(self.path, body, self.headers))
            answer = behind.getresponse()
            data = answer.read()
        finally:
            behind.close()
        if fault == "lose answer":
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("x-goog-generation", "1")  # clients of Google's want one, those of S3 do not look
        for name, value in answer.getheaders():
            if name.lower() not in {"transfer-encoding", "connection", "content-length", "server", "date"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if fault == "truncate":
            self.close_connection = True
            data = data[: len(data) // 2]
        self.wfile.write(data)


def _for_s3(path: str, body: bytes, headers: Message) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of a request to S3, which Google's XML interface differs from in little more.

    Its clients have other headers for conditions and credentials, and write "/" and "-" as %2F and %2D.
    """
    passed = {name.lower(): value for name, value in headers.items()}
    if not passed.get("authorization", "").startswith("Bearer "):
        return path, body, passed
    passed["authorization"] = _ANY_KEY
    if (generation := passed.pop("x-goog-if-generation-match", None)) is not None:
        assert generation == "0"  # where there is none
        passed["if-none-match"] = "*"
    place, mark, query = path.partition("?")
    return quote(unquote(place)) + mark + query, body, passed


for _method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
    setattr(_Handler, f"do_{_method}", _Handler._serve)


@contextmanager
def proxy(behind: int) -> Iterator[Proxy]:
    server = Proxy(behind)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def writers_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is so late that whoever has not released a cache in a store counts as dead."""
    monkeypatch.setattr(claim, "time", SimpleNamespace(time=lambda: time.time() + claim.EXPIRY_S))


def make_bucket(port: int, name: str) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def google_environment(port: int) -> dict[str, str]:
    """What a user sets to reach a server that speaks as Google's does."""
    return {
        "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_BEARER_TOKEN": "token",
        "NO_PROXY": os.environ.get("NO_PROXY", "127.0.0.1"),
    }


def environment(port: int) -> dict[str, str]:
    """What a user sets to reach an S3 server of their own."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": os.environ.get("NO_PROXY", "127.0.0.1"),
    }
