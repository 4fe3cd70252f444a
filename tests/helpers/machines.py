"""Machines that are network namespaces: a switch between them, links with a rate and a delay that can be cut.

    with Machines(2, rate="100mbit") as machines:
        ended = machines.run("helpers.dense:train", cases, per_node=2)

Every machine has one interface, joined by veth to a bridge in a namespace of its own; nothing appears in the namespace
of the host, and all of it, processes too, is gone when the block ends. Needs Linux, root and iproute2 (`problem` says
what is missing). A delay needs the kernel's netem besides.
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
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parent.parent
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended: its exit status, what its function returned, what it printed, and after how many seconds."""

    status: int
    result: Any
    output: str
    seconds: float


class Machines:
    """Namespaces joined by a switch. `rate` and `delay` of each link, each way, as tc writes them: "100mbit", "1ms".

    A machine is one process from its first rank on: it has torch loaded, and ranks are forked from it.
    """

    def __init__(self, count: int, *, rate: str | None = None, delay: str | None = None) -> None:
        prefix = f"thermocline-{os.getpid()}-{next(_numbers)}"
        self.switch, self.nodes = f"{prefix}-switch", [f"{prefix}-{n}" for n in range(count)]
        self._rate, self._delay = rate, delay
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._folders = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _sweep()
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
                self.shape(n, self._rate, self._delay)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            os.killpg(host.pid, signal.SIGKILL)  # and its ranks
            host.communicate()
        self._hosts.clear()
        for name in (*self.nodes, self.switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        self._folders.close()

    # ---- links

    def shape(self, node: int, rate: str | None, delay: str | None = None) -> None:
        """How fast a node's link is from now on, both ways; none: as fast as memory."""
        for namespace, interface in ((self.nodes[node], "eth0"), (self.switch, f"port{node}")):
            tc = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
            subprocess.run([*tc, "delete", "dev", interface, "root"], capture_output=True, check=False)
            parent = ["root", "handle", "1:"]
            if delay is not None:
                _call(*tc, "add", "dev", interface, *parent, "netem", "delay", delay, "limit", "10000")
                parent = ["parent", "1:", "handle", "2:"]
            if rate is not None:
                burst = max(1 << 16, int(bits(rate) / 8 / 200))  # what arrives between two ticks of a slow clock
                tbf = ["tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]
                _call(*tc, "add", "dev", interface, *parent, *tbf)

    def cut(self, node: int) -> None:
        """Pulls the node's cable."""
        _ip("-n", self.switch, "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        """Plugs it in again."""
        _ip("-n", self.switch, "link", "set", f"port{node}", "up")

    def sent(self) -> list[int]:
        """Bytes each node has sent over its link so far, headers included."""
        found = subprocess.run(
            ["ip", "-n", self.switch, "-json", "-statistics", "link"], capture_output=True, check=True
        ).stdout
        links = {link["ifname"]: link for link in json.loads(found)}
        return [links[f"port{n}"]["stats64"]["rx"]["bytes"] for n in range(len(self.nodes))]

    # ---- ranks

    def run(
        self, function: str, *args: Any, per_node: int = 2, seconds: float = 60, timeout: float = 60
    ) -> list[Ended]:
        """`function` ("module:name", called with groups and the arguments) on every rank, until all have ended.

        seconds   after them, ranks that still run are killed, and AssertionError says which
        timeout   what a collective waits for another rank
        """
        return self.wait(self.start(function, *args, per_node=per_node, timeout=timeout), seconds)

    def start(self, function: str, *args: Any, per_node: int = 2, timeout: float = 60) -> Running:
        """The same without waiting. Ranks find `running.folder` in THERMOCLINE_FOLDER."""
        folder = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="thermocline-machines-")))
        (folder / "call").write_bytes(pickle.dumps((function, args, timeout)))
        world = per_node * len(self.nodes)
        for rank in range(world):
            node, local = divmod(rank, per_node)
            torchrun = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
            torchrun |= {"MASTER_ADDR": address(0), "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0"}
            env = {name: str(value) for name, value in torchrun.items()} | {"THERMOCLINE_FOLDER": str(folder)}
            self._host(node).write(json.dumps(env).encode() + b"\n")
        return Running(folder, world, time.monotonic())

    def _host(self, node: int) -> IO[bytes]:
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

    def wait(self, running: Running, seconds: float) -> list[Ended]:
        """How every rank ended, by rank; `seconds` since it was started."""
        ended: dict[int, Ended] = {}
        while len(ended) < running.world:
            passed = time.monotonic() - running.since
            for rank in range(running.world):
                status = running.status(rank)
                if rank not in ended and status is not None:
                    result = running.folder / f"result-{rank}"
                    value = pickle.loads(result.read_bytes()) if result.exists() else None
                    ended[rank] = Ended(status, value, running.output(rank), passed)
            if passed > seconds:
                late = {rank: running.output(rank) for rank in range(running.world) if rank not in ended}
                raise AssertionError(f"ranks have not ended in {seconds} s, and said: {late}")
            time.sleep(0.02)
        return [ended[rank] for rank in range(running.world)]


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """Ranks that were started. What they and their machines write lies in `folder`."""

    folder: Path
    world: int
    since: float

    def signal(self, rank: int, what: signal.Signals) -> None:
        os.kill(int((self.folder / f"pid-{rank}").read_text()), what)

    def status(self, rank: int) -> int | None:
        """As a shell says it, below 0 for signals; none: it runs."""
        file = self.folder / f"status-{rank}"
        return int(file.read_text()) if file.exists() else None

    def output(self, rank: int) -> str:
        file = self.folder / f"output-{rank}"
        return file.read_text(errors="replace") if file.exists() else "nothing"

    def await_steps(self, step: int, seconds: float = 60) -> None:
        """Returns once every rank has called `stepped` as often."""
        end = time.monotonic() + seconds
        while min(self._steps(rank) for rank in range(self.world)) < step:
            gone = {rank: self.output(rank) for rank in range(self.world) if self.status(rank) is not None}
            assert not gone, f"ranks ended before step {step}: {gone}"
            assert time.monotonic() < end, f"no step {step} within {seconds} s"
            time.sleep(0.02)

    def _steps(self, rank: int) -> int:
        file = self.folder / f"steps-{rank}"
        return file.stat().st_size if file.exists() else 0


def stepped() -> None:
    """Called by a rank once per step."""
    with (Path(os.environ["THERMOCLINE_FOLDER"]) / f"steps-{os.environ['RANK']}").open("ab") as file:
        file.write(b".")


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def bits(rate: str) -> float:
    """Per second."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit]


@functools.cache
def problem(delay: str | None = None) -> str | None:
    """Why there can be no machines here; none: there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no network namespaces: {' and '.join(missing)} missing (Debian: apt-get install iproute2)"
    try:
        with Machines(2, rate="1gbit", delay=delay):
            return None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip() or f"status {error.returncode}"
        return f"no network namespaces: {' '.join(error.cmd)}: {said}"


def _sweep() -> None:
    """Removes what a process left that was killed."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"^thermocline-\d+-\S+", found, re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*args: str) -> None:
    _call("ip", *args)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


# ---- on a machine


def _host() -> None:
    """Forks a rank for every line of its input; says how they ended. Returns in the ranks, and nowhere else."""
    ranks: dict[int, tuple[Path, str]] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                folder, rank = ranks.pop(found[0])
                _write(folder / f"status-{rank}", str(os.waitstatus_to_exitcode(found[1])))

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
    os.killpg(0, signal.SIGKILL)  # whoever started this is gone: so are its ranks


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _rank() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(os.environ["THERMOCLINE_FOLDER"]), os.environ["RANK"]
    where, args, timeout = pickle.loads((folder / "call").read_bytes())
    module, name = where.split(":")
    groups = Groups.make(Topology.of_env(), timeout=timeout)
    result = getattr(importlib.import_module(module), name)(groups, *args)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # rank 0 has the store: it leaves last
    groups.close()


if __name__ == "__main__":
    import importlib

    import torch._dynamo  # the first optimizer would, in every rank
    import torch.distributed

    from thermocline.distributed.communicator import Groups
    from thermocline.distributed.topology import Topology

    _host()
    _rank()
