"""Headless Chromium, driven by its debugging protocol over two pipes; standard library only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ABSENT = "no Chromium found: `make test` installs it where it can (apt-get, as root)"
NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 60.0  # seconds
MIN_TEXT_PIXELS = 11.0


def find() -> str | None:
    """Return the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `events` collects events of the page: errors, console messages, network requests."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._wait(lambda answer: answer.get("id") == number)

    def open(self, page: Path | str, *, width: int, dark: bool) -> None:
        """Open a file or an address in a window of the given width, in light or dark mode."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._wait(lambda answer: answer.get("method") == "Page.loadEventFired")

    def value(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page; return its value as JSON."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return the value of a JavaScript expression as soon as it is true."""
        end = time.monotonic() + TIMEOUT
        while not (value := self.value(condition)):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)
        return value

    def _wait(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while True:
            while b"\0" in self._buffer:
                text, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    assert "error" not in message, message
                    return dict(message.get("result", message))
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "the browser timed out"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser exited"
            self._buffer += piece


@contextlib.contextmanager
def started(program: str, profile: Path) -> Iterator[Browser]:
    """Run the browser for the duration of the block."""
    (browser_in, out), (into, browser_out) = os.pipe(), os.pipe()
    options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
    options += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]

    def descriptors() -> None:
        """Move the pipes to descriptors 3 and 4, as the protocol requires; copies avoid overwriting one another."""
        spare = [os.dup(browser_in), os.dup(browser_out)]
        os.dup2(spare[0], 3)
        os.dup2(spare[1], 4)

    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen([program, *options], pass_fds=(3, 4), preexec_fn=descriptors, **silent)
    os.close(browser_in)
    os.close(browser_out)
    try:
        yield Browser(into, out)
    finally:
        os.close(out)  # closing the pipe ends the browser
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(into)


# ---- checks of a page


def page_errors(tab: Browser, origin: str = "file:") -> list[str]:
    """Return script errors, console messages and requests to other places than `origin`."""
    errors = []
    for event in tab.events:
        method, params = event["method"], event["params"]
        if method == "Runtime.exceptionThrown" or method == "Runtime.consoleAPICalled":
            errors.append(str(params))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith((origin, "data:")):
            errors.append(params["request"]["url"])
    return errors


# Every text with its size in pixels; texts outside the window or their figure; texts that overlap.
MEASURE = """(() => {
  const texts = [], outside = [], overlaps = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("title")) continue;
    const svg = element.closest("svg");
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    texts.push([parseFloat(getComputedStyle(element).fontSize) * scale, node.data.trim().slice(0, 40)]);
    const box = element.getBoundingClientRect();
    if (!element.closest(".scroll") && (box.left < 0 || box.right > innerWidth + 0.5)) outside.push(node.data.trim());
  }
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [name, b] of boxes)
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1) outside.push(name);
    for (let i = 0; i < boxes.length; i++)
      for (let j = 0; j < i; j++) {
        const [a, b] = [boxes[i][1], boxes[j][1]];
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 2 && down > 4) overlaps.push([boxes[i][0], boxes[j][0]]);
      }
  }
  return {texts, outside, overlaps, wide: document.documentElement.scrollWidth, window: innerWidth};
})()"""


def check_readable(tab: Browser, width: int, *, origin: str = "file:", texts: int = 150) -> None:
    """Assert that the page has no errors, no small text, no overflow and no overlapping text."""
    assert page_errors(tab, origin) == []
    measured = tab.value(MEASURE)
    assert measured["window"] == width
    assert measured["wide"] <= width  # only tables scroll horizontally
    assert measured["outside"] == []
    assert measured["overlaps"] == []
    assert len(measured["texts"]) > texts
    assert [(size, text) for size, text in measured["texts"] if size < MIN_TEXT_PIXELS] == []


# Contrast between the relative luminance (WCAG) of a text or mark and that of its background.
CONTRAST = """(() => {
  const light = c => {
    const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
      v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(", 0)") && c !== "transparent") return c;
  } return "rgb(255,255,255)"; };
  return [...document.querySelectorAll("p,h1,h2,h3,td,th,li,strong,figcaption,svg text,SVG_MARKS")].map(e => {
    const style = getComputedStyle(e), svg = e.closest("svg");
    const paint = svg ? (style.fill !== "none" ? style.fill : style.stroke) : style.color;
    const [a, b] = [light(paint), light(behind(svg ? svg.parentElement : e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + " " + e.getAttribute("class")];
  });
})()"""


def contrasts(tab: Browser, marks: str) -> list[tuple[float, str]]:
    """Return contrast and element of every text, and of the SVG elements that the selector `marks` finds."""
    found = tab.value(CONTRAST.replace("SVG_MARKS", marks))
    return [(ratio, name) for ratio, name in found]
