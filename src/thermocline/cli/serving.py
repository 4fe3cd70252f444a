"""Implementation of `thermocline export` and `thermocline serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.commands import step_or_tag
from thermocline.cli.progress_bar import progress
from thermocline.errors import ConfigError, NotFoundError
from thermocline.training.callbacks import Row
from thermocline.utils import atomic_file

if TYPE_CHECKING:
    from thermocline.serving import ServedRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `thermocline export`. None: see `publish_table`."""

    delta: bool = False
    precision: Any = None
    checkpoint: str | None = None
    min_norm: float | None = None
    max_rows: int | None = None
    min_frequency: int | None = None
    min_score: float | None = None
    formats: Any = None
    consumer: str | None = None

    @property
    def served(self) -> ServedRows | None:
        """The rule of the flags; None: no flag is given. Raises `ConfigError`."""
        from thermocline.config.publish import SERVED
        from thermocline.serving import ServedRows

        given = {name: value for name in SERVED if (value := getattr(self, name)) is not None}
        with usage_errors():
            return ServedRows(**given) if given else None


def export(run_dir: str, out: str, options: ExportOptions) -> Row:
    """Publish the rows of a trained run for serving."""
    from thermocline.distributed.launch import world_size
    from thermocline.serving import Publication
    from thermocline.training.publish import publish_table, with_coefficients
    from thermocline.training.run import Run
    from thermocline.training.run_dir import config_of
    from thermocline.training.scoring import scoring_files

    if world_size() > 1:
        raise ConfigError("export runs in one process, which reads the stores of all ranks: start it without torchrun")
    if options.consumer is not None and not options.delta:
        raise ConfigError("--consumer needs --delta: a base is the same for all consumers")
    served = options.served
    with usage_errors():  # before the run is opened
        Publication.check(out, delta=options.delta, precision=options.precision)
    atomic_file.make_writable(Path(out), "--out")
    with (
        atomic_file.disk_errors(out),
        Run.load(run_dir, checkpoint=step_or_tag(options.checkpoint), config=config_of(run_dir), labelled=False) as run,
        progress("exporting", None, "rows") as advance,
        _all_warnings(),
    ):
        if served is not None:
            served = with_coefficients(served, run.config.expiry)
            with usage_errors():
                served.check(run.table.spec.statistics.names)
        version = publish_table(
            run.table, out, step=run.step, delta=options.delta, precision=options.precision, served=served,
            event_time=run.event_time, formats=options.formats, files=scoring_files(run), consumer=options.consumer,
            advance=advance,
        )  # fmt: skip
    (table,) = version.tables
    return {
        "version": version.number, "kind": version.kind, "previous": version.previous, "step": version.step,
        "rows": table.rows, "deleted": table.deleted, "bytes": table.bytes,
    }  # fmt: skip


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Raise errors about the arguments as `ConfigError`: exit code 2."""
    try:
        yield
    except (NotFoundError, FileExistsError, NotADirectoryError, ValueError) as error:
        raise ConfigError(str(error)) from None


@contextlib.contextmanager
def _all_warnings() -> Iterator[None]:
    """Show each warning, also one that was shown before."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        yield


def serve(
    folder: str, *, host: str, port: int, metrics_port: int | None, token_file: Path | None, tls_cert: Path | None,
    tls_key: Path | None, poll: float, consumer: str | None, insecure: bool, score: bool, direct: bool,
) -> None:  # fmt: skip
    """Serve a publication until Ctrl-C or SIGTERM. `score` imports torch."""
    import signal

    from thermocline.serving.server import LookupServer

    local = host in ("127.0.0.1", "localhost", "::1")
    if not (local or insecure or (token_file is not None and tls_cert is not None)):
        raise ConfigError(
            f"--host {host} lets other machines connect: add --token-file, --tls-cert and --tls-key, or --insecure"
        )
    if not poll > 0:
        raise ConfigError(f"--poll is {poll}: it must be positive")
    for flag, number in (("--port", port), ("--metrics-port", metrics_port or 0)):
        if not 0 <= number < 1 << 16:
            raise ConfigError(f"{flag} is {number}: it must be 0 to 65535")
    token, tls = _token(token_file), _certificate(tls_cert, tls_key)
    options: dict[str, Any] = {
        "metrics_port": metrics_port,
        "poll_seconds": poll,
        "consumer": consumer,
        "direct": direct,
    }
    if score:
        from thermocline.training.scoring import Scorer

        options["scorer"] = Scorer(folder)
    with usage_errors():
        server = LookupServer(folder, host=host, port=port, token=token, tls=tls, **options)
    gc.collect()
    gc.freeze()  # collections during requests then skip the modules, which would take milliseconds
    with server:
        version = server.snapshot.version
        scheme = "grpc" if tls is None else "grpc+tls"
        metrics = "" if metrics_port is None else f", metrics at http://{host}:{server.metrics_port}/metrics"
        print(
            f"serving {folder}, version {version.number} (step {version.step}) at {scheme}://{host}:{server.port}"
            f"{metrics}{', scoring' if score else ''}",
            flush=True,
        )
        stopped: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: stopped.append(number))
        while not stopped:  # not an event: two signals in quick succession left its `wait` blocked for ever
            time.sleep(0.2)


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: it cannot be read as text ({error})") from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty: it must contain the token")
    return token


def _certificate(cert: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """Read a certificate chain and its key, and check that they fit: gRPC reports only that it cannot listen."""
    import ssl

    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key must be given together")
    if cert is None or key is None:
        return None
    for flag, file in (("--tls-cert", cert), ("--tls-key", key)):
        if not file.is_file():
            raise ConfigError(f"{flag} {file}: no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:
        cause = getattr(error, "reason", None) or error.strerror or "not PEM, or the key is encrypted"
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} must be a certificate chain and its private key, not encrypted, "
            f"both PEM ({cause})"
        ) from None
    return cert.read_bytes(), key.read_bytes()
