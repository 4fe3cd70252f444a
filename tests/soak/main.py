"""Soak: train for hours with random budgets, ranks and faults, and compare all bits with uninterrupted runs.

    python tests/soak/main.py --hours 2 [--folder build/soak] [--minutes 20] [--keep benchmarks/results]

Two lanes take turns, both with statistics, expiry, admission and publishing. The first is one run of one rank that
lasts for the whole soak; the second is a new run over 2 or 3 ranks after each comparison. Each attempt of a lane
resumes it with new random budgets and ends by a fault: ranks killed at a random time or at a failpoint, a full disk,
SIGTERM; some have a slow disk. After `--minutes` the run is completed at some step, restored by a new process, and
compared with a run that was never stopped and has all rows in memory: rows, statistics, dense state, random state and
the published rows. Every page of its store is verified. An unfinished soak continues from its folder. Exit code 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.failpoints import failpoints, python_failpoints
from soak import processes
from soak.disk import Disk, enter_namespace
from soak.lane import Lane, budget_bytes
from soak.processes import WORLDS, Ranks, Shared
from soak.report import Report, git_commit, now
from soak.resources import descriptors_of, memory_of, processor_seconds

FAULTS = {"kill all": 5, "kill one": 4, "failpoint": 5, "full disk": 3, "terminate": 1, "slow disk": 3, "long": 1}
"""Faults and their weights."""
FULL = ("disk is full", "No space left", "free some space")
HANG_SECONDS = 400.0
"""Silence after which ranks that should end count as hanging; `dist.timeout` is 60 s."""


class Reference:
    """The uninterrupted run of a lane. Its ranks wait at the last compared step."""

    def __init__(self, lane: Lane, folder: Path) -> None:
        self.lane, self.folder = lane, folder / "reference" / lane.name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.shared = Shared()
        config = lane.reference_config(folder / "reference")
        output = self.folder / "state"
        self.ranks = Ranks(
            lane.world, self.folder / "log", lambda rank: processes.refer(config, output, self.shared, rank)
        )
        self._first: tuple[int, int] | None = None

    def state(self, step: int) -> list[processes.Arrays]:
        """Train to `step` and return the state of every rank."""
        self.shared[WORLDS] = step
        files = [self.folder / f"state.{step}.{rank}.npz" for rank in range(self.lane.world)]
        while not all(file.exists() for file in files):
            if self.ranks.poll() or self.ranks.codes:
                self.ranks.kill()
                raise RuntimeError(f"the reference ended: {self.ranks.codes}\n{tail(self.ranks.log)}")
            time.sleep(0.1)
        states = [processes.load_state(file) for file in files]
        for file in files:
            file.unlink()
        return states

    def growth(self) -> tuple[int, int]:
        """Return memory and descriptors that a rank has gained since the first call."""
        used = max(map(memory_of, self.ranks.pids)), max(map(descriptors_of, self.ranks.pids))
        self._first = self._first or used
        return used[0] - self._first[0], used[1] - self._first[1]


class Soak:
    """The loop of attempts and comparisons."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, Path(options.folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.out = Path(options.report).absolute() if options.report else self.folder
        self.disk = Disk(self.folder, options.disk_mb)
        self.points = [p for p in failpoints() if not p.startswith(("repair.", "load."))] + python_failpoints()
        self.report = Report.read(self.out) or Report(git_commit(), now(), options.seed)
        if self.report.commit != git_commit():
            raise SystemExit(f"{self.out} has a report of commit {self.report.commit}: choose another folder")
        if self.disk.problem:
            self.report.skipped = [f"full disks: {self.disk.problem}"]
        self.baseline = memory_of(os.getpid())
        self.started, self.before, self.used_before = (
            time.monotonic(),
            self.report.seconds,
            self.report.processor_seconds,
        )
        self.references: dict[int, Reference] = {}
        self.lanes = [Lane(**fields) for fields in self.report.open_lanes]

    # ---- time

    @property
    def elapsed(self) -> float:
        """Seconds of this soak, over all its processes."""
        return self.before + time.monotonic() - self.started

    def rest(self) -> None:
        """Sleep until the processor time is within its share."""
        pids = [pid for reference in self.references.values() for pid in reference.ranks.pids]
        self.report.processor_seconds = self.used_before + processor_seconds(pids)
        ahead = (self.report.processor_seconds - self.used_before) / self.options.cores
        time.sleep(min(max(ahead - (time.monotonic() - self.started), 0), 300))

    # ---- lanes

    def new_lane(self, *, lasting: bool, rng: random.Random) -> Lane:
        world = 1 if lasting else rng.choice([2, 2, 3])
        lane = Lane(self.report.lanes, world, rng.randrange(1 << 30), lasting)
        self.report.lanes += 1
        (self.disk.folder / lane.name).mkdir()
        self.lanes.append(lane)
        return lane

    def end_lane(self, lane: Lane) -> None:
        self.lanes.remove(lane)
        if lane.number in self.references:
            self.references.pop(lane.number).ranks.kill()
        for folder in (self.disk.folder / lane.name, self.folder / "reference" / lane.name):
            shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> int:
        """Run until the hours are over; return the exit code."""
        while self.elapsed < self.options.hours * 3600:
            rng = random.Random(f"{self.options.seed} {self.report.attempts} {len(self.report.compared)}")
            lasting = len(self.report.compared) % 2 == 0
            lane = next((lane for lane in self.lanes if lane.lasting == lasting), None)
            lane = lane or self.new_lane(lasting=lasting, rng=rng)
            self.interval(lane)
        for reference in self.references.values():
            reference.ranks.kill()
        self.write()
        if self.options.keep is not None:
            self.report.keep(self.options.keep)
        print(self.report.text(), flush=True)
        return 1 if self.report.failures else 0

    def interval(self, lane: Lane) -> None:
        """Run attempts of a lane for the configured time, then compare it."""
        end = min(self.elapsed + self.options.minutes * 60, max(self.options.hours * 3600, self.elapsed + 60))
        step = 0
        while self.elapsed < end or step == 0:
            step = max(step, self.attempt(lane))
            self.write()
        if self.complete(lane, step + 10):
            self.compare(lane, step + 10)
        if not lane.lasting or self.report.compared[-1]["different"]:
            self.end_lane(lane)
        self.rest()
        self.write()

    def write(self) -> None:
        for text in self.report.peaks.exceeded():
            if text.split()[0] not in {each.get("bound") for each in self.report.failures}:
                self.report.fail(text, bound=text.split()[0])
        self.report.seconds = self.elapsed
        self.report.open_lanes = [dataclasses.asdict(lane) for lane in self.lanes]
        self.report.write(self.out)

    # ---- attempts

    def attempt(self, lane: Lane) -> int:
        """Resume the lane, with a fault; return the last step that it trained."""
        report = self.report
        report.attempts += 1
        rng = random.Random(f"{self.options.seed} attempt {report.attempts}")
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        if self.disk.problem and fault == "full disk":
            fault = "kill all"
        config = lane.attempt_config(self.disk.folder, rng, 10**9)
        victim = rng.randrange(lane.world)
        point = f"{rng.choice(self.points)}:{rng.choice([1, 1, 2, 3, 5, 9])}" if fault == "failpoint" else ""
        env = {"THERMOCLINE_IO": rng.choice(["auto", "auto", "pread"])}
        if fault == "slow disk":
            read, write, sync = rng.choice([(50, 200, 2000), (300, 1000, 20_000), (2000, 5000, 200_000)])
            env["THERMOCLINE_IO_DELAY"] = f"read={read},write={write},sync={sync}"
        log = self.folder / "logs" / f"{report.attempts:05}"
        log.parent.mkdir(exist_ok=True)
        shared = Shared()
        ranks = Ranks(
            lane.world, log, lambda rank: processes.train(config, shared, rank, point if rank == victim else ""), env
        )
        seconds = rng.uniform(60, 240) if fault == "long" else rng.choice([rng.random() * 4, rng.uniform(2, 30)])
        first = None
        start = time.monotonic()
        while not ranks.poll() and time.monotonic() < start + seconds:
            self.sample(lane, ranks, budget_bytes(config))
            first = first if first is not None else shared[0] or None
        alive = ranks.alive()
        if alive:
            self.strike(fault, ranks, victim, rng)
            self.await_end(lane, ranks, fault, budget_bytes(config))
        self.disk.free()
        trained = shared[0]
        report.steps += max(trained - (first or trained), 0)
        end = self.judge(fault, ranks, point)
        report.faults[fault] += 1
        report.ends[end] += 1
        report.killed_ranks += sum(code == -signal.SIGKILL for code in ranks.codes.values())
        text = (
            f"{now()} attempt {report.attempts} lane {lane.number} ({lane.world} ranks): {fault}{point and ' ' + point}"
        )
        print(f"{text}, {time.monotonic() - start:.1f} s, to step {trained}: {end}", flush=True)
        if end != "FAILED":
            log.unlink(missing_ok=True)
        self.rest()
        return trained

    def sample(self, lane: Lane, ranks: Ranks, budget: int) -> None:
        others = [pid for reference in self.references.values() for pid in reference.ranks.pids]
        self.report.peaks.sample(ranks.alive(), budget, self.baseline, others)
        self.report.peaks.disk = max(self.report.peaks.disk, self.disk.used(lane.name))
        time.sleep(0.2)

    def strike(self, fault: str, ranks: Ranks, victim: int, rng: random.Random) -> None:
        """End the attempt by its fault."""
        if fault == "full disk":
            self.disk.fill(rng.choice([0, 64 << 10, 1 << 20, 6 << 20]))
        elif fault == "terminate":
            ranks.send(signal.SIGTERM, victim)
        else:
            ranks.send(signal.SIGKILL, victim if fault == "kill one" else None)

    def await_end(self, lane: Lane, ranks: Ranks, fault: str, budget: int) -> None:
        """Wait until all ranks have ended; kill those of a full disk that trains on, and those that hang."""
        limit = 40.0 if fault == "full disk" else HANG_SECONDS
        start = time.monotonic()
        while not ranks.poll() and time.monotonic() < start + limit:
            self.sample(lane, ranks, budget)
        if ranks.alive():
            if fault != "full disk":
                self.report.fail(f"{fault}: ranks did not end within {limit:.0f} s", tail(ranks.log))
            ranks.kill()

    def judge(self, fault: str, ranks: Ranks, point: str) -> str:
        """Return how the attempt ended. Any other end than that of its fault is a failure."""
        codes, log = set(ranks.codes.values()), tail(ranks.log)
        killed = -signal.SIGKILL in codes
        others = codes - {-signal.SIGKILL}
        if codes == {-signal.SIGKILL}:
            return "killed"
        if killed and others == {1} and "RankError" in log:
            return "killed, other ranks ended with RankError"
        if fault == "full disk" and codes <= {1, -signal.SIGKILL} and any(text in log for text in FULL):
            return "stopped by the full disk"
        if fault == "terminate" and codes == {128 + signal.SIGTERM}:
            return "terminated and saved"
        if fault == "terminate" and -signal.SIGTERM in codes and (codes == {-signal.SIGTERM} or "RankError" in log):
            return "terminated before training"
        self.report.fail(f"{fault} {point}: exit codes {sorted(ranks.codes.items())}", log)
        return "FAILED"

    # ---- comparison

    def complete(self, lane: Lane, step: int) -> bool:
        """Train to `step` without a fault; return whether that succeeded."""
        rng = random.Random(f"{self.options.seed} complete {self.report.attempts}")
        config = lane.attempt_config(self.disk.folder, rng, step)
        shared, log = Shared(), self.folder / "logs" / f"{self.report.attempts:05}-complete"
        output = self.folder / "restored"
        works = [lambda rank: processes.train(config, shared, rank), lambda rank: processes.check(config, output, rank)]
        for work in works:
            ranks = Ranks(lane.world, log, work)
            start = time.monotonic()
            while not ranks.poll() and time.monotonic() < start + HANG_SECONDS:
                self.sample(lane, ranks, budget_bytes(config))
            if set(ranks.codes.values()) != {0} or len(ranks.codes) < lane.world:
                ranks.kill()
                self.report.fail(f"completing lane {lane.number} at step {step}: {ranks.codes}", tail(log))
                self.add_comparison(lane, step, ["not restored"])
                return False
        return True

    def compare(self, lane: Lane, step: int) -> None:
        """Compare the restored run with the uninterrupted one."""
        if lane.number not in self.references:
            self.references[lane.number] = Reference(lane, self.folder)
        reference = self.references[lane.number]
        try:
            expected = reference.state(step)
        except RuntimeError as error:
            self.report.fail("the reference failed", str(error))
            self.add_comparison(lane, step, ["no reference"])
            return
        growth, descriptors = reference.growth()
        peaks = self.report.peaks
        peaks.reference_growth = max(peaks.reference_growth, growth)
        peaks.reference_descriptors_growth = max(peaks.reference_descriptors_growth, descriptors)
        different, arrays = [], 0
        for rank, state in enumerate(expected):
            actual = processes.load_state(self.folder / f"restored.{rank}.npz")
            different += [f"rank {rank} {name}" for name in differing(actual, state)]
            arrays += len(state)
        served, wanted = processes.load_state(self.folder / "restored.published.npz"), published_by(expected, step)
        different += [f"published {name}" for name in differing(served, wanted)]
        rows, published = len(wanted["keys"]), len(served["keys"])
        for file in self.folder.glob("restored.*.npz"):
            if not different:
                file.unlink()
        if different:
            self.report.fail(f"lane {lane.number} at step {step} differs from the uninterrupted run", str(different))
        self.add_comparison(lane, step, different, rows=rows, arrays=arrays, published=published)

    def add_comparison(self, lane: Lane, step: int, different: list[str], **counts: int) -> None:
        counts = {"rows": 0, "arrays": 0, "published": 0} | counts
        entry: dict[str, Any] = {"at": now(), "lane": lane.number, "world": lane.world, "step": step, **counts}
        self.report.compared.append(entry | {"different": different})
        print(f"{now()} lane {lane.number} at step {step}: {different or 'equal'} {counts}", flush=True)


def published_by(states: list[processes.Arrays], step: int) -> processes.Arrays:
    """Return what ranks with these states publish at a step: the weights of all rows, in key order."""
    keys, rows = (np.concatenate([state[name] for state in states]) for name in ("keys", "rows"))
    order = np.argsort(keys)
    weights = np.ascontiguousarray(rows[order, : int(states[0]["dim"][0])]).view("uint8")
    return {"step": np.array([step]), "keys": keys[order], "weights": weights}


def differing(one: processes.Arrays, other: processes.Arrays) -> list[str]:
    """Return the names of arrays that are missing on one side or have other bits."""
    return sorted(
        name
        for name in {*one, *other}
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or one[name].shape != other[name].shape
        or one[name].tobytes() != other[name].tobytes()
    )


def tail(log: Path, count: int = 6000) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-count:] if log.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes between comparisons")
    parser.add_argument("--folder", default="build/soak", help="about 1 GB; an unfinished soak in it continues")
    parser.add_argument("--report", help="folder of the report; by default that of the soak")
    parser.add_argument("--keep", type=Path, help="folder that gets a copy of the report at the end")
    parser.add_argument("--cores", type=float, default=1.0, help="share of processor time")
    parser.add_argument("--disk-mb", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    enter_namespace([sys.executable, *sys.argv])
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main())
