"""Implementation of `thermocline watch`."""

from __future__ import annotations

import contextlib

from thermocline.errors import ConfigError
from thermocline.watch.run_reader import RunReader
from thermocline.watch.server import WatchServer, is_loopback


def watch(run_dir: str, *, host: str, port: int, insecure: bool) -> None:
    """Serve the page of a run until Ctrl-C."""
    if not (is_loopback(host) or insecure):
        raise ConfigError(
            f"--host {host} lets other machines read the figures of the run without a password: keep 127.0.0.1 and "
            f"use a tunnel (ssh -L {port}:127.0.0.1:{port} MACHINE), or add --insecure"
        )
    with WatchServer(run_dir, host=host, port=port) as server, contextlib.suppress(KeyboardInterrupt):
        state = RunReader(run_dir).poll()[0]
        note = " (nothing has been trained there yet; the page waits)" if state["state"] == "waiting" else ""
        print(f"watching {run_dir} at {server.url}{note}; Ctrl-C ends it", flush=True)
        server.wait()
