"""`connect`: lookups in a `LookupServer` over the network."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

from thermocline.arrays import Floats, as_keys
from thermocline.errors import ThermoclineError
from thermocline.serving.snapshot import Missing


def connect(
    location: str, *, token: str | None = None, root_certificates: bytes | None = None, timeout: float | None = 10.0
) -> Client:
    """Connect to a server. `location`: grpc://HOST:PORT, or grpc+tls://HOST:PORT with `root_certificates` (PEM)."""
    return Client(location, token=token, root_certificates=root_certificates, timeout=timeout)


class Client:
    """Thread safety: all methods may run concurrently. A call that takes longer than `timeout` seconds raises."""

    def __init__(
        self, location: str, *, token: str | None, root_certificates: bytes | None, timeout: float | None
    ) -> None:
        if not location.startswith(("grpc://", "grpc+tcp://", "grpc+tls://")):
            raise ValueError(f"location is {location!r}: it must be grpc://HOST:PORT or grpc+tls://HOST:PORT")
        self._client = flight.FlightClient(location, tls_root_certs=root_certificates)
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._options = flight.FlightCallOptions(timeout=timeout, headers=headers)

    def lookup(self, keys: Any, *, table: str | None = None, missing: Missing = "initial") -> Floats:
        """See `Snapshot.lookup`. Raises `ThermoclineError` with the server's message."""
        return self.find(keys, table=table, missing=missing)[0]

    def find(
        self, keys: Any, *, table: str | None = None, missing: Missing = "initial"
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """See `Snapshot.find`."""
        command = json.dumps({"table": table, "missing": missing}).encode()
        ticket = flight.Ticket(command + b"\n" + as_keys(keys).astype("<u8", copy=False).tobytes())
        with _server_errors():
            answer = self._client.do_get(ticket, self._options).read_chunk().data
        rows = answer.column("row")
        values = rows.values.to_numpy(zero_copy_only=True).reshape(len(rows), rows.type.list_size)
        return values, answer.column("found").to_numpy(zero_copy_only=False)

    def score(self, examples: pa.RecordBatch | pa.Table) -> Floats:
        """Return float32[n]: the probability of each example, at most 65,536. The server must run with `--score`.

        The columns are those of the training data, in any order; the label is not needed.
        """
        if isinstance(examples, pa.Table):
            columns = [pa.concat_arrays(c.chunks) if c.chunks else pa.array([], c.type) for c in examples.columns]
            examples = pa.record_batch(columns, schema=examples.schema)
        scores: Floats = self._exchange({"score": True}, examples).column("probability").to_numpy()
        return scores

    def _exchange(self, command: dict[str, Any], batch: pa.RecordBatch) -> Any:
        """Send one batch and return the answer."""
        descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
        with _server_errors():
            writer, reader = self._client.do_exchange(descriptor, self._options)
            with writer:
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
                return reader.read_chunk().data

    def action(self, name: str) -> bytes:
        """Return the answer of an action: health, version or metrics."""
        with _server_errors():
            return b"".join(result.body.to_pybytes() for result in self._client.do_action(name, self._options))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, StopIteration) as error:
        first = str(error).splitlines()[0] if str(error) else "the server closed the connection"
        raise ThermoclineError(re.split(r"\. (?:Detail: |gRPC client debug context)", first)[0]) from None
