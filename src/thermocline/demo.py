"""`make demo`: a table larger than its memory, filled and then trained on, in two minutes and a temporary folder."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from thermocline.sizes import format_size, parse_size
from thermocline.tables.mem import MemTier
from thermocline.tables.optimizers import Adagrad
from thermocline.tables.ssd import SsdStore

DIM = 16
EXAMPLES, FIELDS = 4096, 26  # of one batch
FILL_ROWS = 250_000  # of one put
COMMIT_EVERY = 10  # batches
ZIPF = 1.05  # how fast popularity falls with rank, as in click logs

Advance = Callable[[int, str], None]


@dataclasses.dataclass(slots=True)
class Phase:
    """What was done, and in how much time."""

    rows: int = 0
    ids: int = 0
    batches: int = 0
    seconds: float = 0.0


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Advance]:
    """A live bar on a terminal; elsewhere a line at every tenth."""
    if console.is_terminal:
        columns = (TextColumn("{task.description:<8}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as bar:
            task = bar.add_task(what, total=total, text="")
            yield lambda done, text: bar.update(task, advance=done, text=text)
        return
    done, printed = 0, -1

    def advance(more: int, text: str) -> None:
        nonlocal done, printed
        done += more
        if done * 10 // total > printed:
            printed = done * 10 // total
            console.print(f"{what:<8} {done / total:4.0%}  {text}", highlight=False)

    yield advance


def keys_of(ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Keys spread over all 64 bits; an odd factor keeps them distinct."""
    return ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def zipf_ranks(rng: np.random.Generator, size: int, among: int) -> npt.NDArray[np.int64]:
    """Ranks from 0 to among - 1, the small ones often: the inverse of the distribution's integral."""
    tail = 1 - ZIPF
    ranks = (1 + rng.random(size) * (float(among) ** tail - 1)) ** (1 / tail)
    clipped: npt.NDArray[np.int64] = np.clip(ranks.astype(np.int64), 1, among) - 1
    return clipped


def fill(store: SsdStore, tier: MemTier, rows: int, seconds: float, advance: Advance) -> Phase:
    """Puts `rows` rows, or as many as the time allows, and commits them."""
    phase, start = Phase(), time.perf_counter()
    while phase.rows < rows and phase.seconds < seconds:
        count = min(FILL_ROWS, rows - phase.rows)
        keys = keys_of(np.arange(phase.rows, phase.rows + count))
        store.put(keys, tier.initial_rows(keys))
        phase.rows += count
        phase.seconds = time.perf_counter() - start
        disk = store.stats().disk_bytes
        advance(count, f"{phase.rows / phase.seconds:,.0f} rows/s, {format_size(disk)} on disk")
    store.commit(b"filled")
    phase.seconds = time.perf_counter() - start
    return phase


def train(store: SsdStore, tier: MemTier, keys: int, batches: int, seconds: float, advance: Advance) -> Phase:
    """Pulls the rows of each batch, pools them, applies a gradient, gives them back; commits every few batches."""
    phase, start, rng = Phase(), time.perf_counter(), np.random.default_rng(0)
    offsets = np.arange(0, EXAMPLES * FIELDS + 1, FIELDS)
    while phase.batches < batches and phase.seconds < seconds:
        ids = keys_of(zipf_ranks(rng, EXAMPLES * FIELDS, keys))
        lookup = tier.lookup(ids, offsets, pooling="sum")
        pooled = tier.pool(lookup)
        tier.update(lookup, 0.01 * pooled, step=phase.batches + 1)
        tier.release(lookup)
        phase.batches += 1
        phase.ids += len(ids)
        phase.rows += len(lookup.slots)
        if phase.batches % COMMIT_EVERY == 0:
            commit(store, tier, phase.batches)
        phase.seconds = time.perf_counter() - start
        rate, hits = phase.rows / phase.seconds, tier.stats().hit_rate
        advance(1, f"{rate:,.0f} rows/s, {hits:.0%} of rows found in memory")
    commit(store, tier, phase.batches)
    phase.seconds = time.perf_counter() - start
    return phase


def commit(store: SsdStore, tier: MemTier, batches: int) -> None:
    """All rows as they are now, durable; older commits are let go."""
    tier.flush()
    store.commit(f"batch {batches}".encode())
    for epoch in store.epochs[:-1]:
        store.release(epoch)


def report(console: Console, store: SsdStore, tier: MemTier, filled: Phase, trained: Phase) -> None:
    disk, memory = store.stats(), tier.stats()
    rows = len(store)
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    line = table.add_row
    line("rows", f"{rows:,}", f"{DIM} weights and their Adagrad state")
    line("data", format_size(rows * (tier.row_bytes + 8)), "rows and keys")
    budgets = f"store {format_size(disk.mem_budget)}, memory tier {format_size(memory.budget)}"
    line("memory budget", format_size(disk.mem_budget + memory.budget), budgets)
    line("memory used", format_size(disk.mem_total + memory.bytes_total), "rows, indexes and buffers counted")
    line("fill", f"{filled.rows / filled.seconds:,.0f} rows/s", "put and committed")
    line(
        "pull + push",
        f"{trained.rows / trained.seconds:,.0f} rows/s",
        f"unique rows; {trained.ids / trained.seconds:,.0f} ids/s; a commit every {COMMIT_EVERY} batches",
    )
    line("hit rate", f"{memory.hit_rate:.1%}", f"of unique rows; {memory.capacity:,} rows fit in memory")
    with_buffers = f"the store's index; {disk.mem_total / rows:.2f} B with buffers"
    line("DRAM per key", f"{disk.mem_index / rows:.2f} B", with_buffers)
    line("disk used", format_size(disk.disk_bytes), f"{disk.disk_bytes / (rows * (tier.row_bytes + 8)):.2f} x the data")
    line("write amplification", f"{disk.write_amplification:.2f}", "bytes written per byte put")
    line("file engine", disk.engine, f"{disk.keys_read:,} keys by {disk.reads:,} reads")
    console.print(table)


def main(
    rows: Annotated[int, typer.Option(help="Rows to fill the store with.")] = 4_000_000,
    batches: Annotated[int, typer.Option(help="Batches to train on.")] = 150,
    store_memory: Annotated[str, typer.Option(help="Memory budget of the SSD store.")] = "48MB",
    tier_memory: Annotated[str, typer.Option(help="Memory budget of the memory tier.")] = "96MB",
    seconds: Annotated[float, typer.Option(help="At most this long for each of the two phases.")] = 45.0,
    folder: Annotated[Path, typer.Option(help="Where the temporary store is made.")] = Path("."),
) -> None:
    """Fills a store larger than its memory budget, then pulls and pushes batches through the memory tier."""
    console = Console()
    optimizer = Adagrad(lr=0.05)
    row_bytes = 4 * (DIM + optimizer.state_floats(DIM))
    data, memory = format_size(rows * (row_bytes + 8)), format_size(parse_size(store_memory) + parse_size(tier_memory))
    console.print(f"{rows:,} rows of {row_bytes} bytes: {data} of data in {memory} of memory", highlight=False)
    with (
        tempfile.TemporaryDirectory(prefix="thermocline-demo-", dir=folder) as temporary,
        SsdStore.open(Path(temporary) / "store", row_bytes=row_bytes, mem_budget=store_memory) as store,
    ):
        tier = MemTier(DIM, optimizer, budget=tier_memory, store=store)
        with progress(console, "fill", rows) as advance:
            filled = fill(store, tier, rows, seconds, advance)
        with progress(console, "train", batches) as advance:
            trained = train(store, tier, filled.rows, batches, seconds, advance)
        report(console, store, tier, filled, trained)
        tier.check()


if __name__ == "__main__":
    typer.run(main)
