"""The report of a soak: report.json, from which an interrupted soak continues, and report.txt."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soak.resources import DESCRIPTORS, DISK, MEMORY_BEYOND_BUDGETS, REFERENCE_GROWTH, Peaks

ROOT = Path(__file__).parents[2]


def git_commit() -> str:
    """Return the commit of the checkout, with "+" if files other than results differ from it."""
    try:
        commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], text=True).strip()
        status = ["git", "-C", str(ROOT), "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results"]
        changed = subprocess.check_output(status, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed.strip() else "")


@dataclasses.dataclass
class Report:
    """Counts, comparisons, peaks and failures of a soak, over all its processes."""

    commit: str
    started: str
    seed: int
    seconds: float = 0.0
    processor_seconds: float = 0.0
    attempts: int = 0
    lanes: int = 0
    steps: int = 0
    """Steps trained in attempts, those again that a kill undid included."""
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    """Attempts by fault."""
    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    """Attempts by their end."""
    killed_ranks: int = 0
    compared: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    peaks: Peaks = dataclasses.field(default_factory=Peaks)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    open_lanes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Lanes that continue: what `Lane` takes."""

    def fail(self, what: str, detail: str = "", **more: Any) -> None:
        """Record a failure."""
        self.failures.append({"at": now(), "attempt": self.attempts, "what": what, "detail": detail[-4000:], **more})

    def write(self, folder: Path, name: str = "report") -> None:
        """Write NAME.json and NAME.txt; each appears by a rename."""
        folder.mkdir(parents=True, exist_ok=True)
        values = vars(self) | {"peaks": dataclasses.asdict(self.peaks)}
        for suffix, text in (("json", json.dumps(values, indent=1)), ("txt", self.text())):
            temporary = folder / f".{name}.{suffix}"
            temporary.write_text(text + "\n")
            temporary.rename(folder / f"{name}.{suffix}")

    def keep(self, folder: Path) -> None:
        """Write both files to a folder of several reports, under date of start, commit and seed."""
        self.write(folder, f"soak-{self.started.split()[0]}-{self.commit}-{self.seed}")

    @classmethod
    def read(cls, folder: Path) -> Report | None:
        """Return the report of an earlier soak in this folder."""
        try:
            fields = json.loads((folder / "report.json").read_text())
        except FileNotFoundError:
            return None
        fields["faults"], fields["ends"] = Counter(fields["faults"]), Counter(fields["ends"])
        fields["peaks"] = Peaks(**fields["peaks"])
        return cls(**fields)

    def text(self) -> str:
        """Return the report for people."""
        peaks = self.peaks
        lines = [
            f"soak of commit {self.commit}, started {self.started}, last written {now()}, seed {self.seed}",
            f"{self.seconds / 3600:.2f} hours, {self.processor_seconds / 3600:.2f} processor hours",
            f"{self.attempts} attempts, {self.lanes} lanes, {self.steps} steps, {self.killed_ranks} ranks killed",
            "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items())),
            "ends: " + ", ".join(f"{name} {count}" for name, count in sorted(self.ends.items())),
            *(f"not run: {text}" for text in self.skipped),
            f"peaks of {peaks.samples} samples (bounds in brackets):",
            f"  memory of a rank beyond its budgets {mib(peaks.memory_beyond_budgets)} ({mib(MEMORY_BEYOND_BUDGETS)})",
            f"  memory of all processes {mib(peaks.all_processes)}",
            f"  growth of the reference {mib(peaks.reference_growth)} ({mib(REFERENCE_GROWTH)})",
            f"  descriptors of a rank {peaks.descriptors} ({DESCRIPTORS})",
            f"  disk of a lane {mib(peaks.disk)} ({mib(DISK)})",
            f"{len(self.compared)} comparisons with uninterrupted runs:",
        ]
        for each in self.compared:
            lines.append(
                f"  {each['at']}  lane {each['lane']}, {each['world']} ranks, step {each['step']}: "
                f"{each['rows']} rows, {each['arrays']} arrays, {each['published']} published rows: "
                + ("equal" if not each["different"] else f"DIFFERENT: {each['different']}")
            )
        lines.append(f"{len(self.failures)} failures")
        lines += [f"  {each['at']} attempt {each['attempt']}: {each['what']}" for each in self.failures]
        return "\n".join(lines)


def now() -> str:
    """Return the time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def mib(count: int) -> str:
    """Return a size in MiB."""
    return f"{count / (1 << 20):.0f} MiB"
