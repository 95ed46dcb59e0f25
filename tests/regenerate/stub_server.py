"""An OpenAI-compatible server on loopback that answers by rule, and fails as it is told."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub(ThreadingHTTPServer):
    """Answers `echo of <last user turn>`; `faults` has the chance of each kind, drawn for every request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, faults: dict[str, float] | None = None, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults, self.random = faults or {}, random.Random(seed)
        self.lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        """How often each last user turn was asked."""
        self.met: Counter[str] = Counter()
        """How often each fault happened."""
        self.bodies: list[dict] = []
        self.under_way = self.most_under_way = 0
        self.special: dict[str, dict] = {}
        """Choices that are given instead, by last user turn."""
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self) -> str | None:
        with self.lock:
            for name, chance in self.faults.items():
                if self.random.random() < chance:
                    self.met[name] += 1
                    return name
        return None

    def handle_error(self, request, client_address) -> None:
        """Clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_args) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if not self._failed():
            self._send(200, {"data": [{"id": "stub-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub = self.server
        with stub.lock:
            stub.under_way += 1
            stub.most_under_way = max(stub.most_under_way, stub.under_way)
            stub.bodies.append(body)
        try:
            time.sleep(stub.delay)
            if not self._failed():
                self._answer(body)
        finally:
            with stub.lock:
                stub.under_way -= 1

    def _answer(self, body: dict) -> None:
        chat = "messages" in body
        asked = body["messages"][-1]["content"] if chat else str(body["prompt"][-3:])
        with self.server.lock:
            self.server.seen[asked] += 1
        turns = sum(message["role"] == "assistant" for message in body["messages"]) if chat else 0
        text = f"echo {turns} of {asked}"
        choice = {"finish_reason": "stop"} | ({"message": {"content": text}} if chat else {"text": text})
        special = self.server.special.get(asked, {})
        if "status" in special:
            self._send(special["status"], {"error": "no"})
            return
        self._send(200, {"choices": [choice | special], "usage": {"completion_tokens": 4}})

    def _failed(self) -> bool:
        fault = self.server.fault()
        if fault is None:
            return False
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close_connection = True
            self.connection.close()
        elif fault == "truncated":
            data = b'{"choices": [{"message": {"content": "ec'
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + 50))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True
        elif fault == "malformed":
            self._send(200, {"choices": []})
        elif fault == "slow":
            time.sleep(1.0)
            self.close_connection = True
        else:
            self._send(int(fault), {"error": "injected"}, {"Retry-After": "0.01"})
        return True

    def _send(self, status: int, value: dict, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


def started(faults: dict[str, float] | None = None) -> Stub:
    """A stub that serves in a thread; the caller shuts it down."""
    stub = Stub(faults)
    threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return stub
