"""A server on loopback with the interface and the counters of vLLM or SGLang, which drafts by rule."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAMILIES = ("vllm", "sglang", "plain")


class Stub(ThreadingHTTPServer):
    """Every answer is `tokens` long: token n of it is (sum of the prompt + n) mod 200, plus 4.

    A pass accepts `len(prompt) % block` drafts, so that acceptance differs by length.
    """

    daemon_threads = True

    def __init__(self, family: str = "vllm", block: int = 4, tokens: int = 24, root: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.family, self.block, self.tokens, self.root = family, block, tokens, root
        self.lock = threading.Lock()
        self.drafts = self.accepted = self.under_way = self.most_under_way = 0
        self.by_position = [0] * (block - 1)
        self.gauge = 0.0
        self.bodies: list[dict] = []
        self.late: list[tuple[float, int, int]] = []
        """Counts that show up a moment after the answer, as in vLLM."""
        self.others = 0
        """Requests of others that are under way."""
        self.changed = False
        """Answers otherwise than the rule."""
        self.failing: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, prompt: list[int], limit: int) -> list[int]:
        """Token ids; counts the passes that they take."""
        count = min(self.tokens, limit)
        accepted = len(prompt) % self.block
        with self.lock:
            passes = -(-(count - 1) // (accepted + 1))
            self.late.append((time.monotonic() + 0.02, passes, accepted))
            self.gauge = accepted + 1.0
        ids = [(sum(prompt) + n) % 200 + 4 for n in range(count)]
        return [ids[0] + 1, *ids[1:]] if self.changed else ids

    def metrics(self) -> str:
        with self.lock:
            due = [entry for entry in self.late if entry[0] <= time.monotonic()]
            self.late = [entry for entry in self.late if entry[0] > time.monotonic()]
            for _, passes, accepted in due:
                self.drafts += passes
                self.accepted += passes * accepted
                for place in range(accepted):
                    self.by_position[place] += passes
        return {"vllm": self._vllm, "sglang": self._sglang, "plain": lambda: ""}[self.family]()

    def _vllm(self) -> str:
        halves = [(self.drafts - self.drafts // 2), self.drafts // 2]  # two engines
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
        for engine, drafts in enumerate(halves):
            labels = f'engine="{engine}",model_name="a,b}}"'
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts:.1f}",
                f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.796e+09",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafts * (self.block - 1)}",
            ]
        lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.accepted}')
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{engine="0",position="{n}"}} {count}' for n, count in enumerate(self.by_position)]
        return "\n".join(
            [*lines, f'vllm:num_requests_running{{engine="0"}} {self.others}', "no metric at all"]
        )

    def _sglang(self) -> str:
        labels = 'dp_rank="{}",model_name="m"'
        return "\n".join(
            [
                f"sglang:spec_accept_length{{{labels.format(0)}}} {self.gauge}",
                f"sglang:spec_accept_length{{{labels.format(1)}}} 0.0",
                f"sglang:num_running_reqs{{}} {self.others}",
            ]
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_args) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, self.server.metrics().encode())
        else:
            self._send(200, json.dumps({"data": [{"id": "stub", "root": self.server.root}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stub = self.server
        with stub.lock:
            stub.bodies.append(body)
            stub.under_way += 1
            stub.most_under_way = max(stub.most_under_way, stub.under_way)
        time.sleep(0.01)
        with stub.lock:
            stub.under_way -= 1
        if stub.failing:
            status, text = stub.failing
            self._send(status, text.encode())
            return
        ids = stub.answer(body["prompt"], body["max_tokens"])
        choice = {"text": " ".join(map(str, ids)), "finish_reason": "length"}
        if stub.family == "vllm" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        self._send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
