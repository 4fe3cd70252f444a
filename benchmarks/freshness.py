"""Benchmark of freshness: seconds from events to served rows, through training, publishing and the lookup server.

    python benchmarks/freshness.py --json FILE          two minutes, 3 GB of disk

`thermocline train` follows a folder of Parquet files and publishes after the last step of each (`[publish]`), with a
store on disk; `thermocline serve` follows the versions; this process is the client. Every file updates the rows
of other keys: 100,000 examples of 14 fields, 1.4 million rows of 64 bytes (dim 16, fp32), 100 MB with their keys.
Freshness counts from the rename that makes a file visible, before training reads it, until a lookup over the network
returns new rows for 1,000 keys of the file. All processes share the cores.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import Claim, console, environment, noise, print_claims, spread, write_json
from lookup_server import flight_server

import thermocline as tc
from thermocline import serving
from thermocline.serving.version import read_current, read_version, version_folder

EXAMPLES, FIELDS, STEPS = 100_000, 14, 10
"""Examples of a file, fields of an example, steps per file."""
SHARES = 3
"""Files after which keys occur again."""
CONFIG = """
[data]
train = "{folder}/stream"
follow = true
time = "at"
shuffle = false
[model]
name = "fm"
dim = 15
embedding_l2 = 0.0
[tiers]
device = "cpu"
mem = "1GB"
ssd = "{folder}/store"
[train]
batch_size = {batch}
optimizer = "adagrad"
lr = 0.05
run_dir = "{folder}/run"
tensorboard = false
log_every = 1_000_000
[publish]
folder = "{folder}/served"
every_steps = {steps}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=9, help="files that are timed")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="examples of a file")
    parser.add_argument("--folder", type=Path, help="where the files are made; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder)).resolve()
    try:
        with noise() as load:
            record = measure(folder, options.files, options.examples)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record |= load
    megabytes = statistics.median(record["delta_bytes"]) / 1e6
    claims = [
        Claim(f"freshness, {megabytes:.0f} MB per version, median", record["fresh_seconds"]["median"], 5.0, "s", True),
        Claim("the same, largest", max(record["seconds"]), 5.0, "s", True),
    ]
    print_claims("Event to served row", claims)
    if options.json:
        write_json(options.json, {**environment(["numpy", "pyarrow", "torch"]), **record}, claims)


def measure(folder: Path, files: int, examples: int) -> dict[str, Any]:
    (folder / "stream").mkdir()
    config = folder / "stream.toml"
    config.write_text(CONFIG.format(folder=folder, batch=examples // STEPS, steps=STEPS))
    for number in range(SHARES):
        write(folder, number, examples).rename(folder / "stream" / f"{number:06}.parquet")
    command = [sys.executable, "-m", "thermocline", "train", str(config)]
    seconds, published, rows, sizes = list[float](), list[float](), list[int](), list[int]()
    with subprocess.Popen(command) as training:
        try:
            wait_for_step(folder / "served", SHARES * STEPS, training)
            with (
                flight_server(folder, sorted(os.sched_getaffinity(0))) as (_, location),
                serving.connect(location, timeout=60) as client,
            ):
                for number in range(SHARES, SHARES + files):
                    path = write(folder, number, examples)
                    keys = sample(read(path))
                    before = client.lookup(keys)
                    time.sleep(1.0)  # the disk is idle again
                    started = time.time()
                    path.rename(folder / "stream" / f"{number:06}.parquet")
                    while not (client.lookup(keys) != before).any(axis=1).all():
                        check(training)
                        time.sleep(0.02)
                    seconds.append(time.time() - started)
                    version = current(folder / "served")
                    published.append(version.created_time - started)
                    rows.append(version.tables[0].rows)
                    sizes.append(version.tables[0].bytes)
                    console.print(f"version {version.number}: {rows[-1]:,} rows, served after {seconds[-1]:.2f} s")
        finally:
            training.terminate()
            training.wait()
    return {
        "examples": examples, "fields": FIELDS, "steps_per_file": STEPS, "table_rows": SHARES * FIELDS * examples,
        "delta_rows": rows, "delta_bytes": sizes, "seconds": seconds, "fresh_seconds": spread(seconds),
        "manifest_seconds": spread(published), "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def write(folder: Path, number: int, examples: int) -> Path:
    """Write a file whose keys occur in every `SHARES`-th file, each once."""
    rng = np.random.default_rng(number)
    values = rng.permutation(examples) * SHARES + number % SHARES
    columns: dict[str, Any] = {f"c{field}": pa.array(np.roll(values, field)) for field in range(FIELDS)}
    columns["label"] = pa.array(rng.integers(0, 2, examples))
    columns["at"] = pa.array(np.full(examples, time.time()))
    path = folder / f"{number:06}.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def read(path: Path) -> Any:
    """Return the keys of a file."""
    batches = tc.Reader(path, time="at", batch_size=10_000, tensors=False)
    return np.concatenate([batch.ids for batch in batches])


def sample(keys: Any) -> Any:
    """Return 1,000 of the keys, spread over all of them."""
    return keys[:: max(1, len(keys) // 1000)][:1000]


def current(served: Path) -> serving.Version:
    folder = version_folder(served, read_current(served).number)
    assert folder is not None
    return read_version(folder)


def wait_for_step(served: Path, step: int, training: subprocess.Popen[bytes]) -> None:
    while not (served / "CURRENT").exists() or current(served).step < step:
        check(training)
        time.sleep(0.1)


def check(training: subprocess.Popen[bytes]) -> None:
    if training.poll() is not None:
        raise RuntimeError(f"training ended early, with exit code {training.returncode}")


if __name__ == "__main__":
    main()
