"""An OpenAI-compatible server (vLLM, SGLang, ...) answers; what fails for a while is asked again."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2

from dflash.errors import ServerError
from dflash.extract.conversation import Message
from dflash.regenerate.answers import Answer
from dflash.regenerate.config import THINKING, RegenerateConfig

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""Status codes of failures that may pass."""
_FATAL = {401, 403, 404}
"""Status codes that the next prompt would get too."""


class RequestFailed(Exception):  # noqa: N818 - a verdict on one request, not an error of the run
    """A request that was refused or failed too often; its text says why.

    Args:
        reason: What became of the last attempt.
        for_good: Whether asking again is of no use.
    """

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


class RateLimit:
    """At most so many requests a second, spread evenly; None for no limit."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait for this request's turn."""
        if not self._gap:
            return
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._gap
        time.sleep(max(turn - time.monotonic(), 0.0))


class Server:
    """One server; safe to use from several threads.

    Args:
        config: How to ask.
        stopping: Whether the run is about to stop: then nothing is asked again.
        render: Turns as a prompt of token ids, for the completions interface.

    Raises:
        ServerError: the server does not answer, or serves no model.
    """

    def __init__(
        self,
        config: RegenerateConfig,
        stopping: Callable[[], bool] = lambda: False,
        render: Callable[[list[Message]], list[int]] | None = None,
    ) -> None:
        assert config.server is not None  # `run` decides who answers
        self.config, self._stopping, self._render = config, stopping, render
        self.base = config.server.rstrip("/").removesuffix("/v1") + "/v1"
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(config.timeout, connect=min(config.timeout, 30.0)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=config.concurrency + 1),
            # A server on this machine or in this network is not reached through a proxy of the environment.
            trust_env=False,
        )
        self._limit, self._given_up = RateLimit(config.rate_limit), threading.Event()
        try:
            self.model = config.model or self._first_model()
        except BaseException:
            self.close()
            raise

    def give_up(self) -> None:
        """Ask nothing any more: who waits to ask, or to ask again, fails."""
        self._given_up.set()

    def close(self) -> None:
        """Close its connections, once nobody asks."""
        self.give_up()
        self._client.close()

    def answer(self, messages: list[Message]) -> Answer:
        """The next assistant turn.

        Raises:
            RequestFailed: this prompt cannot be answered.
            ServerError: no prompt can.
        """
        chat = self.config.api == "chat"
        body = self._body() | ({"messages": messages} if chat else {"prompt": self._prompt(messages)})
        value = self._asked("POST", "/chat/completions" if chat else "/completions", body, _checked)
        return _answer(value, chat=chat)

    def _prompt(self, messages: list[Message]) -> list[int]:
        assert self._render is not None  # the configuration asks for a tokenizer
        return self._render(messages)

    def _body(self) -> dict[str, Any]:
        c = self.config
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": c.max_new_tokens,
            "temperature": c.temperature,
            "seed": c.seed,
        }
        body |= {name: value for name, value in (("top_p", c.top_p), ("top_k", c.top_k)) if value is not None}
        thinking = THINKING[c.thinking]
        if thinking is not None and c.api == "chat":
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return body

    def _first_model(self) -> str:
        def check(value: Any) -> None:
            value["data"][0]["id"]

        try:
            return str(self._asked("GET", "/models", None, check)["data"][0]["id"])
        except RequestFailed as error:
            raise ServerError(
                f"--server {self.config.server}: {error}; check the address, and that the server is up"
            ) from error

    def _asked(
        self, method: str, path: str, body: dict[str, Any] | None, check: Callable[[Any], None]
    ) -> Any:
        """The JSON of a whole answer, after as many attempts as it takes."""
        outcome: Any = "the run is over"
        for attempt in range(self.config.retries + 1):
            if self._given_up.is_set():
                break
            self._limit.wait()
            outcome, delay = self._attempt(method, path, body, check)
            if not isinstance(outcome, str):
                return outcome
            if attempt == self.config.retries or self._stopping():
                break
            # Exponential back-off with full jitter, so that many clients do not come back at once.
            backoff = min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S) * random.uniform(0.5, 1.0)
            self._given_up.wait(max(delay, backoff))
        raise RequestFailed(outcome)

    def _attempt(
        self, method: str, path: str, body: dict[str, Any] | None, check: Callable[[Any], None]
    ) -> tuple[Any, float]:
        """The answer's JSON, or as text why there is none; and how many seconds the server asks for."""
        try:
            response = self._client.request(method, f"{self.base}{path}", json=body)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            return f"no answer ({type(error).__name__}: {error})", 0.0
        reason = f"status {response.status_code}: {response.text.strip()[:200]}"
        if response.status_code in _FATAL:
            raise ServerError(f"--server {self.config.server}{path}: {reason}")
        if response.status_code in _PASSING:
            return reason, _retry_after(response)
        if response.status_code != 200:
            raise RequestFailed(reason, for_good=True)
        try:
            value = response.json()
            check(value)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return f"an answer that is cut off or malformed ({error!r})", 0.0
        return value, 0.0


def _checked(value: Any) -> None:
    """Refuse an answer that lacks what is read from it."""
    choice = value["choices"][0]
    message = choice.get("message")
    if message is None and not isinstance(choice["text"], str):
        raise TypeError("choices[0].text is no text")


def _answer(value: Any, *, chat: bool) -> Answer:
    choice = value["choices"][0]
    finish = choice.get("finish_reason")
    said = choice["message"] if chat else {"content": choice["text"]}
    return Answer(
        said.get("content") or "",
        int((value.get("usage") or {}).get("completion_tokens") or 0),
        truncated=finish == "length",
        reasoning=said.get("reasoning_content") or said.get("reasoning"),
        filtered=finish == "content_filter" or bool(said.get("refusal")),
    )


def _retry_after(response: Any) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", "0")), 0.0), LONGEST_DELAY_S)
    except ValueError:
        return 0.0
