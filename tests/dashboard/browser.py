"""A real browser, steered over pipes by Chromium's own protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

REQUIRED = "DILOCO_BROWSER_TESTS"
"""Variable that is set where a test without a browser fails, as in `.ci/run`."""
AXE = Path(__file__).parents[2] / ".pytest_cache" / "axe.min.js"
"""axe-core of npm, which `.ci/browser` puts there."""
ANSWER_S = 30.0
LOOK_S = 0.1
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Path of Chromium; skips the test, or fails it, where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    return _missing("Chromium", "apt-get install chromium")


def find_axe() -> str:
    """axe-core's text; likewise."""
    return AXE.read_text() if AXE.exists() else _missing("axe-core", "bash .ci/browser")


def _missing(what: str, remedy: str) -> str:
    text = f"{what} is missing: {remedy}"
    if os.environ.get(REQUIRED):
        pytest.fail(text)
    pytest.skip(text)


class Browser:
    """Chromium with one page at a time; a context manager."""

    def __init__(self, profile: Path) -> None:
        """profile: an empty folder for what it writes."""
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        """Events since the last `open`."""
        self._session = ""
        command = [
            find_chromium(),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--disable-background-networking"),
            *("--hide-scrollbars", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
        ]
        theirs_in, self._mouth = os.pipe()
        self._ears, theirs_out = os.pipe()
        # It reads from 3 and writes to 4.
        moved = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "_", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close", browser=True)
        try:
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._mouth)
            os.close(self._ears)

    def open(self, url: str, width: int, height: int, scheme: str) -> None:
        """Open a page in a new tab of that size in CSS pixels, light or dark."""
        self.events = []
        made = self.call("Target.createTarget", browser=True, url="about:blank")
        attached = self.call(
            "Target.attachToTarget",
            browser=True,
            targetId=made["targetId"],
            flatten=True,
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.size(width, height)
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int) -> None:
        """Give the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; promises are waited for."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + ANSWER_S
        while not self.value(expression):
            assert time.monotonic() < deadline, (expression, self.troubles())
            time.sleep(LOOK_S)

    def key(self, key: str) -> None:
        """Press a key such as `l` or `ArrowUp`."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13}.get(key, 0)
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **extra,
            )

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is seen, or of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def troubles(self) -> list[str]:
        """Errors and warnings of the console, and exceptions, since `open`."""
        self.value("1")  # What was told before has been read after this.
        found = []
        for event in self.events:
            about = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(str(about["exceptionDetails"]))
                case "Log.entryAdded" if about["entry"]["level"] in (
                    "error",
                    "warning",
                ):
                    found.append(about["entry"]["text"])
                case "Runtime.consoleAPICalled" if about["type"] in (
                    "error",
                    "warning",
                ):
                    found.append(str(about["args"]))
        return found

    def requested(self) -> list[str]:
        """Addresses that were asked for since `open`."""
        self.value("1")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def call(self, method: str, *, browser: bool = False, **parameters: Any) -> Any:
        """Call a method of the page, or of the browser; return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if not browser:
            message["sessionId"] = self._session
        os.write(self._mouth, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == number:
                assert "error" not in told, (method, told["error"])
                return told["result"]
            if "method" in told and told.get("sessionId") == self._session:
                self.events.append(told)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._ears], [], [], max(0.0, left))
            block = os.read(self._ears, 1 << 20) if ready else b""
            assert block, "the browser does not answer"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found
