"""A headless Chromium, driven over its debugging pipe: no driver program and no WebSocket in between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 300.0


def find_browser() -> str | None:
    """The program; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a headless browser. A context manager.

    problems  what the page's console said as a warning or an error, and exceptions that nobody caught
    """

    def __init__(self, program: str, profile: Path) -> None:
        """profile: a folder of its own."""
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "about:blank",
        ]

        def as_3_and_4() -> None:
            os.dup2(to_read, 30)
            os.dup2(to_write, 31)
            os.dup2(30, 3)
            os.dup2(31, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=as_3_and_4, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._next, self._held, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError where it throws."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until an expression is true."""
        until = time.monotonic() + WAIT_S
        while not self.run(f"!!({script})"):
            if time.monotonic() > until:
                raise TimeoutError(f"not true within {WAIT_S:g} s: {script}; the page says {self.run('document.body.innerText')!r}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of an element, which must be what lies there."""
        at = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}), r = e.getBoundingClientRect(), x = r.x + r.width / 2, "
            "y = r.y + r.height / 2; return e.contains(document.elementFromPoint(x, y)) ? [x, y] : null; })()"
        )
        assert at, f"{selector} cannot be clicked: something covers it, or it is out of sight"
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1)

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)

    def press_enter(self, *, shift: bool = False) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Of the window, and the colours that the user's system asks for."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def close(self) -> None:
        for pipe in (self._to, self._from):
            os.close(pipe)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        message = {"id": self._next, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.problems.append(params["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error"):
            self.problems.append(str([arg.get("value") for arg in params["args"]]))
