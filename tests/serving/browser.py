"""A headless Chromium, spoken to over two pipes in its DevTools protocol; no port is opened."""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from typing_extensions import Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# A container's root has no sandbox to offer; the page is ours, and has a policy of its own.
FLAGS = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-dev-shm-usage"
_ERRORS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


def chromium() -> str:
    """The browser's program: `$CHROMIUM`, or one that is installed."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM", ""), *NAMES))), None)
    if found is None:
        pytest.fail("no Chromium; `make serving-test` installs it (tests/serving/setup_browser.sh)")
    return found


class Browser:
    """One tab; what goes wrong in it is kept in `events`.

    Args:
        profile: An empty folder.
    """

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # it reads commands from file 3 and answers on file 4, each message ending in a zero byte
        words = [chromium(), *FLAGS.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        line = f"exec {shlex.join([*words, 'about:blank'])} 3<&{to_browser} 4>&{from_browser}"
        log = (profile.parent / "chromium.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                ["bash", "-c", line], pass_fds=(to_browser, from_browser), stdout=log, stderr=log
            )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{part}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not self.seen("Page.loadEventFired"):
            self.events.append(self._message())
        self.call("Runtime.evaluate", expression="1")

    def seen(self, *methods: str) -> list[dict[str, Any]]:
        """Events of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def problems(self) -> list[dict[str, Any]]:
        """Script errors, messages to the console, and what the browser itself complains about."""
        self.call("Runtime.evaluate", expression="1")  # what was reported before has come now
        return self.seen(*_ERRORS)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self, *, width: int, height: int = 900, scheme: str = "light", phone: bool = False) -> None:
        """What the reader looks at it with."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36, "Enter": 13}[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """A picture of the page as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def _message(self, timeout: float = 60) -> dict[str, Any]:
        until = time.monotonic() + timeout
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0))
            assert ready, f"Chromium has not answered for {timeout} s"
            data = os.read(self._in, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
