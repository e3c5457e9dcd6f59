"""Headless Chromium, driven by a pipe: pages with a phone's width, a dark theme, a pointer."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """A page of a running Chromium (DevTools protocol)."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb")
        self._count, self._rest, self._session = 0, b"", ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._answers.fileno(), 2**16)
            assert more, "chromium ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, page: Path, width: int, *, dark: bool = False, script: bool = True) -> None:
        """Opens a page at a width in CSS pixels, and waits until it is complete."""
        phone = width < 640
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[theme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not script)
        self.ask("Page.navigate", url=page.as_uri())
        while self.value("document.readyState") != "complete":
            pass

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        """Presses or releases the left button."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def shot(self, png: Path) -> Path:
        """Writes a picture of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        png.write_bytes(base64.b64decode(shot["data"]))
        return png


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    (theirs_in, commands), (answers, theirs_out) = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = [str(CHROMIUM), *QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", script, "chromium", *command],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(commands, answers)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
