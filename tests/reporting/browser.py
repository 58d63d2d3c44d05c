"""A headless Chromium, driven by the DevTools protocol over a pipe: JSON texts with a NUL behind each."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
Event = dict[str, Any]


def binary() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab. `events` are those of the page since the last `go`."""

    def __init__(self, folder: Path) -> None:
        (theirs, ours), (mine, yours) = os.pipe(), os.pipe()
        # Above 4, so that neither is overwritten before it is copied.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs, yours)]

        def as_3_and_4() -> None:  # where Chromium reads and writes
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)

        command = [str(binary()), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            command, preexec_fn=as_3_and_4, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (theirs, yours, *ends):
            os.close(end)
        from_us, from_them = ours, mine
        self.write, self.read = os.fdopen(from_us, "wb"), os.fdopen(from_them, "rb")
        self.buffer, self.number, self.session = b"", 0, ""
        self.events: list[Event] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and wait for its answer; events that come before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        self.write.flush()
        answer = self._until(lambda found: found.get("id") == self.number)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def go(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.events = []
        self.call("Page.navigate", url=url)
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._until(lambda found: found.get("method") == "Page.loadEventFired")

    def look(self, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Set the width of the window, the colour scheme, and screen or print."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def close(self) -> None:
        self.session = ""
        self.call("Browser.close")
        self.process.wait()
        self.write.close()
        self.read.close()

    def _until(self, right: Callable[[Event], bool]) -> Event:
        while True:
            while b"\0" not in self.buffer:
                more = os.read(self.read.fileno(), 2**16)
                assert more, f"the browser ended with {self.process.wait()}"
                self.buffer += more
            text, _, self.buffer = self.buffer.partition(b"\0")
            found: Event = json.loads(text)
            if "method" in found:
                self.events.append(found)
            if right(found):
                return found
