"""Times for benchmarks/scale.py --times: saves, steps and the rendezvous, at sizes that this machine runs."""

from __future__ import annotations

import thermocline as tc  # before torch: sets OMP_WAIT_POLICY

# isort: split
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import plan
from plan_training import Training
from scale_checks import Check

from thermocline.planner.calibrate import measure
from thermocline.planner.hardware import Hardware
from thermocline.planner.scale_model import Ranks
from thermocline.planner.ssd_model import KEY_BYTES
from thermocline.tiers.dram import DramTier

DIM = 12
SAVED_ROWS = (2_000_000, 8_000_000)
WORLDS = (2, 8)
STEPS = [
    Training(
        keys=1_000_000, fields=50, nonzeros=500, zipf=1.05, model="dnn", dim=DIM, hidden=(512, 256), dropout=0.0,
        batch_norm=False, batch=512 // ranks, window=1, optimizer="rowwise_adagrad", dense_optimizer="adam",
        ranks=ranks, share=share, warm=20, steps=1,
    )
    for ranks, share in ((1, 1.0), (2, 1.0), (1, 0.4))
]  # fmt: skip
"""Rows and ids of model E, with fewer keys and a smaller network: in DRAM, over two ranks, with SSD."""


def check_save(folder: Path, rows: int, write_gbs: float) -> Check:
    """Save rows of DRAM of which all are dirty; the formula has bytes of rows and keys, and the disk's write rate."""
    row_bytes = 4 * (DIM + 1)
    with tc.SsdStore.open(folder / f"save-{rows}", row_bytes=row_bytes, mem_budget=1 << 30) as store:
        tier = DramTier(DIM, tc.RowWiseAdagrad(lr=0.1), budget=2 * rows * (row_bytes + 60), store=store, write_ahead=0)
        rng = np.random.default_rng(rows)
        for first in range(0, rows, 100_000):
            keys = np.arange(first, min(rows, first + 100_000), dtype=np.uint64)
            tier.push(keys, rng.random((len(keys), DIM + 1), dtype=np.float32), unique=True)
        start = time.perf_counter()
        tier.flush(store)
        store.commit()
        seconds = time.perf_counter() - start
    predicted = rows * (row_bytes + KEY_BYTES) / write_gbs * 1e-9
    return Check(f"save of {rows:,} dirty rows of {row_bytes} B, us", 1e6 * predicted, 1e6 * seconds, 0.5, 1.5)


def check_steps(folder: Path, hardware: Hardware) -> tuple[list[Check], list[dict[str, Any]]]:
    """Train as `benchmarks/plan.py` does; compare wall times per step."""
    checks, records, probes = [], [], plan.Probes()
    for training in STEPS:
        result = plan.compare(training, hardware, folder, probes)
        name = f"step, {training.ranks} rank{'s' * (training.ranks > 1)}"
        name += f", {training.share:.0%} of the rows in DRAM" if training.share < 1 else ", all rows in DRAM"
        wall = (result["predicted"]["step_seconds"], result["measured"]["step_seconds"])
        checks.append(Check(f"{name}, us", 1e6 * wall[0], 1e6 * wall[1], 1 - plan.WITHIN, 1 + plan.WITHIN))
        records.append(result)
    return checks, records


def check_rendezvous(world: int) -> Check:
    """Start ranks with torchrun; count the connections that its process has for the store, beside its own."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "count"
        source = str(Path(tc.__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": source, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        program = [__file__, str(out)]
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *program]
        subprocess.run([sys.executable, *ranks], env=env, check=True, timeout=300)
        counted = json.loads(out.read_text())
    return Check(f"connections of torchrun for {world} ranks", Ranks(1, world).store_host_files, counted, 1, 1)


def store_connections(process: int, port: int) -> int:
    """Count the connections of a process at a port of its own whose other end is in another process."""
    inodes = set()
    for entry in os.scandir(f"/proc/{process}/fd"):
        target = os.readlink(entry.path)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    accepted, made = set(), set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
            if fields[3] == "01" and fields[9] in inodes:  # established
                accepted |= {remote} if local == port else set()
                made |= {local} if remote == port else set()
    return len(accepted - made)


def measure_times(folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Calibrate this machine and measure; return the checks and everything for the record."""
    hardware = measure(folder)
    found = [check_rendezvous(world) for world in WORLDS]
    found += [check_save(folder, count, hardware.disk.write_gbs) for count in SAVED_ROWS]
    steps, records = check_steps(folder, hardware)
    return [*found, *steps], {"hardware": dataclasses.asdict(hardware), "steps": records}


def _join(out: Path) -> None:
    """A rank: join, and on rank 0 count when all have joined."""
    with tc.join_ranks() as groups:
        groups.train.barrier("joining")
        if groups.topology.rank == 0:
            out.write_text(json.dumps(store_connections(os.getppid(), int(os.environ["MASTER_PORT"]))))
        groups.train.barrier("counting")


if __name__ == "__main__":
    _join(Path(sys.argv[1]))
