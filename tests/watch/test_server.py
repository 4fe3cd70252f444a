"""`WatchServer` and `thermocline watch`: fixed paths, GET only, loopback, streams."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import helpers.watched_run as watched
import pytest
from helpers.cli import invoke, start

from thermocline.watch.server import WatchServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    watched.write(tmp_path / "run", 4)
    (tmp_path / "secret.txt").write_text("secret")
    with WatchServer(tmp_path / "run", poll_seconds=0.02) as made:
        yield made


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_and_its_files_need_nothing_else(server: WatchServer) -> None:
    for path, kind in (("/", "html"), ("/watch.css", "css"), ("/watch.js", "javascript"), ("/charts.js", "javascript")):
        status, headers, body = ask(server, path)
        assert (status, kind in headers["Content-Type"]) == (200, True)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        for word in (b"https://", b"@import", b"innerHTML", b"eval("):
            assert word not in body
    status, _, body = ask(server, "/state.json?x=1")
    assert (status, json.loads(body)["name"]) == (200, "run")


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt", "/metrics.jsonl", "//etc/passwd", "/watch.css/", "x"],
)
def test_other_paths_are_not_found(server: WatchServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert status == 404
    assert b"secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW"])
def test_only_get_is_answered(server: WatchServer, method: str) -> None:
    status, headers, _ = ask(server, "/", method)
    assert (status, headers["Allow"]) == (405, "GET")


def test_other_host_names_are_refused(server: WatchServer) -> None:
    """A page of another site may resolve its own name to 127.0.0.1."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80", ""):
        assert ask(server, "/state.json", Host=host)[0] == 403, host
    for host in ("localhost", f"localhost:{server.port}", "127.0.0.1", "[::1]:8816"):
        assert ask(server, "/state.json", Host=host)[0] == 200, host


def test_events_are_the_whole_state_and_then_changes(server: WatchServer, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{server.url}events", timeout=20) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        first = json.loads(stream.readline().removeprefix(b"data: "))
        assert (first["reset"], len(first["points"])) == (True, 5)
        watched.append(tmp_path / "run", watched.train_row(50))
        while True:
            line = stream.readline()
            if line.startswith(b"data: "):
                state = json.loads(line.removeprefix(b"data: "))
                if state["points"]:
                    break
        assert (state["reset"], [point["step"] for point in state["points"]]) == (False, [50])


def test_the_number_of_streams_is_limited(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = server._http.streams
    taken = 0
    while streams.acquire(blocking=False):
        taken += 1
    assert ask(server, "/events")[0] == 503
    for _ in range(taken):
        streams.release()
    with urllib.request.urlopen(f"{server.url}events", timeout=20) as stream:
        assert stream.status == 200


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    process = start("watch", tmp_path / "none", "--port", 0)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "watching" in line
    assert "nothing has been trained there yet" in line
    url = line.split(" at ")[1].split(" ")[0].rstrip(";")
    with urllib.request.urlopen(f"{url}state.json", timeout=20) as answer:
        assert json.load(answer)["state"] == "waiting"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_wrong_arguments_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, text in (
            ([file], "it must be the folder of a run"),
            ([tmp_path, "--port", port], f"cannot listen on --host 127.0.0.1 --port {port}: Address already in use"),
            ([tmp_path, "--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines read the figures"),
        ):
            result = invoke("watch", *words)
            assert result.exit_code == 2
            assert text in result.stderr
            assert result.stderr.count("\n") == 1
