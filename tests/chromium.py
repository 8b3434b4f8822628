"""Headless Chromium over its DevTools protocol, through a pair of pipes: real keys, real clicks, no driver to install.

Knows nothing of our page. https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-default-apps", "--no-default-browser-check", "--hide-scrollbars", "--mute-audio",
    "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}
SHIFT = 8


def find_chromium() -> str | None:
    """The browser on this machine: CHROMIUM, or the first of the usual names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class PageError(Exception):
    """The page's own script failed, or an order to the browser did."""


class Browser:
    """One tab.

    problems   what its console and its policy complained about
    requests   addresses that it asked for
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._held, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.order("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.order("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.order(f"{domain}.enable")

    def order(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol, answered."""
        self._number += 1
        document = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            document["sessionId"] = self._session
        os.write(self._writes, json.dumps(document).encode() + b"\0")
        while True:
            message = self._message(30.0)
            if message.get("id") == self._number:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _message(self, patience_s: float) -> Any:
        ends = time.monotonic() + patience_s
        while b"\0" not in self._held:
            if not select.select([self._reads], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise TimeoutError("the browser says nothing")
            piece = os.read(self._reads, 2**20)
            if not piece:
                raise PageError("the browser has ended")
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, message: Any) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"].get("exception", told["exceptionDetails"])))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.problems.append(str(told["args"]))

    def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self.order("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of some JavaScript."""
        found = self.order("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise PageError(f"{expression}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def wait(self, condition: str, patience_s: float = 20.0) -> None:
        """Return once it holds."""
        ends = time.monotonic() + patience_s
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > ends:
                raise TimeoutError(f"never so: {condition}")
            time.sleep(0.02)

    def press(self, key: str, shift: bool = False) -> None:
        """A key of KEYS."""
        named: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        named["modifiers"] = SHIFT if shift else 0
        text = {"text": "\r"} if key == "Enter" else {}
        self.order("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.order("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.order("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element that matches."""
        script = f"""(() => {{ const found = document.querySelector({json.dumps(selector)});
            found.scrollIntoView({{block: "nearest"}}); const box = found.getClientRects()[0];
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        x, y = self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.order("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """The window's, in CSS pixels."""
        self.order(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self.order("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, file: Path) -> None:
        """What is seen, as PNG."""
        file.write_bytes(base64.b64decode(self.order("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing(executable: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, until the block ends."""
    its_reads, our_writes = os.pipe()
    our_reads, its_writes = os.pipe()
    # the browser reads orders from 3 and writes to 4
    shell = f'exec "$@" 3<&{its_reads} 4>&{its_writes}'
    command = ["bash", "-c", shell, "-", executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, pass_fds=(its_reads, its_writes), stderr=subprocess.DEVNULL)
    os.close(its_reads)
    os.close(its_writes)
    try:
        yield Browser(our_reads, our_writes)
    finally:
        os.close(our_writes)
        os.close(our_reads)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
