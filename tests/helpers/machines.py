"""Virtual machines for tests: network namespaces joined by a switch, with link rates and delays, that can be cut.

    with Machines(2, rate="100mbit") as machines:
        results = machines.run("helpers.dense:train", cases, per_node=2)

Every machine has one interface, joined by veth to a bridge in a separate namespace. Nothing appears in the host's
namespace. On exit all namespaces and processes are removed. Needs Linux, root and iproute2 (`unavailable_reason`); a
delay also needs the kernel's netem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 180.0
"""Seconds, far above what ranks need: four of them start slowly on a busy machine."""
_instances = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class RankResult:
    """The end of one rank."""

    status: int
    """Exit status, negative for signals."""
    result: Any
    """Return value of the function."""
    output: str
    seconds: float
    """From start to end."""


class Machines:
    """Network namespaces joined by a switch. `rate` and `delay` apply to each link in each direction: "100mbit", "1ms".

    The first rank of a machine starts its host process, which has torch loaded and forks all ranks.
    """

    def __init__(self, count: int, *, rate: str | None = None, delay: str | None = None) -> None:
        prefix = f"thermocline-{os.getpid()}-{next(_instances)}"
        self.switch, self.nodes = f"{prefix}-switch", [f"{prefix}-{n}" for n in range(count)]
        self._rate, self._delay = rate, delay
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._folders = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _remove_stale_namespaces()
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for n, name in enumerate(self.nodes):
                _ip("netns", "add", name)
                port = f"port{n}"
                _ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", name, "address", "add", f"{address(n)}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", interface, "up")
                self.set_link(n, self._rate, self._delay)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            os.killpg(host.pid, signal.SIGKILL)  # the host and its ranks
            host.communicate()
        self._hosts.clear()
        for name in (*self.nodes, self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        self._folders.close()

    # ---- links

    def set_link(self, node: int, rate: str | None, delay: str | None = None) -> None:
        """Set the rate and delay of a node's link in both directions; None means unlimited."""
        for namespace, interface in ((self.nodes[node], "eth0"), (self.switch, f"port{node}")):
            tc = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
            subprocess.run([*tc, "delete", "dev", interface, "root"], capture_output=True, check=False)
            parent = ["root", "handle", "1:"]
            if delay is not None:
                _call(*tc, "add", "dev", interface, *parent, "netem", "delay", delay, "limit", "10000")
                parent = ["parent", "1:", "handle", "2:"]
            if rate is not None:
                burst = max(1 << 16, int(bits_per_second(rate) / 8 / 200))  # bytes between two ticks of a 200 Hz clock
                tbf = ["tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]
                _call(*tc, "add", "dev", interface, *parent, *tbf)

    def disconnect(self, node: int) -> None:
        """Take the node's link down."""
        _ip("-n", self.switch, "link", "set", f"port{node}", "down")

    def connect(self, node: int) -> None:
        """Bring the node's link up."""
        _ip("-n", self.switch, "link", "set", f"port{node}", "up")

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each node has sent over its link so far, headers included."""
        report = subprocess.run(
            ["ip", "-n", self.switch, "-json", "-statistics", "link"], capture_output=True, check=True
        ).stdout
        links = {link["ifname"]: link for link in json.loads(report)}
        return [links[f"port{n}"]["stats64"]["rx"]["bytes"] for n in range(len(self.nodes))]

    # ---- ranks

    def run(
        self, function: str, *args: Any, per_node: int = 2, seconds: float = LIMIT, timeout: float = LIMIT
    ) -> list[RankResult]:
        """Call `function` ("module:name") with the groups and `args` on every rank and wait for all of them.

        seconds   limit; raises AssertionError with the ranks that still run
        timeout   seconds that a collective waits for another rank
        """
        return self.wait(self.start(function, *args, per_node=per_node, timeout=timeout), seconds)

    def start(self, function: str, *args: Any, per_node: int = 2, timeout: float = LIMIT) -> RunningRanks:
        """Start the ranks without waiting. THERMOCLINE_FOLDER in their environment is the result's folder."""
        folder = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="thermocline-machines-")))
        (folder / "call").write_bytes(pickle.dumps((function, args, timeout)))
        world = per_node * len(self.nodes)
        for rank in range(world):
            node, local = divmod(rank, per_node)
            torchrun = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
            torchrun |= {"MASTER_ADDR": address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0"}
            env = {name: str(value) for name, value in torchrun.items()} | {"THERMOCLINE_FOLDER": str(folder)}
            self._host_stdin(node).write(json.dumps(env).encode() + b"\n")
        return RunningRanks(folder, world, time.monotonic())

    def _host_stdin(self, node: int) -> IO[bytes]:
        if node not in self._hosts:
            paths = [str(ROOT / name) for name in ("src", "tests", "benchmarks")]
            self._hosts[node] = subprocess.Popen(
                ["ip", "netns", "exec", self.nodes[node], sys.executable, "-W", "ignore", __file__], bufsize=0,
                stdin=subprocess.PIPE, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        stdin = self._hosts[node].stdin
        assert stdin is not None
        return stdin

    def wait(self, running: RunningRanks, seconds: float) -> list[RankResult]:
        """Wait until all ranks have ended, at most `seconds` from their start, and return their results, by rank."""
        results: dict[int, RankResult] = {}
        while len(results) < running.world:
            elapsed = time.monotonic() - running.started
            for rank in range(running.world):
                status = running.status(rank)
                if rank not in results and status is not None:
                    file = running.folder / f"result-{rank}"
                    value = pickle.loads(file.read_bytes()) if file.exists() else None
                    results[rank] = RankResult(status, value, running.output(rank), elapsed)
            if elapsed > seconds:
                late = {rank: running.output(rank) for rank in range(running.world) if rank not in results}
                raise AssertionError(f"ranks did not end within {seconds} s; their output: {late}")
            time.sleep(0.02)
        return [results[rank] for rank in range(running.world)]


@dataclasses.dataclass(frozen=True, slots=True)
class RunningRanks:
    """Started ranks. They and their hosts write to `folder`."""

    folder: Path
    world: int
    started: float
    """time.monotonic() at the start."""

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def status(self, rank: int) -> int | None:
        """Return the exit status, negative for signals, or None while the rank runs."""
        file = self.folder / f"status-{rank}"
        return int(file.read_text()) if file.exists() else None

    def output(self, rank: int) -> str:
        file = self.folder / f"output-{rank}"
        return file.read_text(errors="replace") if file.exists() else ""

    def await_steps(self, step: int, seconds: float = LIMIT) -> None:
        """Wait until every rank has called `record_step` `step` times."""
        deadline = time.monotonic() + seconds
        while min(self._steps(rank) for rank in range(self.world)) < step:
            ended = {rank: self.output(rank) for rank in range(self.world) if self.status(rank) is not None}
            assert not ended, f"ranks ended before step {step}: {ended}"
            assert time.monotonic() < deadline, f"no step {step} within {seconds} s"
            time.sleep(0.02)

    def _steps(self, rank: int) -> int:
        file = self.folder / f"steps-{rank}"
        return file.stat().st_size if file.exists() else 0


def record_step() -> None:
    """Count a step of this rank, for `RunningRanks.await_steps`."""
    with (Path(os.environ["THERMOCLINE_FOLDER"]) / f"steps-{os.environ['RANK']}").open("ab") as file:
        file.write(b".")


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def bits_per_second(rate: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit]


@functools.cache
def unavailable_reason(delay: str | None = None) -> str | None:
    """Return the reason why machines cannot be created here, or None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no network namespaces: {' and '.join(missing)} missing (Debian: apt-get install iproute2)"
    try:
        with Machines(2, rate="1gbit", delay=delay):
            return None
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip() or f"status {error.returncode}"
        return f"no network namespaces: {' '.join(error.cmd)}: {message}"


def _remove_stale_namespaces() -> None:
    """Remove namespaces of test processes that were killed."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"^thermocline-\d+-\S+", listing, re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*args: str) -> None:
    _call("ip", *args)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


# ---- host process of a machine


def _serve() -> None:
    """Fork a rank for every line of standard input and write the exit statuses. Returns only in the forked ranks."""
    ranks: dict[int, tuple[Path, str]] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                folder, rank = ranks.pop(ended[0])
                _write(folder / f"status-{rank}", str(os.waitstatus_to_exitcode(ended[1])))

    for line in sys.stdin.buffer:
        env = json.loads(line)
        folder, rank = Path(env["THERMOCLINE_FOLDER"]), env["RANK"]
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.environ.update(env)
            output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for stream in (1, 2):
                os.dup2(output, stream)
            return
        ranks[pid] = folder, rank
        _write(folder / f"pid-{rank}", str(pid))
        signal.signal(signal.SIGCHLD, reap)
        reap()
    os.killpg(0, signal.SIGKILL)  # the test process has exited: end all ranks


def _write(path: Path, text: str) -> None:
    """Write atomically."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _run_rank() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(os.environ["THERMOCLINE_FOLDER"]), os.environ["RANK"]
    target, args, timeout = pickle.loads((folder / "call").read_bytes())
    module, name = target.split(":")
    groups = join_ranks(Dist(timeout=timeout, bind=False))
    result = getattr(importlib.import_module(module), name)(groups, *args)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # rank 0 hosts the store: it must exit last
    groups.close()


if __name__ == "__main__":
    import importlib

    import torch._dynamo  # every rank would import it with its first optimizer
    import torch.distributed

    from thermocline.config.distributed import Dist
    from thermocline.distributed.launch import join_ranks

    _serve()
    status = 1
    try:
        _run_rank()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:  # skips the interpreter's finalization, which takes a second of processor time with torch loaded
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
