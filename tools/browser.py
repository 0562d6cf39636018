"""A headless Chromium that is told what to do over a pipe: for tests of a page, and for pictures of it.

Speaks the DevTools protocol (JSON, each message ended by a zero byte) on the file descriptors 3 and 4 of the
browser; needs no driver, no port and no package. `tools/fetch_browser.py` fetches the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from typing_extensions import Self

FOLDER = Path(sys.prefix) / "chromium"  # where `./run setup` puts it
PATIENCE_S = 60
FLAGS = (
    "--headless=shell",
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-ipc-flooding-protection",  # a test changes the address more often than a person
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)

# The same letters on every machine: the browser's own, and those of matplotlib for what these lack.
FONTS = """<?xml version="1.0"?>
<fontconfig>
 <dir>{browser}</dir><dir>{matplotlib}</dir>
 <alias><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
 <alias><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
 <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


class Browser:
    """One browser with one page. Ends with the `with` block; every call raises RuntimeError if it fails."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.events: list[dict[str, Any]] = []  # of the protocol, in order
        self._profile = tempfile.TemporaryDirectory()
        fonts = Path(self._profile.name) / "fonts.conf"
        fonts.write_text(FONTS.format(browser=folder / "fonts", matplotlib=_matplotlib_fonts()))
        self._answers = b""
        self._num_calls = 0
        self._session: str | None = None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # A shell puts the pipes where the browser looks for them; the duplicates cannot be 3 or 4 themselves.
        ends = [os.dup(to_browser) + 100, os.dup(from_browser) + 100]
        for source, end in zip((to_browser, from_browser), ends, strict=True):
            os.dup2(source, end)
        program = [str(folder / "chromium"), *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "browser", *program],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(folder / "lib"),
                "FONTCONFIG_FILE": str(fonts),
            },
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._read)
            os.close(self._write)
            self._profile.cleanup()

    def open(self, url: str, width: int = 1240, height: int = 900) -> None:
        """Load a page and wait for its `load` event."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        for address in ("about:blank", url):  # else an address that differs in its fragment loads nothing
            before = len(self.events)
            self.call("Page.navigate", url=address)
            while not any(event["method"] == "Page.loadEventFired" for event in self.events[before:]):
                self.events.append(self._message())

    def evaluate(self, code: str) -> Any:
        """The value of a JavaScript expression, awaited; raises RuntimeError for an exception in it."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def press(self, key: str, key_code: int) -> None:
        """A key, such as ArrowRight and 39, on the element that has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=key_code)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def requests(self) -> list[str]:
        """Addresses of everything that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions and entries of the log."""
        return [e for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One call of the protocol, answered."""
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._num_calls:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._answers:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                raise RuntimeError("the browser has ended" if ready else "the browser does not answer")
            self._answers += chunk
        first, self._answers = self._answers.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message


def _matplotlib_fonts() -> Path:
    found = find_spec("matplotlib")
    assert found is not None and found.origin is not None, "matplotlib comes with `./run setup`"
    return Path(found.origin).parent / "mpl-data" / "fonts" / "ttf"
