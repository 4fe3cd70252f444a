"""Limits of large jobs: 1 to 1,000 nodes of 8 GPUs, 1e9 to 1e12 keys; predicted, and checked where that takes seconds.

Claim    The formulas of `planner/scale_model.py` give the sizes of stores and the connections, messages and bytes of
         ranks. The number of extents does not shorten the log of a store whose budget has memory for more.
Method   Stores of 1e5 to 1e7 rows are filled and updated with small files, so that they have as many partitions,
         segments and extents as large ones; `SsdStore.stats()`, files and descriptors are compared with the formulas.
         Ranks are simulated by threads of one process: Gloo's groups on loopback, and `RowExchange` over a transport
         that counts. Nothing is timed except the processor time of opening a store, and with --times: saves of dirty
         rows, steps as `benchmarks/plan.py` measures them, and connections to torchrun; these need an idle machine.
         Predictions: a model with the rows, ids and network of model E of Zhao et al. (2020) on `paper_node`; step
         times are those of `thermocline plan`.
Command  python benchmarks/scale.py [--predict | --check | --times] [--rows N ...] [--ranks N ...] [--dir FOLDER]
         [--json FILE]
Target   Every measured figure within the bounds of its check, fixed before: equal for counts, else stated in the code.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Claim, console, environment, print_claims, write_json
from rich.table import Table

from thermocline.planner.cache_model import KeyDistribution
from thermocline.planner.cost_model import StepCost, Workload, predict
from thermocline.planner.hardware import Hardware, paper_node
from thermocline.planner.scale_model import (
    MAX_LOG_PAGES,
    MAX_MANIFEST,
    SHM_FILES,
    URGENT_SHARE,
    Ranks,
    StoreShape,
    StoreSize,
    Traffic,
)
from thermocline.planner.ssd_model import KEY_BYTES
from thermocline.planner.workload import cluster_of, preset_config
from thermocline.utils.text_format import format_size

if TYPE_CHECKING:
    from scale_checks import Check

NODES = (1, 4, 16, 64, 250, 1000)
KEYS = (1e9, 1e10, 1e11, 1e12)
GPUS = 8
DISK = 32e12
"""Assumed bytes of SSD per node."""
DISK_FACTOR = 2.5
"""Disk bytes per byte of rows: retained checkpoints and unmerged data (`planner/tier_sizing.py`)."""
FILE_LIMIT = 4096
"""Hard limit of open files: the kernel's default. systemd's is 524,288."""
OTHER_FILES = 64
OPEN_ROW_NS = 90
"""Time of opening a store per row in its log: 2.6 s for 1.5e8 keys, on 16 cores (benchmarks/lookahead.md)."""
FIELDS, IDS, DIM, DENSE = 50, 500, 12, 7_000_657
BATCH = 4096


def workload(keys: float) -> Workload:
    """Model E of Zhao et al. with another number of keys. Its operations are counted, as `thermocline plan` does."""
    return Workload(
        name="E",
        key_distribution=KeyDistribution.zipf([int(keys / FIELDS)] * FIELDS, [1.05] * FIELDS, IDS),
        fields=FIELDS,
        dim=DIM,
        row_bytes=4 * (DIM + 1),
        row_floats=DIM + 1,
        multiply_adds=20_986_434.0,
        floats=10_356.0,
        step_floats=5_181.0,
        dense_parameters=DENSE,
        dense_time=17.5,
        dense_parallel_share=0.995,
        dense_time_1_thread=16.2,
        batch=BATCH,
        read_ns=17_110.0,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """Predictions for one size. All figures are per rank unless stated otherwise."""

    nodes: int
    keys: float
    node: Hardware

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.nodes, GPUS)

    @property
    def store(self) -> StoreSize:
        return StoreSize(StoreShape(row_bytes=4 * (DIM + 1)), self.keys / self.ranks.world)

    @property
    def most_memory(self) -> float:
        """Largest default budget of a store: half of the machine, shared by its ranks."""
        return self.node.cpu.memory / 2 / GPUS

    @property
    def budget(self) -> float:
        """Default budget of a store that is reopened (`tiers.ssd.default_mem_budget`)."""
        need = 256e6 + 2 * (self.store.fence_bytes + self.store.filter_bytes)
        return min(max(self.node.cpu.memory / 8 / GPUS, need), self.most_memory)

    @property
    def open_files(self) -> float:
        return self.store.open_files + self.ranks.connections + SHM_FILES + OTHER_FILES

    def traffic(self, work: Workload) -> tuple[float, float]:
        """Bytes per step, with dense gradients: sent by a rank within its node, sent by a node."""
        keys = work.key_distribution
        rows = Traffic(self.ranks, DIM, keys.unique_keys(BATCH), keys.unique_keys(BATCH * GPUS))
        dense = 8 * DENSE
        within = rows.within_per_rank + dense * (GPUS - 1) / GPUS
        return within, rows.between_per_node + dense * (self.nodes - 1) / self.nodes

    def step(self, work: Workload) -> StepCost | None:
        """Step of `thermocline plan`; None if the index leaves too little DRAM for rows."""
        share = 0.8  # of DRAM, that a preset uses
        memory = self.node.cpu.memory - GPUS * self.store.index_bytes / share
        if memory < 0.1 * self.node.cpu.memory:
            return None
        node = dataclasses.replace(self.node, cpu=dataclasses.replace(self.node.cpu, memory=int(memory)))
        return predict(work, cluster_of(preset_config("E"), work, node, nodes=self.nodes, ranks=GPUS), node)

    @property
    def checkpoint_seconds(self) -> float:
        """Upper bound: every row of HBM and DRAM is dirty and written to the log."""
        assert self.node.gpu is not None
        cached = 0.8 * self.node.cpu.memory + 0.8 * GPUS * self.node.gpu.memory
        rows = min(cached, self.keys / self.nodes * (4 * (DIM + 1) + KEY_BYTES))
        return rows / self.node.disk.write_gbs * 1e-9

    @property
    def restart_seconds(self) -> float:
        """Upper bound of opening: the ranks of a node share the disk; one thread per store adds the rows of the log."""
        rate = self.node.disk.page_bytes / self.node.disk.page_us * 1e6
        return GPUS * self.store.open_bytes / rate + 2 * self.store.log_rows * OPEN_ROW_NS * 1e-9

    @property
    def limits(self) -> dict[str, float]:
        """Need of each limited thing, as a share of its limit."""
        store = self.store
        return {
            "DRAM": store.index_bytes / self.most_memory,
            "disk": DISK_FACTOR * self.keys / self.nodes * store.shape.entry_bytes / DISK,
            "open files": self.open_files / FILE_LIMIT,
            "rendezvous": (self.ranks.store_host_files + OTHER_FILES) / FILE_LIMIT,
            "extents": store.extents / (URGENT_SHARE * store.shape.max_extents(int(self.budget))),
            "log pages": store.log_bytes / store.shape.page_bytes / MAX_LOG_PAGES,
            "manifest": store.manifest_bytes / MAX_MANIFEST,
        }

    @property
    def former_extents(self) -> float:
        """Share of the limit of extents before it grew with the budget."""
        return self.store.extents / (URGENT_SHARE * 4096)


def predictions() -> list[dict[str, Any]]:
    """Print the tables of all sizes; return their figures."""
    node, records = paper_node(), []
    sizes = Table("nodes", "keys", "keys/rank", "base", "index", "files", "extents", "manifest", "connections")
    steps = Table("nodes", "keys", "within/rank", "between/node", "messages", "step ms", "bound by", "save s", "open s")
    limits = Table("nodes", "keys", "first limit", "share", "second", "share", "extents, cap of 4,096")
    for keys in KEYS:
        work = workload(keys)
        for nodes in NODES:
            job = Job(nodes, keys, node)
            store, cost, (within, between) = job.store, job.step(work), job.traffic(work)
            ordered = sorted(job.limits.items(), key=lambda item: -item[1])
            name = (str(nodes), f"{keys:.0e}")
            sizes.add_row(
                *name, f"{store.rows:.2g}", format_size(store.base_bytes), format_size(store.index_bytes),
                f"{store.open_files:,.0f}", f"{store.extents:,.0f}", format_size(store.manifest_bytes),
                f"{job.ranks.connections:,}",
            )  # fmt: skip
            steps.add_row(
                *name, format_size(within), format_size(between), f"{job.ranks.messages():,}",
                "-" if cost is None else f"{1e3 * cost.seconds:.0f}", "-" if cost is None else cost.slowest_resource,
                f"{job.checkpoint_seconds:.0f}", f"{job.restart_seconds:.1f}",
            )  # fmt: skip
            shares = [cell for limit, share in ordered[:2] for cell in (limit, f"{share:.0%}")]
            limits.add_row(*name, *shares, f"{job.former_extents:.0%}")
            records.append(
                {
                    "nodes": nodes,
                    "keys": keys,
                    "index_bytes": store.index_bytes,
                    "open_files": job.open_files,
                    "extents": store.extents,
                    "manifest_bytes": store.manifest_bytes,
                    "bytes_within_rank": within,
                    "bytes_between_node": between,
                    "step_seconds": None if cost is None else cost.seconds,
                    "checkpoint_seconds": job.checkpoint_seconds,
                    "restart_seconds": job.restart_seconds,
                    "limits": job.limits,
                }
            )
    console.print(f"predicted, not measured; node: {node.source}; {format_size(int(DISK))} of SSD per node assumed")
    for table in (sizes, steps, limits):
        console.print(table)
    return records


def checks(rows: list[int], worlds: list[int], folder: Path) -> tuple[dict[str, Any], list[Claim]]:
    """Measure and print all checks; return their figures, and the claims."""
    import scale_checks as measured  # loads torch

    found: list[measured.Check] = []
    opened = {}
    for row_bytes in (16, 52):
        for count in rows:
            of_store, opening = measured.check_store(folder, count, row_bytes)
            found += [check._replace(what=f"{count:,} rows of {row_bytes} B: {check.what}") for check in of_store]
            opened[f"{count:,} rows of {row_bytes} B"] = 1e9 * opening["processor_s"] / opening["log_rows"]
    few, merges_few = measured.extents_and_writes(folder, 100_000, 256 << 20)
    more, merges_more = measured.extents_and_writes(folder, 100_000, 4 << 30)
    for world in worlds:
        ranks = Ranks(world // GPUS, GPUS)
        found.append(measured.check_connections(ranks))
        found += measured.check_traffic(ranks, batch=64, dim=8)
    found.append(measured.check_connections(Ranks(1000, GPUS)))
    found += measured.check_sockets(64)
    found.append(measured.check_connection_memory(32))
    record, outside = report(found)
    times = "; ".join(f"{name}: {nanoseconds:.0f} ns" for name, nanoseconds in opened.items())
    console.print(f"opening a store, processor time per row in its log: {times}")
    claims = [
        outside,
        # The base is rewritten once per log of 20 % of it: 5 bytes per byte put.
        Claim("bytes that merges write per byte put", more, 6, "", at_most=True,
              detail=f"{merges_more} merges; {few:.1f} and {merges_few} with a limit of 4,096 extents"),
    ]  # fmt: skip
    print_claims("scale", claims)
    return {
        "checks": record,
        "open_ns_per_log_row": opened,
        "write_bytes_per_byte": {"4096": few, "16384": more},
    }, claims


def report(found: Sequence[Check]) -> tuple[list[dict[str, Any]], Claim]:
    """Print a table of checks; return them for the record, and the claim that all are within their bounds."""
    table = Table("figure", "predicted", "measured", "ratio", "allowed", "")
    for check in found:
        allowed = f"{check.least:.3g} to {check.most:.3g}"
        figures = (f"{check.predicted:,.0f}", f"{check.measured:,.0f}", f"{check.ratio:.2f}")
        table.add_row(check.what, *figures, allowed, "ok" if check.passed else "MISSED")
    console.print(table)
    record = [{**check._asdict(), "ratio": check.ratio, "passed": check.passed} for check in found]
    missed = sum(not check.passed for check in found)
    return record, Claim("checks outside their bounds", missed, 0, "", at_most=True)


def times(folder: Path) -> tuple[dict[str, Any], list[Claim]]:
    """Measure and print saves, steps and the rendezvous; return their figures, and the claims."""
    from scale_times import measure_times  # loads torch

    found, measured = measure_times(folder)
    record, outside = report(found)
    print_claims("scale", [outside])
    return {"checks": record, **measured}, [outside]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="predictions only")
    parser.add_argument("--check", action="store_true", help="measurements only")
    parser.add_argument("--times", action="store_true", help="measurements of times only, on an idle machine")
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000], help="rows of the stores")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512], help="ranks simulated, multiples of 8")
    parser.add_argument("--dir", type=Path, help="folder for the stores; default: the system's temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(["torch", "numpy"])}
    claims: list[Claim] = []
    if not (options.check or options.times):
        record["predictions"] = predictions()
    if not options.predict:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            folder = Path(name)
            measured, claims = times(folder) if options.times else checks(options.rows, options.ranks, folder)
        record |= measured
    if options.json:
        write_json(options.json, record, claims)
    return 0 if all(claim.met for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
