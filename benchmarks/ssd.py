"""The SSD store against RocksDB, LMDB and the raw device.

Claims   get       random rows: 4x the best peer
         cycle     get, put, commit: 4x the best peer; write amplification <= 6.5, space amplification <= 1.6, DRAM <= 4
                   bytes per key
         puts      0.7 of the disk's write bandwidth / write amplification (ssd_puts.py)
         floor     90 % of the speed of raw reads of the same pages
         large     a tenth of the rows and all of them in one get, in hash order: 80 % of the speed of raw reads of the
                   same pages on all cores; working memory at most 4 bytes per key and 4 MB per thread
         growth    that fraction at ten times the keys >= 0.9 of the fraction before
Method   All engines run in one process each, on the same rows and memory budget; the page cache of their files is
         emptied before each timed batch. `get` alternates between engines. `cycle` runs one engine after the other,
         because background work of one would disturb the next; its figures are those of the steady state.
Command  python benchmarks/ssd.py --quick                  small sizes, under two minutes
         python benchmarks/ssd.py --json FILE              full size, half an hour, 40 GB of disk
         python benchmarks/ssd.py --only get --keep --json FILE     one claim; FILE collects claims of equal sizes
         python benchmarks/ssd.py --only cycle,puts --json FILE     what writes
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import multiprocessing
import os
import resource
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Claim,
    console,
    data_folder,
    earlier_results,
    environment,
    noise,
    print_claims,
    progress_bar,
    select_claims,
    spread,
    write_json,
)
from engines import (
    ENGINES,
    PEERS,
    Data,
    Engine,
    Ours,
    disk_bandwidth,
    folder_bytes,
    in_hash_order,
    installed,
    opened,
    prepare,
)
from ssd_puts import puts_claims, run_puts

CLAIMS = ("get", "cycle", "puts", "floor", "large", "growth")
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rows: int
    row_bytes: int
    batch: int
    """Keys per get or put."""
    budget: int
    """Bytes of memory per engine."""
    rounds: int
    """Batches per engine and choice of threads in `get`, and of each kind in `floor`."""
    cycles: dict[str, int]
    commit_every: int
    put_batches: int
    """Batches per round of `puts`."""
    growth_rows: tuple[int, int]
    growth_row_bytes: int


FULL = Sizes(
    rows=20_000_000,
    row_bytes=128,
    batch=100_000,
    budget=256 << 20,
    rounds=5,
    cycles={"ours": 150, "rocksdb": 150, "lmdb": 30},
    commit_every=10,
    put_batches=40,
    growth_rows=(10_000_000, 100_000_000),
    growth_row_bytes=64,
)
QUICK = dataclasses.replace(
    FULL,
    rows=1_000_000,
    batch=20_000,
    budget=64 << 20,
    rounds=2,
    cycles={"ours": 80, "rocksdb": 20, "lmdb": 10},
    growth_rows=(500_000, 5_000_000),
)


def ready(kind: str, folder: Path, data: Data, budget: int, *, writes: bool = False) -> Engine:
    """Engine with its rows loaded, not opened."""
    name = f"{kind}-{data.rows}x{data.row_bytes}"
    engine = ENGINES[kind](folder / name, data, budget, writes=writes)
    if not engine.path.with_suffix(".ready").exists():
        with progress_bar(f"loading {engine.name}", data.rows) as progress:
            prepare(engine, progress)
    return engine


def timed(call: Any, *args: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - start, result


# ---- get


def run_get(sizes: Sizes, folder: Path, kinds: list[str]) -> Result:
    """Time batches of all engines alternately, with one of ours between two batches of peers."""
    data = Data(sizes.rows, sizes.row_bytes)
    rng = np.random.default_rng(11)
    engines = {kind: ready(kind, folder, data, sizes.budget) for kind in kinds}
    seconds: dict[str, list[float]] = {}

    def batch(engine: Engine, label: str) -> None:
        engine.after_get()
        if engine.name == "lmdb":  # an untimed warm-up: its page cache then holds about what the budget allows
            engine.get(engine.as_keys(data.sample(rng, sizes.batch // 2)))
        keys = data.sample(rng, sizes.batch)
        took, result = timed(engine.get, engine.as_keys(keys))
        engine.check(keys, result)
        seconds.setdefault(label, []).append(took)

    with ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(opened(engine)).compact()
        peers = [(e, t) for kind, e in engines.items() if kind != "ours" for t in e.thread_choices]
        total = sizes.rounds * max(1, len(peers))
        with noise() as around, progress_bar(f"get of {sizes.batch:,} random rows", total) as progress:
            for done in range(total):
                batch(engines["ours"], "ours")
                if peers:
                    engine, engine.threads = peers[done % len(peers)]
                    batch(engine, f"{engine.name}, {engine.threads} threads")
                progress(done + 1)
        counters = {engine.name: engine.counters() for engine in engines.values()}
    rates = {label: spread([sizes.batch / s for s in values]) for label, values in seconds.items()}
    return {"rows_per_second": rates, "counters": counters, **around}


# ---- cycle


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def device_writes() -> int:
    return int(Path("/proc/self/io").read_text().split("\nwrite_bytes: ")[1].split()[0])


def fastest_threads(engine: Engine, rng: np.random.Generator, batch: int) -> int:
    """Number of threads with the shortest get."""
    seconds = {}
    for threads in engine.thread_choices:
        engine.threads = threads
        engine.after_get()
        seconds[threads] = timed(engine.get, engine.as_keys(engine.data.sample(rng, batch)))[0]
    return min(seconds, key=seconds.__getitem__)


def cycle_process(kind: str, sizes: Sizes, folder: Path) -> Result:
    """Run the cycles of one engine in a separate process, so that memory and writes are those of this engine only."""
    # A fixed threshold: large arrays are returned to the system when freed, and are not counted as used.
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    data = Data(sizes.rows, sizes.row_bytes)
    rng = np.random.default_rng(22)
    engine = ready(kind, folder, data, sizes.budget, writes=True)
    # The benchmark's buffers of a get and a put are allocated before memory is counted.
    get_keys, put_rows = engine.as_keys(data.sample(rng, sizes.batch)), engine.as_rows(data.sample(rng, sizes.batch), 0)
    before = resident_bytes()
    cycles = sizes.cycles[kind]
    records: list[Result] = []
    floor: Result | None = None
    with opened(engine):
        if len(engine.thread_choices) > 1:
            engine.threads = fastest_threads(engine, rng, sizes.batch)
        started = time.perf_counter()
        with progress_bar(f"cycles of {engine.name}", cycles) as progress:
            for i in range(cycles):
                engine.after_get()
                keys = data.sample(rng, sizes.batch)
                get_keys, put_rows = engine.as_keys(keys), engine.as_rows(keys, i + 1)
                get_s, result = timed(engine.get, get_keys)
                put_s, _ = timed(engine.put, put_rows)
                resident = resident_bytes() - before
                peak_disk = max(folder_bytes(engine.path), int(engine.counters().get("disk_bytes", 0)))
                last = (i + 1) % sizes.commit_every == 0
                commit_s = timed(engine.commit)[0] if last else 0.0
                engine.check(keys, result)
                times = {"get_s": get_s, "put_s": put_s, "commit_s": commit_s}
                disk = {"disk": max(folder_bytes(engine.path), peak_disk), "device_writes": device_writes()}
                records.append({**times, **disk, "rss": resident, **engine.counters()})
                progress(i + 1)
        wall = time.perf_counter() - started
        if isinstance(engine, Ours):
            floor = floor_of(engine, sizes, rng)
    return summarise_cycles(kind, engine, sizes, records, wall, floor)


def summarise_cycles(
    kind: str, engine: Engine, sizes: Sizes, records: list[Result], wall: float, floor: Result | None
) -> Result:
    """Figures of the steady state: from the first commit after merging began; peers: after a third of the cycles."""
    every = sizes.commit_every
    merging = next((i for i, r in enumerate(records) if r.get("merges", 1) > 0), len(records) - every)
    skip = merging if kind == "ours" else len(records) // 3
    skip = min(-(-skip // every) * every, len(records) - every)
    steady, first = records[skip:], records[max(skip - 1, 0)]
    put_bytes = len(steady) * sizes.batch * (8 + sizes.row_bytes)
    seconds = sum(r["get_s"] + r["put_s"] + r["commit_s"] for r in steady)
    blocks = [records[i : i + every] for i in range(skip, len(records) - every + 1, every)]
    rates = [every * sizes.batch / sum(r["get_s"] + r["put_s"] + r["commit_s"] for r in b) for b in blocks]
    timed_s = sum(r["get_s"] + r["put_s"] + r["commit_s"] for r in records)
    live = sizes.rows * (8 + sizes.row_bytes)
    out: Result = {
        "rows_per_second": {"overall": len(steady) * sizes.batch / seconds, **spread(rates)},
        "cycles": len(records),
        "steady_cycles": len(steady),
        "rows_put_share": len(steady) * sizes.batch / sizes.rows,
        "get_s": spread([r["get_s"] for r in steady]),
        "put_s": spread([r["put_s"] for r in steady]),
        "slowest_put_s": max(r["put_s"] for r in steady),
        "commit_s": spread([r["commit_s"] for r in steady if r["commit_s"] > 0]),
        "untimed_share": 1 - timed_s / wall,
        "threads": engine.threads,
        "device_write_amplification": (steady[-1]["device_writes"] - first["device_writes"]) / put_bytes,
        "space_amplification": max(r["disk"] for r in steady) / live,
        "peak_rss_bytes": max(r["rss"] for r in records),
        "counters": {k: v for k, v in records[-1].items() if not k.endswith("_s")},
    }
    if "bytes_written" in first:
        out["write_amplification"] = (steady[-1]["bytes_written"] - first["bytes_written"]) / put_bytes
    if "stall_seconds" in first:
        out["stall_seconds"] = steady[-1]["stall_seconds"] - first["stall_seconds"]
    if kind == "ours":
        out["dram_per_key"] = max(r["mem_total"] for r in steady) / sizes.rows
        out["rss_per_key"] = max(r["rss"] for r in steady) / sizes.rows
        out["floor"] = floor
        out["series"] = [round(r["get_s"] + r["put_s"] + r["commit_s"], 3) for r in records]
    return out


def run_cycle(sizes: Sizes, folder: Path, kinds: list[str]) -> Result:
    """Run the engines one after the other: background work of one would disturb the next."""
    out = {}
    spawn = multiprocessing.get_context("spawn")
    for kind in kinds:
        with noise() as around, concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            out[kind] = pool.submit(cycle_process, kind, sizes, folder).result()
        out[kind].update(around)
    return out


# ---- puts


def run_sustained_puts(sizes: Sizes, folder: Path) -> Result:
    engine = ready("ours", folder, Data(sizes.rows, sizes.row_bytes), sizes.budget, writes=True)
    assert isinstance(engine, Ours)
    how = {"batches": sizes.put_batches, "rounds": sizes.rounds, "commit_every": sizes.commit_every}
    with opened(engine):
        return run_puts(engine, batch=sizes.batch, **how)


# ---- floor and growth


def floor_of(engine: Ours, sizes: Sizes, rng: np.random.Generator) -> Result:
    """Alternate gets and raw reads of the pages of such gets, on new random keys."""
    gets, floors = [], []
    # Untimed: the store measures the device and allocates its buffers.
    engine.get(engine.as_keys(engine.data.sample(rng, sizes.batch)))
    before = engine.counters()
    for _ in range(4 * sizes.rounds):
        keys = engine.data.sample(rng, sizes.batch)
        took, result = timed(engine.get, engine.as_keys(keys))
        engine.check(keys, result)
        gets.append(took)
        floors.append(engine.store.read_floor(engine.data.sample(rng, sizes.batch)))
    after = engine.counters()
    share = sorted(f / g for f, g in zip(floors, gets, strict=True))
    per_key = {n: (after[n] - before[n]) / (after["keys_read"] - before["keys_read"]) for n in ("false_pages",)}
    out: Result = {"share": spread(share), "get_s": spread(gets), "floor_s": spread(floors)}
    out["share_of_medians"] = out["floor_s"]["median"] / out["get_s"]["median"]
    out["reads_per_get"] = (after["reads"] - before["reads"]) / (2 * len(gets))
    out["megabytes_per_get"] = (after["bytes_read"] - before["bytes_read"]) / (2e6 * len(gets))
    return {**out, **per_key}


def run_floor(sizes: Sizes, folder: Path, data: Data | None = None) -> Result:
    data = data or Data(sizes.rows, sizes.row_bytes)
    engine = ready("ours", folder, data, sizes.budget)
    assert isinstance(engine, Ours)
    with opened(engine), progress_bar(f"floor at {data.rows:,} rows", 1) as progress:
        engine.compact()
        with noise() as around:
            result = floor_of(engine, sizes, np.random.default_rng(33))
        stats = engine.counters()
        progress(1)
    return {**result, **around, "dram_per_key": stats["mem_total"] / data.rows}


def run_large(sizes: Sizes, folder: Path) -> Result:
    """Alternate gets of many keys in hash order and raw reads of their pages."""
    data = Data(sizes.rows, sizes.row_bytes)
    rng = np.random.default_rng(44)
    engine = ready("ours", folder, data, sizes.budget)
    assert isinstance(engine, Ours)
    out: Result = {}
    counts = (sizes.rows // 10, sizes.rows)
    with opened(engine), noise() as around, progress_bar("get of many rows", len(counts)) as progress:
        engine.compact()
        for done, count in enumerate(counts):
            gets, floors, processor = [], [], []
            engine.get(engine.as_keys(in_hash_order(data.sample(rng, count))))  # untimed: touches the output
            before = engine.counters()
            for _ in range(3):
                keys = in_hash_order(data.sample(rng, count))
                start = time.process_time()
                took, result = timed(engine.get, engine.as_keys(keys))
                processor.append(time.process_time() - start)
                engine.check(keys[: 1 << 20], (result[0], result[1][: 1 << 20]))
                gets.append(took)
                floors.append(engine.store.read_floor(keys))
            after = engine.counters()
            figures: Result = {"get_s": spread(gets), "floor_s": spread(floors), "processor_s": spread(processor)}
            figures["share_of_medians"] = figures["floor_s"]["median"] / figures["get_s"]["median"]
            for name in ("reads", "bytes_read"):
                figures[name] = (after[name] - before[name]) / (2 * len(gets))
            figures["gigabytes_per_second"] = figures["bytes_read"] / figures["get_s"]["median"] / 1e9
            out[str(count)] = figures
            progress(done + 1)
        out["get_scratch_peak"] = engine.counters()["get_scratch_peak"]
    out["disk_gigabytes_per_second"] = disk_bandwidth(engine.path) / 1e9
    return {**out, **around}


def run_growth(sizes: Sizes, folder: Path) -> Result:
    """Measure both sizes alternately, three times, so that other load affects both."""
    small, large = sizes.growth_rows
    runs: dict[str, list[Result]] = {str(small): [], str(large): []}
    for rows in (small, large):
        ready("ours", folder, Data(rows, sizes.growth_row_bytes), sizes.budget)
    for _ in range(3):
        for rows in (small, large):
            runs[str(rows)].append(run_floor(sizes, folder, Data(rows, sizes.growth_row_bytes)))
    share = {rows: spread([r["share_of_medians"] for r in results]) for rows, results in runs.items()}
    return {"share": share, "runs": runs}


# ---- claims


def claims_of(results: Result, sizes: Sizes) -> list[Claim]:
    out = []
    if "get" in results:
        rates = {k: v["median"] for k, v in results["get"]["rows_per_second"].items()}
        ours = rates.pop("ours")
        if rates:
            best = max(rates, key=rates.__getitem__)
            detail = f"{ours:,.0f} rows/s against {rates[best]:,.0f} ({best})"
            busy = results["get"]["others_cpu"]
            out.append(Claim("get of random rows", ours / rates[best], 4, detail=detail, others_cpu=busy))
    cycle = results.get("cycle", {})
    if "ours" in cycle:
        ours = cycle["ours"]
        rates = {k: v["rows_per_second"]["overall"] for k, v in cycle.items() if k != "ours"}
        rate = ours["rows_per_second"]["overall"]
        if rates:
            best = max(rates, key=rates.__getitem__)
            detail = f"{rate:,.0f} rows/s against {rates[best]:,.0f} ({best})"
            busy = max(ours["others_cpu"], cycle[best]["others_cpu"])
            out.append(Claim("sustained cycle", rate / rates[best], 4, detail=detail, others_cpu=busy))
        detail = f"of {ours['steady_cycles']} cycles, {ours['rows_put_share']:.2f} times the rows put"
        out.append(Claim("write amplification", ours["write_amplification"], 6.5, at_most=True, detail=detail))
        detail = f"largest folder size, against {8 + sizes.row_bytes} bytes per live row"
        out.append(Claim("space amplification", ours["space_amplification"], 1.6, at_most=True, detail=detail))
        detail = f"counted by the store; the process grew by {ours['rss_per_key']:.2f}"
        out.append(Claim("DRAM per key", ours["dram_per_key"], 4, "bytes", at_most=True, detail=detail))
        share = ours["floor"]["share_of_medians"]
        busy = ours["others_cpu"]
        out.append(Claim("share of the floor, log in use", share, 0.8, detail="after the last cycle", others_cpu=busy))
    if "puts" in results:
        out += puts_claims(results["puts"])
    if "floor" in results:
        floor = results["floor"]
        detail = f"get {floor['get_s']['median'] * 1e3:.0f} ms, raw reads {floor['floor_s']['median'] * 1e3:.0f} ms"
        share, busy = floor["share_of_medians"], floor["others_cpu"]
        out.append(Claim("share of the floor, merged", share, 0.9, detail=detail, others_cpu=busy))
    if "large" in results:
        large = results["large"]
        disk = large["disk_gigabytes_per_second"]
        for count in (sizes.rows // 10, sizes.rows):
            r = large[str(count)]
            detail = (
                f"{count / r['get_s']['median'] / 1e6:.1f} million rows/s, {r['gigabytes_per_second']:.2f} GB/s of "
            )
            detail += f"{disk:.2f} by 1 MiB reads, {r['reads']:,.0f} reads"
            share, busy = r["share_of_medians"], large["others_cpu"]
            out.append(Claim(f"share of the floor, get of {count:,}", share, 0.8, detail=detail, others_cpu=busy))
        bound = 4 * sizes.rows + 4e6 * max(2, min(8, os.cpu_count() or 1))
        detail = f"{large['get_scratch_peak'] / 1e6:.0f} MB for {sizes.rows:,} keys"
        out.append(Claim("working memory of a get", large["get_scratch_peak"] / bound, 1, at_most=True, detail=detail))
    if "growth" in results:
        small, large = (results["growth"]["share"][str(rows)]["median"] for rows in sizes.growth_rows)
        detail = f"share {large:.2f} at {sizes.growth_rows[1]:,} keys, {small:.2f} at {sizes.growth_rows[0]:,}"
        busy = max(run["others_cpu"] for runs in results["growth"]["runs"].values() for run in runs)
        out.append(Claim("growth of the share", large / small, 0.9, detail=detail, others_cpu=busy))
    return out


def print_rates(results: Result) -> None:
    for label, rate in results.get("get", {}).get("rows_per_second", {}).items():
        console.print(
            f"  get    {label:22} {rate['median']:>10,.0f} rows/s  ({rate['p20']:,.0f} to {rate['p80']:,.0f})"
        )
    for kind, r in results.get("cycle", {}).items():
        rate, get, put = r["rows_per_second"]["overall"], r["get_s"]["median"], r["put_s"]["median"]
        console.print(
            f"  cycle  {kind:22} {rate:>10,.0f} rows/s  get {get:.2f} s, put {put:.2f} s (slowest "
            f"{r['slowest_put_s']:.2f}), commit {r['commit_s']['median']:.2f} s, device writes x"
            f"{r['device_write_amplification']:.1f}, disk x{r['space_amplification']:.2f}, {r['steady_cycles']} cycles"
        )
    if puts := results.get("puts"):
        median = {name: value["median"] for name, value in puts.items() if isinstance(value, dict)}
        console.print(
            f"  puts   {'thermocline':22} {median['rows_per_second']:>10,.0f} rows/s  "
            f"writes x{median['write_amplification']:.2f}, disk x{puts['space_amplification']:.2f}, up to "
            f"{puts['merges_running_max']} merges at once, {median['merge_bytes_per_thread_second'] / 1e6:,.0f} MB/s "
            f"each, {median['processor_s'] / median['seconds']:.1f} cores"
        )


def disk_needed(sizes: Sizes, wanted: list[str], kinds: list[str]) -> int:
    main = sizes.rows * (sizes.row_bytes + 8) * (2 * len(kinds)) if wanted != ["growth"] else 0
    growth = sum(sizes.growth_rows) * (sizes.growth_row_bytes + 8) * 3 // 2 if "growth" in wanted else 0
    return main + growth


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE, which collects claims of equal sizes")
    parser.add_argument("--rounds", type=int, help="rounds of get, puts and floor")
    parser.add_argument("--rows", type=int, help="rows of get, cycle and floor")
    parser.add_argument("--cycles", type=int, help="cycles of our store; those of the peers in proportion")
    parser.add_argument("--dir", help="where the folder of the data is made; default: among temporary files")
    parser.add_argument("--only", help=f"comma-separated claims of {','.join(CLAIMS)}")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated engines (default: all)")
    parser.add_argument("--keep", action="store_true", help="keep the data for the next run")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sizes = QUICK if args.quick else FULL
    if args.rows:
        sizes = dataclasses.replace(sizes, rows=args.rows)
    if args.rounds:
        sizes = dataclasses.replace(sizes, rounds=args.rounds)
    if args.cycles:
        share = args.cycles / sizes.cycles["ours"]
        scaled = {k: max(sizes.commit_every, round(v * share)) for k, v in sizes.cycles.items()}
        sizes = dataclasses.replace(sizes, cycles=scaled)
    wanted = select_claims(args.only, CLAIMS)
    kinds = [kind for kind in ENGINES if kind in args.engines.split(",")]
    for kind in [k for k in kinds if not installed(k)]:
        console.print(f"[yellow]skipped: {kind}, because {PEERS[kind][1]} cannot be installed[/]")
        kinds.remove(kind)
    folder = data_folder(args.dir)
    need, free = disk_needed(sizes, wanted, kinds), shutil.disk_usage(folder).free
    if need > free:
        console.print(f"[yellow]about {need / 1e9:.0f} GB of disk needed, {free / 1e9:.0f} GB free[/]")
    note = "small sizes, not comparable to full size" if args.quick else "full size"
    console.print(
        f"{note}; {sizes.rows:,} rows of {sizes.row_bytes} bytes, batches of {sizes.batch:,}, {sizes.budget >> 20} MB "
        "of memory each.\nOurs and RocksDB bypass the page cache (O_DIRECT); the page cache of every engine's files is "
        "emptied before\neach timed batch (MADV_DONTNEED, POSIX_FADV_DONTNEED). The host of a virtual disk may cache."
    )
    results: Result = earlier_results(args.json, dataclasses.asdict(sizes))
    try:
        for name in wanted:
            if name == "get":
                results[name] = run_get(sizes, folder, kinds)
            elif name == "cycle":
                results[name] = {**results.get(name, {}), **run_cycle(sizes, folder, kinds)}
            elif name == "puts":
                results[name] = run_sustained_puts(sizes, folder)
            else:
                run = {"floor": run_floor, "large": run_large, "growth": run_growth}[name]
                results[name] = run(sizes, folder)
            if args.json:
                record = {"environment": environment(["numpy", *(module for module, _ in PEERS.values())])}
                record |= {"sizes": dataclasses.asdict(sizes), "quick": args.quick, "results": results}
                write_json(args.json, record, claims_of(results, sizes))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print_rates(results)
    print_claims("SSD store", claims_of(results, sizes))


if __name__ == "__main__":
    main()
