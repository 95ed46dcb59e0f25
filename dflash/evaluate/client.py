"""Asking an OpenAI-compatible server (vLLM, SGLang) for completions of token ids, and for its counters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
from typing_extensions import Self

from dflash.errors import ServerError
from dflash.evaluate.counters import Counters, parse_counters

SETTLE_S = 0.3
"""Seconds between two readings that must be equal: a server counts its last pass after it has answered."""
_READINGS = 20


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt."""

    text: str
    tokens: int
    """How many it took."""
    ids: tuple[int, ...] | None
    """They themselves, where the server gives them."""

    def same(self, other: Reply) -> bool:
        """Whether two replies are equal, token for token where both have tokens."""
        if self.ids is not None and other.ids is not None:
            return self.ids == other.ids
        return self.text == other.text


class Client:
    """One server; a context manager that closes its connections.

    Args:
        url: With or without `/v1`.
        concurrency: Requests under way at once.
        timeout: Seconds without an answer before the evaluation fails.

    Raises:
        ServerError: the server does not answer, or serves no model.
    """

    def __init__(self, url: str, concurrency: int, timeout: float) -> None:
        self.url, self._concurrency = url.rstrip("/").removesuffix("/v1"), concurrency
        key = os.environ.get("OPENAI_API_KEY")
        self._http = httpx2.Client(
            timeout=httpx2.Timeout(timeout, connect=min(timeout, 30.0)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=concurrency + 1),
            trust_env=False,  # a server of this network is not reached through a proxy of the environment
        )
        model = self._read("GET", "/v1/models", lambda response: response.json()["data"][0])
        self.model, self.root = str(model["id"]), str(model.get("root") or model["id"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._http.close()

    def complete(self, prompts: Sequence[list[int]], sampling: dict[str, Any]) -> tuple[list[Reply], float]:
        """Replies in the order of the prompts, and the seconds that all together took.

        Raises:
            ServerError: one of them failed.
        """
        started = time.perf_counter()
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="eval") as pool:
            asked = [pool.submit(self._complete, prompt, sampling) for prompt in prompts]
            try:
                replies = [future.result() for future in asked]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return replies, time.perf_counter() - started

    def _complete(self, prompt: list[int], sampling: dict[str, Any]) -> Reply:
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, **sampling}
        return self._read("POST", "/v1/completions", _reply, body)  # type: ignore[no-any-return]

    def counters(self) -> Counters:
        """A reading of `/metrics`.

        Raises:
            ServerError: the server has none.
        """
        return self._read("GET", "/metrics", lambda response: parse_counters(response.text))  # type: ignore[no-any-return]

    def settled(self) -> Counters:
        """A reading that no longer changes."""
        last = self.counters()
        for _ in range(_READINGS):
            time.sleep(SETTLE_S)
            now = self.counters()
            if now == last:
                break
            last = now
        return last

    def _read(
        self, method: str, path: str, read: Callable[[Any], Any], body: dict[str, Any] | None = None
    ) -> Any:
        try:
            response = self._http.request(method, f"{self.url}{path}", json=body)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise ServerError(
                f"{self.url}{path}: no answer ({type(error).__name__}: {error}); is the server up?"
            ) from error
        if response.status_code != 200:
            said = " ".join(response.text.split())[:300]
            raise ServerError(f"{self.url}{path}: status {response.status_code}: {said}")
        try:
            return read(response)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url}{path}: not the answer of such a server ({error!r})") from error


def _reply(response: Any) -> Reply:
    value = response.json()
    choice = value["choices"][0]
    ids = choice.get("token_ids")
    return Reply(
        str(choice["text"]),
        int(value["usage"]["completion_tokens"]),
        None if ids is None else tuple(map(int, ids)),
    )
