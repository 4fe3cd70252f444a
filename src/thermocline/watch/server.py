"""`WatchServer`: the live page of a run over HTTP, with server-sent events.

    /            the page; its style and scripts are /watch.css, /theme.js, /charts.js, /watch.js
    /events      state of the run as server-sent events: whole at first, then changes, once per second
    /state.json  whole state, once

Paths are looked up in a fixed table, never on disk. Only GET is answered. A server on a loopback address refuses
requests for other host names, so that a page of another site cannot read it by DNS rebinding.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.resources
import ipaddress
import json
import os
import socket
import threading
from http import HTTPStatus
from typing import Any

from thermocline.errors import ConfigError
from thermocline.watch.run_reader import RunReader

POLL_SECONDS = 1.0
MAX_STREAMS = 32
"""Pages that may be open at the same time."""
_KEEP_ALIVE = 15
"""Polls without a change after which a comment is sent, which detects closed connections."""
_ALWAYS_NEW = ("now", "disk", "points", "reset")
"""Parts of the state that differ between two polls although the run has no news."""
_FILES = {
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/theme.js": ("theme.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer:
    """Serves the page of one run until `close`. Thread safety: all methods may run on any thread."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """
        run_dir       folder of the run; it need not exist yet
        host          address to listen on
        port          0: a free port, see `port`
        poll_seconds  time between looks for news of the run
        """
        if os.path.exists(run_dir) and not os.path.isdir(run_dir):
            raise ConfigError(f"RUN is {os.fspath(run_dir)!r}: it must be the folder of a run (train.run_dir)")
        self._http = _listen(host, port)
        self._http.reader = RunReader(run_dir)
        self._http.poll_seconds = poll_seconds
        self._http.loopback = is_loopback(host)
        self.host = host
        self._thread = threading.Thread(target=self._http.serve_forever, name="thermocline-watch", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Port of the page."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """Address of the page."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/"

    def wait(self) -> None:
        """Block until `close`."""
        self._thread.join()

    def close(self) -> None:
        """End all streams and the threads."""
        self._http.ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> WatchServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    reader: RunReader
    poll_seconds: float
    loopback: bool

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.ended = threading.Event()
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a browser closes connections at any time."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _listen(host: str, port: int) -> _Server:
    try:
        return (_Server6 if ":" in host else _Server)((host, port), _Handler)
    except (OSError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {cause}; choose another port (0: a free one) or address"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version = "thermocline"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        if self.server.loopback and not is_loopback(_host_of(self.headers.get("Host", ""))):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is served to this machine only: use 127.0.0.1 or localhost")
            return
        path = self.path.partition("?")[0]
        if path == "/events":
            self._stream()
        elif path == "/state.json":
            self._send(json.dumps(self.server.reader.poll()[0]).encode(), "application/json")
        elif path in _FILES:
            name, kind = _FILES[path]
            self._send((importlib.resources.files("thermocline.watch") / name).read_bytes(), kind)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page; the page of the run is /")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer methods other than GET with 405 instead of 501."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered", Allow="GET")
        else:
            self._refuse(HTTPStatus(code), message or "")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _begin(self, code: HTTPStatus, kind: str, **headers: str) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, body: bytes, kind: str) -> None:
        self._begin(HTTPStatus.OK, kind, **{"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _refuse(self, code: HTTPStatus, message: str, **headers: str) -> None:
        self.close_connection = True
        body = f"{code.value} {message or code.phrase}\n".encode()
        self._begin(code, "text/plain; charset=utf-8", **{"Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self) -> None:
        server = self.server
        if not server.streams.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_STREAMS} pages are open: close one")
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream")
            self._send_events()
        finally:
            server.streams.release()

    def _send_events(self) -> None:
        server, seen, sent, quiet = self.server, (0, 0), "", 0
        with contextlib.suppress(OSError):  # the browser has closed the page
            while not server.ended.is_set():
                state, seen = server.reader.poll(seen)
                fixed = {name: value for name, value in state.items() if name not in _ALWAYS_NEW}
                compared = json.dumps(fixed)
                if compared != sent or state["points"]:
                    sent, quiet = compared, 0
                    self._write(f"data: {json.dumps(state)}\n\n")
                else:
                    quiet += 1
                    if quiet % _KEEP_ALIVE == 0:
                        self._write(": no change\n\n")
                server.ended.wait(server.poll_seconds)

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()


def _host_of(header: str) -> str:
    """Return the host of a Host header, without port and brackets."""
    host, _, port = header.rpartition(":")
    host = host if host and port.isdigit() else header
    return host.strip("[]")
