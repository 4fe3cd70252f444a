"""Benchmark of the Flight server against redis-server, and of freshness.

    python benchmarks/lookup_server.py                                        two cores: one for the server
    python benchmarks/lookup_server.py --server-cores 2 --clients 6 --json FILE     the target's setting: 16 cores

The server runs in its own process, bound to `--server-cores` cores: one hardware thread each, so that no two of its
threads share a core, while redis-server, which has one thread, has a core alone. Clients are processes on the others.
Requests have 1,000 random keys of rows of 64 bytes (dim 16, fp32), all found. `maximum`: every client sends its next
request when it has the answer. `open loop`: requests are due at fixed intervals, half of the maximum in total; the
latency counts from the time at which a request was due. Processor seconds are those of the server's process (user and
system), read before and after: unlike rates they do not depend on the load of the machine. Redis holds the same rows as
one string per key and answers MGET of the same keys over TCP, to a client that only counts bytes.

Freshness: seconds from the call that publishes a delta of `--fresh-mb` of changed rows until a client gets one of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, console, environment, noise, print_claims, progress_bar, write_json
from engines import Data

from thermocline import serving
from thermocline.embedding.key_hash import hash_keys

DIM = 16
BATCH = 1000
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--server-cores", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--fresh-mb", type=float, default=100.0)
    parser.add_argument("--folder", type=Path, help="where the files are made; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        with noise() as load:
            record = measure(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record |= load
    claims = claims_of(record)
    print_claims("Server of published rows", claims)
    if options.json:
        write_json(options.json, {**environment(["numpy", "pyarrow", "redis"]), **record}, claims)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = int(options.rows)
    keys = Data(rows, 4 * DIM).keys(np.arange(rows))
    keys = keys[np.argsort(hash_keys(keys))]
    np.save(folder / "keys.npy", keys)
    cores = physical_cores(sorted(os.sched_getaffinity(0)))
    server_cores = [core[0] for core in cores[: options.server_cores]]
    client_cores = [number for core in cores[options.server_cores :] for number in core] or server_cores
    record: dict[str, Any] = {
        "rows": rows, "server_cores": len(server_cores), "threads_per_core": max(map(len, cores)),
        "clients": options.clients, "seconds": options.seconds,
    }  # fmt: skip
    with serving.Publication(folder / "served") as publication:
        publication.publish_base([table(keys, 0)], step=0)
        with flight_server(folder, server_cores) as (process, location):
            record["flight"] = side("flight", location, process.pid, folder, client_cores, options)
            record["fresh_seconds"] = freshness(publication, keys, location, options.fresh_mb)
    if shutil.which("redis-server") is None:
        console.print("redis-server is not installed: not measured")
        return record
    with redis_server(folder, server_cores, keys) as (process, location):
        record["redis"] = side("redis", location, process.pid, folder, client_cores, options)
    return record


def physical_cores(numbers: list[int]) -> list[list[int]]:
    """Group processors by the core that they share, as the system states; each is a core of its own if it does not."""
    cores: dict[str, list[int]] = {}
    for number in numbers:
        file = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        cores.setdefault(file.read_text().strip() if file.exists() else str(number), []).append(number)
    return list(cores.values())


def table(keys: Any, version: int) -> serving.TableRows:
    return serving.TableRows(name="t", dim=DIM, rows=[(keys, weights(keys, version))])


def weights(keys: Any, version: int) -> Any:
    low = (keys & np.uint64(0xFFFF)).astype(np.float32)[:, None]
    return low + np.arange(DIM, dtype=np.float32) + np.float32(version)


# ---- servers


class flight_server:
    """Run `thermocline serve` on some cores; yields the process and its location."""

    def __init__(self, folder: Path, cores: list[int]) -> None:
        command = [sys.executable, "-m", "thermocline", "serve", str(folder / "served"), "--port", "0", "--poll", "0.2"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(self._process.pid, cores)

    def __enter__(self) -> tuple[subprocess.Popen[str], str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        bind_threads(self._process.pid, os.sched_getaffinity(self._process.pid))
        return self._process, "grpc://127.0.0.1:" + line.rsplit(":", 1)[1].strip().split()[0]

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


class redis_server:
    """Run redis-server on some cores with all rows; yields the process and its port."""

    def __init__(self, folder: Path, cores: list[int], keys: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = ["redis-server", "--port", str(self._port), "--save", "", "--dir", str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        os.sched_setaffinity(self._process.pid, cores)
        self._keys = keys

    def __enter__(self) -> tuple[subprocess.Popen[bytes], str]:
        import redis

        client = redis.Redis(port=self._port)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.1)
        with progress_bar("loading redis", len(self._keys)) as advance:
            for first in range(0, len(self._keys), 4096):
                part = self._keys[first : first + 4096]
                pairs = zip(part, weights(part, 0), strict=True)
                client.mset({b"tc:t:" + key.tobytes(): row.tobytes() for key, row in pairs})
                advance(first + len(part))
        bind_threads(self._process.pid, os.sched_getaffinity(self._process.pid))
        return self._process, str(self._port)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def bind_threads(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# ---- clients


def side(
    kind: str, location: str, pid: int, folder: Path, cores: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure the maximum, then the open loop at half of it."""
    clients, seconds = options.clients, options.seconds
    run_clients(kind, location, folder, cores, clients, 1.0, None)  # warms caches
    before = processor_seconds(pid)
    latencies = run_clients(kind, location, folder, cores, clients, seconds, None)
    spent = processor_seconds(pid) - before
    rate = len(latencies) / seconds
    figures = {
        "requests_per_second": rate,
        "keys_per_second": rate * BATCH,
        "keys_per_processor_second": len(latencies) * BATCH / max(spent, 1e-9),
        "processor_seconds": spent,
    }
    latencies = run_clients(kind, location, folder, cores, clients, seconds, 2 * clients / rate)
    figures["open_loop"] = {
        "requests_per_second": len(latencies) / seconds,
        **{f"p{q}_ms": float(np.percentile(latencies, q)) * 1e3 for q in (50, 99, 99.9)},
    }
    console.print(kind, figures)
    return figures


def run_clients(
    kind: str, location: str, folder: Path, cores: list[int], clients: int, seconds: float, interval: float | None
) -> Any:
    """Return the latencies of all requests of all clients. `interval`: seconds between requests of one client."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    start = time.monotonic() + 3.0
    processes = []
    for number in range(clients):
        arguments = (kind, location, str(folder), [cores[number % len(cores)]], number, start, seconds, interval)
        processes.append(context.Process(target=client, args=(*arguments, answers)))
        processes[-1].start()
    latencies = np.concatenate([answers.get() for _ in processes])
    for process in processes:
        process.join()
    return latencies


def client(
    kind: str, location: str, folder: str, cores: list[int], number: int, start: float, seconds: float,
    interval: float | None, answers: Any,
) -> None:  # fmt: skip
    os.sched_setaffinity(0, cores)
    keys = np.load(f"{folder}/keys.npy")
    rng = np.random.default_rng(number)
    batches = [keys[rng.integers(0, len(keys), BATCH)] for _ in range(64)]
    lookup = flight_lookup(location) if kind == "flight" else redis_lookup(location, batches)
    lookup(batches[0], 0)
    time.sleep(max(0.0, start - time.monotonic()))
    latencies = []
    for turn, due in enumerate(times(start, seconds, interval, number)):
        begun = time.monotonic() if interval is None else due
        lookup(batches[turn % 64], turn % 64)
        latencies.append(time.monotonic() - begun)
    answers.put(np.array(latencies))


def times(start: float, seconds: float, interval: float | None, number: int) -> Iterator[float]:
    """Yield the time at which each request is due, and wait for it; without an interval, at once."""
    end = start + seconds
    if interval is None:
        while time.monotonic() < end:
            yield 0.0
        return
    due = start + interval * (number * 0.37 % 1)  # clients are not in step
    while due < end:
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        yield due
        due += interval


def flight_lookup(location: str) -> Callable[[Any, int], object]:
    connection = serving.connect(location, timeout=60)
    return lambda keys, _: connection.lookup(keys, missing="zero")


def redis_lookup(port: str, batches: list[Any]) -> Callable[[Any, int], object]:
    """Send MGET as prepared bytes and count the bytes of the answer: a client that costs less than any library."""
    connection = socket.create_connection(("127.0.0.1", int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    names = [[b"tc:t:" + key.tobytes() for key in batch] for batch in batches]
    head = f"*{BATCH + 1}\r\n$4\r\nMGET\r\n".encode()
    requests = [head + b"".join(b"$%d\r\n%s\r\n" % (len(name), name) for name in batch) for batch in names]
    expected = len(f"*{BATCH}\r\n") + BATCH * (len(f"${4 * DIM}\r\n") + 4 * DIM + 2)
    buffer = bytearray(1 << 20)

    def lookup(keys: Any, turn: int) -> None:
        connection.sendall(requests[turn])
        received = 0
        while received < expected:
            received += connection.recv_into(buffer)

    return lookup


def freshness(publication: serving.Publication, keys: Any, location: str, megabytes: float) -> float:
    """Seconds from the start of publishing changed rows to the first answer with one of them."""
    changed = keys[: min(len(keys), int(megabytes * 1e6 / (8 + 4 * DIM)))]
    update = table(changed, 1000)
    expected = weights(changed[-1:], 1000)
    with serving.connect(location, timeout=60) as connection:
        start = time.perf_counter()
        publication.publish_delta([update], step=1)
        while not np.array_equal(connection.lookup(changed[-1:]), expected):
            time.sleep(0.01)
        return time.perf_counter() - start


def claims_of(record: dict[str, Any]) -> list[Claim]:
    flight = record["flight"]
    claims = [
        Claim("p99 of 1,000 keys, open loop at half of the maximum", flight["open_loop"]["p99_ms"], 2.0, "ms", True),
        Claim("freshness of 100 MB of changed rows", record["fresh_seconds"], 5.0, "s", True),
    ]
    if "redis" in record:
        ratio = flight["keys_per_processor_second"] / record["redis"]["keys_per_processor_second"]
        claims.append(Claim("keys per processor second of the server, against redis-server MGET", ratio, 2.0))
    return claims


if __name__ == "__main__":
    main()
