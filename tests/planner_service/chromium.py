"""Chromium without a window, led through its debugging pipe: JSON messages, a null character after each."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
LOWEST_FD = 10
STARTED = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""The browser reads what it is asked from 3 and answers on 4."""


def found() -> str | None:
    """The browser's program; None where none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page of the browser. `complaints` is what it logged: refused by a policy, failed to load, thrown."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._messages = 0
        self._session: str | None = None
        self._loads = 0
        self.complaints: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def show(self, address: str, *, width: int = 1280, dark: bool = False) -> None:
        """Goes to an address, on a screen so many points wide, and waits until all of it is loaded."""
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self._ask("Emulation.setEmulatedMedia", features=theme)
        before = self._loads
        self._ask("Page.navigate", url=address)
        self.wait_for_load(before)

    @property
    def loads(self) -> int:
        """How many pages were loaded so far."""
        return self._loads

    def wait_for_load(self, before: int) -> None:
        """Waits until more pages were loaded than `before`."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._loads <= before:
            self._note(self._message(deadline_s))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise ValueError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Presses and lets go of a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._messages += 1
        request = {"id": self._messages, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            message = self._message(deadline_s)
            if message.get("id") == request["id"]:
                if "error" in message:
                    raise ValueError(f"{method}: {message['error']}")
                answer: dict[str, Any] = message["result"]
                return answer
            self._note(message)

    def _message(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            self._buffer += os.read(self._from, 1 << 16)
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Page.loadEventFired":
                self._loads += 1
            case "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(message["params"]["entry"]))


@contextmanager
def browsing(program: str, folder: Path) -> Iterator[Tab]:
    """A tab of a browser that ends with the block; it keeps what it keeps in the folder."""
    for_browser, to_browser = os.pipe()
    from_browser, of_browser = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, LOWEST_FD) for fd in (for_browser, of_browser)]
    command = [sys.executable, "-c", STARTED, *map(str, high), program, *OPTIONS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(command, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for fd in (*high, for_browser, of_browser):
        os.close(fd)
    try:
        yield Tab(to_browser, from_browser)
    finally:
        with suppress(OSError):
            os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
