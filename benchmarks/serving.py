"""Benchmark of published rows: lookups in one process, lookups after many deltas, cost of a delta.

    python benchmarks/serving.py --rows 2e6                                         a minute
    python benchmarks/serving.py --rows 1e8 --parts lookups,direct --json FILE      8 GB of disk and of page cache
    python benchmarks/serving.py --rows 1e8 --parts lookups,lmdb --json FILE        10 GB of disk
    python benchmarks/serving.py --rows 1e8 --parts lookups,rocksdb --json FILE     10 GB of disk

Lookups are of 1,000 random keys of rows of 64 bytes (dim 16, fp32), by one thread on one core, all pages in the page
cache and verified before. The time of a lookup is processor time and includes the call from Python. RocksDB and LMDB
are measured after them where they can be installed, with the keys converted beforehand, and read once completely
before: LMDB is then in the page cache, RocksDB in its block cache of 7.5 GB. Direct lookups need a folder on a device
(--folder), not in memory. `lookup_server.py` measures the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, console, environment, noise, print_claims, progress_bar, spread, write_json
from engines import Data, installed

import thermocline as tc
from thermocline import serving
from thermocline.embedding.key_hash import hash_keys
from thermocline.training.publish import publish_table

DIM = 16
BATCH = 1000
PIECE = 1 << 20
PARTS = ("lookups", "deltas", "direct", "exports", "lmdb", "rocksdb")
"""lookups: in a base; deltas: after many deltas, and the cost of one; direct: past the page cache; exports: from a
store, all rows and changes; lmdb, rocksdb: lookups of peers. The publication is deleted before the last three."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=2e6)
    parser.add_argument("--deltas", type=int, default=1000, help="deltas applied before lookups are timed again")
    parser.add_argument("--delta-rows", type=int, default=1000, help="changed rows of each of these deltas")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--exports", type=int, default=3, help="times that the exports are repeated")
    parser.add_argument("--folder", type=Path, help="where the files are made; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts has {sorted(unknown)}: they are {', '.join(PARTS)}")
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        record, claims = measure(folder, options, parts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_claims("Published rows", claims)
    if options.json:
        write_json(options.json, {**environment(["numpy", "rocksdict", "lmdb"]), **record}, claims)


def measure(folder: Path, options: argparse.Namespace, parts: list[str]) -> tuple[dict[str, Any], list[Claim]]:
    rows, rounds = int(options.rows), options.rounds
    keys = Data(rows, 4 * DIM).keys(np.arange(rows))
    keys = keys[np.argsort(hash_keys(keys))]
    record: dict[str, Any] = {"rows": rows, "parts": parts}
    with noise() as load:
        if {"lookups", "deltas", "direct"} & set(parts):
            with serving.Publication(folder / "served") as publication:
                record |= published(folder, publication, keys, options, parts)
            shutil.rmtree(folder / "served")
        if "exports" in parts:
            record["exports"] = [exports(folder, keys) for _ in range(options.exports)]
        for name in ("lmdb", "rocksdb"):
            if name in parts:
                record.setdefault("peers", {}).update(peer(name, folder, keys, rounds))
    return {**record, **load}, claims_of(record)


def published(
    folder: Path, publication: serving.Publication, keys: Any, options: argparse.Namespace, parts: list[str]
) -> dict[str, Any]:
    """Publish a base; time lookups in it, after deltas, and past the page cache."""
    rng, rounds = np.random.default_rng(1), options.rounds
    start = time.perf_counter()
    with progress_bar("publishing the base", len(keys)) as advance:
        base = publication.publish_base([table(keys, 0, advance)], step=0)
    figures: dict[str, Any] = {"base_seconds": time.perf_counter() - start, "base_bytes": base.tables[0].bytes}
    snapshots = {"base": serving.open(folder / "served")}
    start = time.perf_counter()
    snapshots["base"].verify()
    figures["verify_seconds"] = time.perf_counter() - start
    sample = keys[rng.integers(0, len(keys), BATCH)]
    assert np.array_equal(snapshots["base"].lookup(sample), weights(sample, 0))
    if "direct" in parts:
        figures["direct"] = direct_reads(folder, keys, rng, rounds)
    if "deltas" in parts:
        snapshots["deltas"] = serving.open(folder / "served")
        snapshots["deltas"].verify()
        figures |= {"deltas": options.deltas, "delta_rows": options.delta_rows}
        figures["apply_seconds"] = apply_deltas(publication, snapshots["deltas"], keys, options, rng)
    figures["mem_bytes"] = {name: snapshot.mem_bytes for name, snapshot in snapshots.items()}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    try:
        rates = rates_of({name: snapshot.lookup for name, snapshot in snapshots.items()}, keys, rng, rounds)
    finally:
        os.sched_setaffinity(0, cores)
    figures["pages_read_from_disk"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    if figures["pages_read_from_disk"]:
        console.print(f"{figures['pages_read_from_disk']:,} pages were not in the page cache while lookups were timed")
    figures["keys_per_processor_second"] = {name: spread(values) for name, values in rates.items()}
    if "deltas" in parts:
        pairs = zip(rates["deltas"], rates["base"], strict=True)
        figures["deltas_of_base"] = spread([delta / base for delta, base in pairs])
        changed = keys[np.sort(np.random.default_rng(3).choice(len(keys), len(keys) // 100, replace=False))]
        start = time.perf_counter()
        delta = publication.publish_delta([table(changed, 1)], step=10**9)
        figures["delta_seconds"], figures["delta_bytes"] = time.perf_counter() - start, delta.tables[0].bytes
    return figures


def apply_deltas(
    publication: serving.Publication,
    snapshot: serving.Snapshot,
    keys: Any,
    options: argparse.Namespace,
    rng: np.random.Generator,
) -> float:
    """Publish deltas of random rows, which the snapshot follows; return the seconds."""
    start = time.perf_counter()
    with progress_bar(f"applying {options.deltas:,} deltas", options.deltas) as advance:
        for number in range(options.deltas):
            chosen = keys[np.unique(rng.integers(0, len(keys), options.delta_rows))]
            publication.publish_delta([table(chosen, number)], step=number + 2)
            snapshot.refresh()
            advance(number + 1)
    return time.perf_counter() - start


def exports(folder: Path, keys: Any) -> dict[str, Any]:
    """Publish a table on SSD, all rows and then 1 % of them, changed at random.

    Processor seconds are those of the calling thread, which does all of it: merges of the store run on others.
    The log of the store is not empty, as in training: 2 % of the rows are put after the base files were merged.
    """
    rng = np.random.default_rng(4)
    figures: dict[str, Any] = {}
    opened = tc.Table(DIM, tc.SGD(lr=0.1), mem="64MB", ssd=folder / "store", name="t")
    with contextlib.closing(opened):
        for first in range(0, len(keys), PIECE):
            opened.backend.import_rows(keys[first : first + PIECE], stored(keys[first : first + PIECE], 0))
        opened.store.merge()
        for name, share, delta in (("before", 50, None), ("full", 50, False), ("delta", 100, True)):
            chosen = keys[np.unique(rng.integers(0, len(keys), len(keys) // share))]
            opened.backend.import_rows(chosen, stored(chosen, 1 + share))
            opened.store.commit()
            if delta is None:
                continue
            wait_for_merges(opened)
            start, processor = time.perf_counter(), time.thread_time()
            version = publish_table(opened, folder / "exported", step=1, delta=delta)
            figures[f"{name}_export"] = {
                "seconds": time.perf_counter() - start,
                "processor_seconds": time.thread_time() - processor,
                "rows": version.tables[0].rows,
                "bytes": version.tables[0].bytes,
            }
    shutil.rmtree(folder / "store")
    shutil.rmtree(folder / "exported")
    return figures


def wait_for_merges(opened: tc.Table, seconds: float = 2.0) -> None:
    """Wait until no merge takes part of the machine; one that keeps pace with puts may pause until the next put."""
    end = time.monotonic() + seconds
    while opened.store.stats().merges_running and time.monotonic() < end:
        time.sleep(0.1)


def stored(keys: Any, version: int) -> Any:
    return weights(keys, version).view(np.uint8)


def table(keys: Any, version: int, advance: Callable[[int], None] = lambda done: None) -> serving.TableRows:
    def pieces() -> Iterator[tuple[Any, Any]]:
        for first in range(0, len(keys), PIECE):
            part = keys[first : first + PIECE]
            yield part, weights(part, version)
            advance(first + len(part))

    return serving.TableRows(name="t", dim=DIM, rows=pieces())


def weights(keys: Any, version: int) -> Any:
    low = (keys & np.uint64(0xFFFF)).astype(np.float32)[:, None]
    return low + np.arange(DIM, dtype=np.float32) + np.float32(version)


def rates_of(sides: dict[str, Any], keys: Any, rng: np.random.Generator, rounds: int) -> dict[str, list[float]]:
    """Keys per processor second of each side, in alternation."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        batches = [keys[rng.integers(0, len(keys), BATCH)] for _ in range(300)]
        for name, lookup in sides.items():
            start = time.process_time()
            for batch in batches:
                lookup(batch)
            if turn:  # the first round warms caches
                rates[name].append(len(batches) * BATCH / (time.process_time() - start))
    return rates


def direct_reads(folder: Path, keys: Any, rng: np.random.Generator, rounds: int) -> dict[str, Any]:
    """Time lookups in a base past the page cache, by one thread, and equal page reads alone, in alternation."""
    snapshot = serving.open(folder / "served", direct=True)
    view = snapshot.state.views["t"]
    lookups, floors = [], []
    for turn in range(rounds + 1):
        batches = [keys[rng.integers(0, len(keys), BATCH)] for _ in range(20)]
        start = time.perf_counter()
        for batch in batches[:10]:
            snapshot.lookup(batch)
        seconds = time.perf_counter() - start
        floor = sum(view.read_floor(batch) for batch in batches[10:])
        if turn:
            lookups.append(10 * BATCH / seconds)
            floors.append(10 * BATCH / floor)
    ratios = [lookup / floor for lookup, floor in zip(lookups, floors, strict=True)]
    return {"keys_per_second": spread(lookups), "floor": spread(floors), "of_floor": spread(ratios)}


def peer(name: str, folder: Path, keys: Any, rounds: int) -> dict[str, Any]:
    """Keys per processor second of RocksDB or LMDB, one thread: the same keys, rows of the same size, all in memory."""
    from engines import ENGINES

    if not installed(name):
        console.print(f"{name} cannot be installed here: not measured")
        return {}
    rng = np.random.default_rng(2)
    data = Data(len(keys), 4 * DIM)
    engine = ENGINES[name](folder / name, data, 1 << 33, writes=False)
    with progress_bar(f"loading {name}", data.rows) as advance:
        engine.load(advance)
    engine.open()
    engine.threads = 1
    rows = engine.read_all()
    assert rows == data.rows, f"{name} has {rows} rows"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rates = []
    for turn in range(rounds + 1):
        batches = [engine.as_keys(keys[rng.integers(0, len(keys), BATCH)]) for _ in range(30)]
        start = time.process_time()
        for batch in batches:
            engine.get(batch)
        if turn:
            rates.append(len(batches) * BATCH / (time.process_time() - start))
    os.sched_setaffinity(0, cores)
    engine.close()
    shutil.rmtree(engine.path, ignore_errors=True)
    return {name: spread(rates)}


def claims_of(record: dict[str, Any]) -> list[Claim]:
    claims = []
    rates = record.get("keys_per_processor_second")
    if rates is not None:
        claims.append(Claim("lookups by one core, page cache", rates["base"]["median"] / 1e6, 4.0, "M keys/s"))
    if "deltas_of_base" in record:
        share, seconds = record["deltas_of_base"]["median"], record["delta_seconds"] / record["base_seconds"]
        size = record["delta_bytes"] / record["base_bytes"]
        claims += [
            Claim(f"after {record['deltas']:,} deltas, of the base's speed", share, 0.8),
            Claim("time of a delta of 1 %, of a base", seconds, 0.02, at_most=True),
            Claim("bytes of a delta of 1 %, of a base", size, 0.012, at_most=True),
        ]
    for unit, target in (
        (("seconds", 0.02), ("processor_seconds", 0.02), ("bytes", 0.012)) if "exports" in record else ()
    ):
        text = f"delta of 1 % from the store, of a full export: {unit.replace('_', ' ')}"
        ratios = [turn["delta_export"][unit] / turn["full_export"][unit] for turn in record["exports"]]
        claims.append(Claim(text, statistics.median(ratios), target, at_most=True))
    if "direct" in record:
        share = record["direct"]["of_floor"]["median"]
        claims.append(Claim("direct lookups, of the speed of their page reads", share, 0.8))
    for name, values in record.get("peers", {}).items():
        if rates is not None:
            claims.append(Claim(f"lookups, against {name}", rates["base"]["median"] / values["median"], 5.0))
    return claims


if __name__ == "__main__":
    main()
