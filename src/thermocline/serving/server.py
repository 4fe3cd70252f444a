"""`LookupServer`: lookups in a publication over Arrow Flight (gRPC). `client.py` is the Python client.

A lookup is one `do_get` whose ticket is the command `{"table": ..., "missing": ...}`, a line feed and the keys, 8 bytes
each, little-endian. The answer is one record batch with `row` (fixed-size list of float32) and `found` (bool).
A `do_exchange` stream with the same command takes record batches with a column `key` (uint64), and answers each one in
order; it costs a few messages more. With the command `{"score": true}` its batches have the columns of the training
data, and the answers a column `probability` (float32). Actions: `health`, `version` (JSON), `metrics` (Prometheus).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hmac
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import prometheus_client
import pyarrow as pa
import pyarrow.flight as flight
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from thermocline.arrays import Floats
from thermocline.errors import ThermoclineError
from thermocline.serving.snapshot import Snapshot, State, find

MAX_KEYS = 1 << 20
"""Keys of one record batch: bounds the memory of a request."""
MAX_EXAMPLES = 1 << 16
"""Examples of one record batch to score."""
_MAX_SHOWN, _MAX_ERROR_TEXT = 200, 2000
"""Bytes of a command in an error, and characters of an error: gRPC drops an answer whose error has more than 16 KB."""


class Score(Protocol):
    """Scores examples with the dense model of a version (`training/scoring.py`)."""

    def __call__(self, state: State, table: Any) -> Floats:
        """Return float32[rows of the Arrow table]: probabilities."""

    def load(self, state: State) -> None:
        """Load the dense model of a version. Raises if it has none."""


class LookupServer:
    """Serves a publication until `close`. Thread safety: all methods may run on any thread."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: tuple[bytes, bytes] | None = None,
        poll_seconds: float = 0.2,
        metrics_port: int | None = None,
        consumer: str | None = None,
        direct: bool = False,
        scorer: Score | None = None,
    ) -> None:
        """
        port          0: a free port, see `port`
        token         clients must send the header `authorization: Bearer TOKEN`
        tls           certificate chain and private key, PEM
        poll_seconds  time between looks for a new version
        direct        read rows past the page cache, see `serving.open`
        scorer        scores examples; None: lookups only
        metrics_port  also serve the metrics over HTTP at /metrics; 0: a free port
        """
        self.snapshot = Snapshot(path, consumer=consumer, direct=direct)
        if scorer is not None:
            scorer.load(self.snapshot.state)
        self._metrics = _Metrics(self.snapshot)
        scheme = "grpc+tcp" if tls is None else "grpc+tls"
        try:
            self._flight = _Flight(
                self.snapshot,
                self._metrics,
                scorer,
                location=f"{scheme}://{host}:{port}",
                middleware={} if token is None else {"token": _RequireToken(token)},
                auth_handler=None if token is None else _NoHandshake(),
                tls_certificates=None if tls is None else [tls],
            )
        except pa.ArrowException as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from None
        self._http: tuple[Any, threading.Thread] | None = None
        try:
            if metrics_port is not None:
                self._http = prometheus_client.start_http_server(metrics_port, host, self._metrics.registry)
        except BaseException:
            self._flight.shutdown()
            raise
        self.snapshot.follow(poll_seconds)

    @property
    def port(self) -> int:
        """Port of the Flight service."""
        return int(self._flight.port)

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics over HTTP."""
        return None if self._http is None else int(self._http[0].server_port)

    def wait(self) -> None:
        """Block until `close`."""
        self._flight.wait()

    def close(self) -> None:
        """End all requests and the threads."""
        self._flight.shutdown()
        if self._http is not None:
            server, thread = self._http
            server.shutdown()
            server.server_close()
            thread.join()
            self._http = None
        self.snapshot.close()

    def __enter__(self) -> LookupServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, snapshot: Snapshot, metrics: _Metrics, scorer: Score | None, **options: Any) -> None:
        super().__init__(**options)
        self._scorer = scorer
        self._snapshot = snapshot
        self._metrics = metrics
        self._failures = _Failures(metrics)

    def do_get(self, context: Any, ticket: Any) -> Any:
        with self._failures:
            start = time.perf_counter()
            text, _, data = ticket.ticket.partition(b"\n")
            command = _parse(text)
            if command.score:
                raise ValueError("a ticket is for lookups: score with do_exchange")
            if len(data) % 8:
                raise ValueError(f"the ticket has {len(data)} bytes of keys: it must have 8 per key")
            batch, items, found = self._look_up(command, np.frombuffer(data, "<u8"))
            self._metrics.count(command, items, found, time.perf_counter() - start)
            return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(batch.schema, [batch]))

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with self._failures:
            command = _parse(descriptor.command)
            begun = False
            for chunk in reader:
                start = time.perf_counter()
                batch, items, found = self._answer(command, chunk.data)
                if not begun:
                    writer.begin(batch.schema)
                    begun = True
                writer.write_batch(batch)
                self._metrics.count(command, items, found, time.perf_counter() - start)

    def _answer(self, command: _Command, request: Any) -> tuple[Any, int, int]:
        """Return the answer to a batch, its number of keys or examples, and the number of keys with a row."""
        if request is not None:
            request.validate(full=command.score)  # Arrow has not compared lengths and offsets with the buffers
        if not command.score:
            return self._look_up(command, _keys(request))
        state = self._snapshot.state
        if self._scorer is None:
            raise ValueError("this server does not score: start it with --score")
        if request is None or request.num_rows > MAX_EXAMPLES:
            raise ValueError(f"a request to score must have at most {MAX_EXAMPLES} rows: send several batches")
        scores = self._scorer(state, pa.Table.from_batches([request]))
        schema = pa.schema([("probability", pa.float32())], metadata={"version": str(state.version.number)})
        return pa.record_batch([pa.array(scores)], schema=schema), len(scores), 0

    def _look_up(self, command: _Command, keys: Any) -> tuple[Any, int, int]:
        if len(keys) > MAX_KEYS:
            raise ValueError(f"{len(keys)} keys in one batch: at most {MAX_KEYS}; send several batches")
        state = self._snapshot.state
        rows, found = find(state, keys, command.table, command.missing)
        return _as_batch(rows, found, state.version.number), len(keys), int(found.sum())

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        version = self._snapshot.version
        if action.type == "health":
            error = self._snapshot.error
            status = {"status": "ok" if error is None else "stale", "version": version.number}
            yield json.dumps(status if error is None else {**status, "error": str(error)}).encode()
        elif action.type == "version":
            yield version.to_json()
        elif action.type == "metrics":
            yield prometheus_client.generate_latest(self._metrics.registry)
        else:
            raise flight.FlightServerError(f"no action {action.type!r}: it must be health, version or metrics")

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [("health", "status and version"), ("version", "manifest"), ("metrics", "Prometheus text")]


class _Failures:
    """Counts failed requests, and raises errors as those of Flight: of others, pyarrow sends the traceback.

    Stateless, so that all requests use one: a context of `contextlib` costs more than the rest of a small request.
    """

    def __init__(self, metrics: _Metrics) -> None:
        self._metrics = metrics

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        self._metrics.count_error()
        if isinstance(error, (KeyError, ValueError, ThermoclineError, pa.ArrowException)) and not isinstance(
            error, flight.FlightError
        ):
            text = str(error.args[0]) if error.args else type(error).__name__
            raise flight.FlightServerError(text[:_MAX_ERROR_TEXT]) from None
        if isinstance(error, Exception) and not isinstance(error, flight.FlightError):
            traceback.print_exception(error)
            raise flight.FlightInternalError(
                f"{type(error).__name__} in the server: its log has the traceback"
            ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    """The command of an exchange: a lookup, or scoring."""

    table: str | None = None
    missing: Any = "initial"
    score: bool = False

    @classmethod
    def parse(cls, text: bytes | None) -> _Command:
        try:
            command = cls(**json.loads(text or b"{}"))
            valid = command.table is None or isinstance(command.table, str)
            if not valid or command.missing not in ("initial", "zero", "error") or not isinstance(command.score, bool):
                raise ValueError("it must have table (text), missing (initial, zero or error) and score (bool) only")
        except (ValueError, TypeError, RecursionError) as error:
            shown = repr((text or b"")[:_MAX_SHOWN]) + ("..." if len(text or b"") > _MAX_SHOWN else "")
            raise ValueError(f"command {shown}: {error}") from None
        return command


_parse_again = functools.lru_cache(maxsize=256)(_Command.parse)


def _parse(text: bytes | None) -> _Command:
    """Parse a command. Short ones are kept: clients send few different ones, again and again."""
    return _Command.parse(text) if text is None or len(text) > _MAX_SHOWN else _parse_again(text)


def _keys(batch: Any) -> Any:
    if batch is None or batch.schema.names != ["key"] or batch.schema.field("key").type != pa.uint64():
        raise ValueError("a request must have one column, key, of uint64")
    column = batch.column("key")
    if column.null_count:
        raise ValueError("the column key has nulls")
    return column.to_numpy(zero_copy_only=True)


def _as_batch(rows: Any, found: Any, version: int) -> Any:
    schema = _schema(rows.shape[1], version)
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=schema.field(0).type)
    return pa.RecordBatch.from_arrays([values, pa.array(found)], schema=schema)


@functools.lru_cache(maxsize=64)
def _schema(dim: int, version: int) -> Any:
    row = pa.list_(pa.float32(), dim)
    return pa.schema([("row", row), ("found", pa.bool_())], metadata={"version": str(version)})


class _RequireToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Any) -> None:
        given = (headers.get("authorization") or [""])[0]
        given = given.encode() if isinstance(given, str) else given
        if not hmac.compare_digest(given, self._expected):
            raise flight.FlightUnauthenticatedError("wrong or missing token")


class _NoHandshake(flight.ServerAuthHandler):  # type: ignore[misc]
    """The header is checked by `_RequireToken`; Flight's own handshake is not used."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        raise flight.FlightUnauthenticatedError("send the header authorization: Bearer TOKEN")

    def is_valid(self, token: bytes) -> bytes:
        return b""


class _Metrics(Collector):
    """Metrics of the server. A request takes one lock; Prometheus' own counters and histogram would take five."""

    _BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()  # protects all that follow
        self._keys = self._found = self._errors = self._examples = 0
        self._seconds = 0.0
        self._batches = [0] * (len(self._BUCKETS) + 1)  # by bucket of their time
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(self)

    def count(self, command: _Command, items: int, found: int, seconds: float) -> None:
        """Count a batch of keys, or of examples."""
        bucket = bisect.bisect_left(self._BUCKETS, seconds)
        with self._lock:
            self._batches[bucket] += 1
            self._seconds += seconds
            if command.score:
                self._examples += items
            else:
                self._keys += items
                self._found += found

    def count_error(self) -> None:
        with self._lock:
            self._errors += 1

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, each at its present value."""
        version = self._snapshot.version
        with self._lock:
            counters = (
                ("lookup_keys", "Keys looked up", self._keys),
                ("lookup_found", "Keys with a row", self._found),
                ("lookup_errors", "Requests that failed", self._errors),
                ("scored_examples", "Examples scored", self._examples),
            )
            batches, seconds = list(itertools.accumulate(self._batches)), self._seconds
        for name, text, value in counters:
            yield CounterMetricFamily(f"thermocline_{name}", text, value=value)
        bounds = [*map(str, self._BUCKETS), "+Inf"]
        buckets = list(zip(bounds, batches, strict=True))
        yield HistogramMetricFamily("thermocline_lookup_seconds", "Time of a batch", buckets=buckets, sum_value=seconds)
        for name, text, gauge in (
            ("version", "Version in use", version.number),
            ("step", "Training steps of the version in use", version.step),
            ("stale", "1: a newer version could not be read", self._snapshot.error is not None),
            ("version_age_seconds", "Time since the version was made", time.time() - version.created_time),
        ):
            yield GaugeMetricFamily(f"thermocline_{name}", text, value=gauge)
