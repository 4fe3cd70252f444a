"""What every benchmark shares: the record of where it ran, a table of claims against targets, the JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=120)


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """One measured figure against its target. `at_most`: smaller is better."""

    name: str
    value: float
    target: float
    unit: str = "x"
    at_most: bool = False
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, and how many values."""
    ordered = sorted(values)
    pick = [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8)]
    return {"median": statistics.median(ordered), "p20": pick[0], "p80": pick[1], "count": len(ordered)}


def environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Machine, versions and commit; no names of hosts or folders."""
    info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git_commit(),
        "cpu": info.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _git_commit() -> str:
    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../csrc", "../src", ".")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_seconds() -> tuple[float, float]:
    """Busy time of the whole machine and of this process with its finished children."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    busy = sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy, sum(u.ru_utime + u.ru_stime for u in used)


@contextmanager
def noise() -> Iterator[dict[str, float]]:
    """Yields a dict that afterwards says how busy others kept the machine: {"others_cpu": share of all cores}."""
    out: dict[str, float] = {}
    start, (busy, own) = time.perf_counter(), cpu_seconds()
    yield out
    after = cpu_seconds()
    capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
    out["others_cpu"] = max(0.0, (after[0] - busy - (after[1] - own)) / capacity)


def print_claims(title: str, claims: Sequence[Claim]) -> None:
    table = Table(title=title)
    for column in ("claim", "measured", "target", "", "detail"):
        table.add_column(column, justify="right" if column in ("measured", "target") else "left")
    for claim in claims:
        mark = "[green]met[/]" if claim.met else "[red]missed[/]"
        bound = "<=" if claim.at_most else ">="
        value, target = f"{claim.value:.3g} {claim.unit}", f"{bound} {claim.target:g} {claim.unit}"
        table.add_row(claim.name, value, target, mark, claim.detail)
    console.print(table)


def write_json(path: str | os.PathLike[str], record: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Adds the claims to the record and writes it."""
    record = {**record, "claims": [{**dataclasses.asdict(claim), "met": claim.met} for claim in claims]}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
