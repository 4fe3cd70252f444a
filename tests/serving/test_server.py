"""The Flight server: results, versions, bad requests, tokens, TLS, vanishing clients, metrics."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import prometheus_client
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from typer.testing import CliRunner

from thermocline import serving
from thermocline.cli.main import app
from thermocline.errors import ThermoclineError
from thermocline.serving import Publication, TableRows, sort_by_hash
from thermocline.serving.server import MAX_KEYS, LookupServer, _Command, _Metrics

DIM = 3


def rows_of(version: int) -> TableRows:
    keys = np.arange(1000, dtype=np.uint64)
    rows = np.full((1000, DIM), version, np.float32) + keys[:, None].astype(np.float32)
    return TableRows(name="t", dim=DIM, rows=sort_by_hash([(keys, rows)]), initial=(1, 0.5))


@pytest.fixture
def publication(tmp_path: Path) -> Iterator[Publication]:
    with Publication(tmp_path / "served") as publication:
        publication.publish_base([rows_of(0)], step=0)
        yield publication


@pytest.fixture
def server(publication: Publication) -> Iterator[LookupServer]:
    with LookupServer(publication.path, poll_seconds=0.02, metrics_port=0) as server:
        yield server


def test_lookups_equal_those_of_the_snapshot_and_follow_versions(
    publication: Publication, server: LookupServer
) -> None:
    keys = np.random.default_rng(0).integers(0, 1500, 2000).astype(np.uint64)
    with serving.connect(f"grpc://127.0.0.1:{server.port}") as client:
        rows, found = client.find(keys)
        expected, known = serving.open(publication.path).find(keys)
        assert rows.tobytes() == expected.tobytes()
        assert found.tolist() == known.tolist() == (keys < 1000).tolist()
        assert client.lookup([], table="t").shape == (0, DIM)
        publication.publish_delta([rows_of(7)], step=1)
        for _ in range(1000):
            if client.lookup([5])[0, 0] == 12:
                break
            threading.Event().wait(0.01)
        assert client.lookup([5]).tolist() == [[12, 12, 12]]
        assert json.loads(client.action("health")) == {"status": "ok", "version": 2}
        assert json.loads(client.action("version"))["step"] == 1


def test_bad_requests_are_errors_and_the_server_goes_on(server: LookupServer) -> None:
    location = f"grpc://127.0.0.1:{server.port}"
    with serving.connect(location) as client:
        with pytest.raises(ThermoclineError, match="no table 'x'"):
            client.lookup([1], table="x")
        with pytest.raises(ThermoclineError, match=r"^1 of 1 keys have no row, first 5000$"):
            client.lookup([5000], missing="error")
        with pytest.raises(ThermoclineError, match="at most"):
            client.lookup(np.zeros(MAX_KEYS + 1, np.uint64))
        with pytest.raises(ThermoclineError, match=r"^no action 'x': it must be health, version or metrics$"):
            client.action("x")
        with pytest.raises(ValueError, match="location is 'localhost:1'"):
            serving.connect("localhost:1")
        raw = flight.FlightClient(location)
        requests = [
            (b"{", pa.record_batch([pa.array([1], pa.uint64())], names=["key"])),
            (b'{"tables": 1}', pa.record_batch([pa.array([1], pa.uint64())], names=["key"])),
            (b"[]", pa.record_batch([pa.array([1], pa.uint64())], names=["key"])),
            (b"{}", pa.record_batch([pa.array(["a"])], names=["key"])),
            (b"{}", pa.record_batch([pa.array([1, None], pa.uint64())], names=["key"])),
            (b"{}", pa.record_batch([pa.array([1], pa.uint64())], names=["id"])),
        ]
        for command, batch in requests:
            writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
            with pytest.raises(flight.FlightServerError) as failure:  # noqa: PT012
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
                reader.read_chunk()
            assert "Traceback" not in str(failure.value)  # a client of any language gets the message only
        without_line_feed, no_table = bytes(10**6), b'{"table": "%s"}\n' % (b"x" * 10**6)
        tickets = (b"{", b'{"score": true}\n', b"{}\n1234567", b'{"missing": "x"}\n', b"[" * 10**5)
        for ticket in (*tickets, without_line_feed, no_table):
            with pytest.raises(flight.FlightServerError) as failure:
                raw.do_get(flight.Ticket(ticket)).read_chunk()
            assert "Traceback" not in str(failure.value)
        assert raw.do_get(flight.Ticket(b"")).read_chunk().data.num_rows == 0
        assert client.lookup([3]).tolist() == [[3, 3, 3]]
        with pytest.raises(flight.FlightError, match="no action 'y'") as failure:
            list(raw.do_action("y"))
        assert "Traceback" not in str(failure.value)
        text = client.action("metrics").decode()
    assert "thermocline_lookup_errors_total 16.0" in text
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
        assert "thermocline_version 1.0" in page.read().decode()


def test_metrics_equal_those_of_prometheus_own_classes(publication: Publication) -> None:
    times = [0.0, 1e-4, 1.0000001e-4, 3e-3, 0.1, 0.5, 1.0, 7.0]
    with serving.open(publication.path) as snapshot:
        metrics = _Metrics(snapshot)
        for seconds in times:
            metrics.count(_Command(), 10, 9, seconds)
        metrics.count(_Command(score=True), 5, 0, 0.0)
        metrics.count_error()
        lines = prometheus_client.generate_latest(metrics.registry).decode().splitlines()
    registry = prometheus_client.CollectorRegistry()
    options = {"namespace": "thermocline", "registry": registry}
    for name, text, value in (
        ("lookup_keys", "Keys looked up", 80),
        ("lookup_found", "Keys with a row", 72),
        ("lookup_errors", "Requests that failed", 1),
        ("scored_examples", "Examples scored", 5),
    ):
        prometheus_client.Counter(name, text, **options).inc(value)
    histogram = prometheus_client.Histogram("lookup_seconds", "Time of a batch", buckets=_Metrics._BUCKETS, **options)
    for seconds in (*times, 0.0):
        histogram.observe(seconds)
    expected = prometheus_client.generate_latest(registry).decode().splitlines()
    assert [line for line in expected if "_created" not in line] == lines[: len(lines) - 4 * 3]
    assert {"thermocline_version 1.0", "thermocline_step 0.0", "thermocline_stale 0.0"} <= set(lines)


def test_exchanges_and_tickets_have_the_answers_of_the_snapshot(server: LookupServer) -> None:
    location, rng = f"grpc://127.0.0.1:{server.port}", np.random.default_rng(0)
    raw = flight.FlightClient(location)
    with serving.connect(location) as client:
        writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b'{"missing": "zero"}'))
        for turn, count in enumerate((1, 0, 1000, MAX_KEYS)):
            keys = rng.integers(0, 2000, count).astype(np.uint64)
            rows, found = server.snapshot.find(keys, missing="zero")
            assert not found.all() or count < 2
            batch = pa.record_batch([pa.array(keys)], names=["key"])
            if turn == 0:
                writer.begin(batch.schema)
            writer.write_batch(batch)
            answer = reader.read_chunk().data
            assert answer.schema.metadata == {b"version": b"1"}
            assert np.array_equal(answer.column("row").values.to_numpy().reshape(rows.shape), rows)
            assert answer.column("found").to_pylist() == found.tolist()
            got, has = client.find(keys, missing="zero")
            assert np.array_equal(got, rows)
            assert has.tolist() == found.tolist()
        writer.close()


@pytest.mark.parametrize("score", [False, True])
def test_messages_with_wrong_sizes_are_refused_before_they_are_read(server: LookupServer, score: bool) -> None:
    """Arrow checks neither lengths nor offsets of a message that it receives: the server would read other memory."""
    column = pa.array(["abc", "def"]) if score else pa.array(np.arange(1000, dtype=np.uint64) + 7)
    good = pa.record_batch([column], names=["user" if score else "key"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, good.schema) as writer:
        writer.write_batch(good)
    before, after = (b"\3\0\0\0\6\0\0\0", b"\3\0\0\0\0\0\x10\0") if score else (
        (1000).to_bytes(8, "little"), (1_000_000).to_bytes(8, "little")
    )  # fmt: skip
    forged = sink.getvalue().to_pybytes().replace(before, after, 1 if score else 2)
    batch = pa.ipc.open_stream(forged).read_next_batch()
    server._flight._scorer = lambda state, table: np.zeros(table.num_rows, np.float32)
    with pytest.raises(pa.ArrowInvalid, match=r"too small|out of bounds"):
        server._flight._answer(_Command(score=score), batch)
    server._flight._answer(_Command(score=score), good)


def test_clients_that_vanish_or_are_slow_do_not_stop_others(server: LookupServer) -> None:
    location = f"grpc://127.0.0.1:{server.port}"
    batch = pa.record_batch([pa.array(np.arange(1000, dtype=np.uint64))], names=["key"])
    idle = []
    for i in range(8):
        raw = flight.FlightClient(location)
        writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b"{}"))
        writer.begin(batch.schema)
        writer.write_batch(batch)
        if i % 2:
            raw.close()
            del writer, reader
        else:
            idle.append((raw, writer, reader))
    with serving.connect(location) as client:
        for _ in range(20):
            assert client.lookup([3]).tolist() == [[3, 3, 3]]
    for _, _, reader in idle:
        assert reader.read_chunk().data.num_rows == 1000


@pytest.mark.parametrize("exchange", [False, True])
def test_a_client_that_reads_its_answer_slowly_does_not_block_others(server: LookupServer, exchange: bool) -> None:
    """Answers of 13 MB, which their clients do not read, are more than the connection buffers."""
    location = f"grpc://127.0.0.1:{server.port}"
    keys = np.arange(MAX_KEYS, dtype=np.uint64) % np.uint64(1000)
    batch = pa.record_batch([pa.array(keys)], names=["key"])
    slow = []
    for _ in range(12):  # more than the threads that gRPC starts with
        raw = flight.FlightClient(location)
        if exchange:
            writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b"{}"))
            writer.begin(batch.schema)
            writer.write_batch(batch)
            writer.done_writing()
        else:
            writer, reader = None, raw.do_get(flight.Ticket(b"{}\n" + keys.tobytes()))
        slow.append((raw, writer, reader))
    with serving.connect(location) as client:
        for _ in range(20):
            assert client.lookup([3]).tolist() == [[3, 3, 3]]
        if exchange:  # counted when it is written
            assert f"lookup_keys_total {20.0}" in client.action("metrics").decode()
    for _, _, reader in slow:
        rows = reader.read_chunk().data.column("row").values.to_numpy().reshape(-1, DIM)
        assert np.array_equal(rows[:, 0], keys.astype(np.float32))


def test_wrong_tokens_are_refused(publication: Publication) -> None:
    with LookupServer(publication.path, token="secret") as server:
        location = f"grpc://127.0.0.1:{server.port}"
        for token in (None, "", "Secret", "secret2"):
            with serving.connect(location, token=token) as client:
                with pytest.raises(ThermoclineError, match="token"):
                    client.lookup([1])
                with pytest.raises(ThermoclineError, match="token"):
                    client.action("health")
        with serving.connect(location, token="secret") as client:
            assert client.lookup([1]).tolist() == [[1, 1, 1]]


def test_tls(publication: Publication, tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    name = ["-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run([*command, *files, *name], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl on this machine: a certificate cannot be made")
    cert, key = (tmp_path / "cert.pem").read_bytes(), (tmp_path / "key.pem").read_bytes()
    with LookupServer(publication.path, host="localhost", token="secret", tls=(cert, key)) as server:
        location = f"grpc+tls://localhost:{server.port}"
        with serving.connect(location, token="secret", root_certificates=cert) as client:
            assert client.lookup([1]).tolist() == [[1, 1, 1]]
        with (
            serving.connect(f"grpc://localhost:{server.port}", token="secret", timeout=5) as client,
            pytest.raises(ThermoclineError),
        ):
            client.lookup([1])


def test_command_serves_until_a_signal_and_refuses_an_open_port_without_a_token(
    publication: Publication, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "thermocline", "serve", str(publication.path)]
    refused = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--token-file" in refused.stderr
    (tmp_path / "token").write_text("secret\n")
    with subprocess.Popen(
        [*command, "--port", "0", "--token-file", str(tmp_path / "token")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"version 1 \(step 0\) at (grpc://127.0.0.1:\d+)", line)
        assert match is not None, line
        with serving.connect(match[1], token="secret") as client:
            assert client.lookup([2]).tolist() == [[2, 2, 2]]
        for number in (signal.SIGINT, signal.SIGTERM):  # the second one may arrive while the first is handled
            process.send_signal(number)
        assert process.wait(20) == 0


def test_command_reports_usage_errors_with_exit_code_2(publication: Publication, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    served = str(publication.path)
    for arguments, text in [
        ([str(tmp_path / "folder")], "has no published version"),
        ([str(tmp_path / "missing")], "has no published version"),
        ([str(tmp_path / "run")], f"it is the folder of a run: `thermocline export {tmp_path / 'run'} --out FOLDER`"),
        ([served, "--consumer", "a/b"], "consumer is 'a/b'"),
        ([served, "--port", "70000"], "--port is 70000"),
        ([served, "--token-file", str(tmp_path / "folder")], "--token-file"),
        ([served, "--tls-cert", str(tmp_path / "file")], "must be given together"),
        ([served, "--tls-cert", str(tmp_path / "file"), "--tls-key", str(tmp_path / "file")], "must be a certificate"),
    ]:
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 2, (arguments, result.stderr)
        assert text in result.stderr
        assert len(result.stderr.splitlines()) == 1
