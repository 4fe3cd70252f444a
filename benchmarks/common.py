"""Shared by all benchmarks: the record of machine and commit, the table of claims, progress bars, the JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

FOLDER = Path(__file__).resolve().parent

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=120)


MOST_LOAD = 0.05
"""Share of the processors that others may use while a time is measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A measured figure and its target."""

    name: str
    value: float
    target: float
    unit: str = "x"
    at_most: bool = False
    """The target is an upper bound."""
    detail: str = ""
    others_cpu: float = 0.0
    """Share of the processors that others used meanwhile, for a figure that depends on it."""

    @property
    def valid(self) -> bool:
        return self.others_cpu <= MOST_LOAD

    @property
    def met(self) -> bool:
        return self.valid and (self.value <= self.target if self.at_most else self.value >= self.target)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, and number of values."""
    ordered = sorted(values)
    pick = [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8)]
    return {"median": statistics.median(ordered), "p20": pick[0], "p80": pick[1], "count": len(ordered)}


def environment(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Date, commit, machine and versions of `packages`, without host or folder names."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    cpuinfo = {key.strip(): value.strip() for key, value in lines}
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "cpu": cpuinfo.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> str:
    """Short commit of this checkout, with "+changes" if csrc, src or benchmarks differ from it.

    `make commit-file` writes the commit and a digest of these sources to benchmarks/COMMIT before the tree is copied to
    another machine. Where the digest fits the sources, the file counts: that machine may have another git repository,
    or none. "unknown" if there is neither.
    """

    def git(*args: str) -> str:
        command = ["git", "-C", str(FOLDER), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    file = FOLDER / "COMMIT"
    recorded, _, digest = file.read_text().strip().partition(" ") if file.exists() else ("", "", "")
    if recorded and digest == source_digest():
        return recorded
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../csrc", "../src", ".")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def source_digest() -> str:
    """Digest of the names and contents of all Python and C++ sources that a benchmark runs."""
    root, digest = FOLDER.parent, hashlib.sha256()
    files = [*root.glob("csrc/*/*.[ch]*"), *root.glob("src/**/*.py"), *FOLDER.glob("*.py")]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cpu_seconds() -> tuple[float, float, float]:
    """Processor seconds of the machine, of this process and its finished children, and of the kernel itself.

    The last are interrupts and kernel threads: most of them serve the reads and writes of this process.
    """
    tick = os.sysconf("SC_CLK_TCK")
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    busy, kernel = (sum(int(fields[i]) for i in which) for which in ((1, 2, 3, 6, 7), (6, 7)))
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent, *rest = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if parent == "2":
            kernel += int(rest[9]) + int(rest[10])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy / tick, sum(u.ru_utime + u.ru_stime for u in used), kernel / tick


@contextmanager
def noise() -> Iterator[dict[str, float]]:
    """Measure the load of other processes: yields a dict that gets fractions of all cores on exit.

    others_cpu: other processes. kernel_cpu: interrupts and kernel threads, not part of others_cpu.
    """
    figures: dict[str, float] = {}
    start, before = time.perf_counter(), cpu_seconds()
    yield figures
    machine, process, kernel = (after - earlier for after, earlier in zip(cpu_seconds(), before, strict=True))
    capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
    figures["others_cpu"] = max(0.0, (machine - process - kernel) / capacity)
    figures["kernel_cpu"] = kernel / capacity


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a live bar; yields a function that sets the number of units done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def print_claims(title: str, claims: Sequence[Claim]) -> None:
    table = Table(title=title)
    for column in ("claim", "measured", "target", "", "detail"):
        table.add_column(column, justify="right" if column in ("measured", "target") else "left")
    for claim in claims:
        mark = "[green]met[/]" if claim.met else "[red]missed[/]"
        if not claim.valid:
            mark = f"[yellow]invalid: others used {claim.others_cpu:.0%} of the processors[/]"
        bound = "<=" if claim.at_most else ">="
        value, target = f"{claim.value:.3g} {claim.unit}", f"{bound} {claim.target:g} {claim.unit}"
        table.add_row(claim.name, value, target, mark, claim.detail)
    console.print(table)


def data_folder(inside: str | None) -> Path:
    """Make a folder for data that may be deleted as a whole: below `inside`, which may have other files."""
    if inside is None:
        return Path(tempfile.mkdtemp(prefix="thermocline-bench-"))
    folder = Path(inside) / "thermocline-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def select_claims(only: str | None, claims: Sequence[str]) -> list[str]:
    """Claims named in the option `--only`, all without it; raise SystemExit for an unknown name."""
    names = only.split(",") if only else list(claims)
    if unknown := set(names) - set(claims):
        raise SystemExit(f"--only {','.join(sorted(unknown))}: choose from {','.join(claims)}")
    return names


def earlier_results(path: str | None, sizes: dict[str, Any]) -> dict[str, Any]:
    """Results of the file `path` if it was measured with equal `sizes`, else empty."""
    if path is None or not Path(path).exists():
        return {}
    record = json.loads(Path(path).read_text())
    results: dict[str, Any] = record["results"] if record["sizes"] == json.loads(json.dumps(sizes)) else {}
    return results


def _claim_record(claim: Claim) -> dict[str, Any]:
    return {**dataclasses.asdict(claim), "valid": claim.valid, "met": claim.met}


def write_json(path: str | os.PathLike[str], record: dict[str, Any], claims: Sequence[Claim]) -> None:
    """Write `record` with its claims to `path`."""
    record = {**record, "claims": [_claim_record(claim) for claim in claims]}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":  # make commit-file
    (FOLDER / "COMMIT").unlink(missing_ok=True)
    (FOLDER / "COMMIT").write_text(f"{commit()} {source_digest()}\n")
    print(f"benchmarks/COMMIT: {commit()}")
