"""`make demo`: trains on generated ads data with a table several times its memory, then proves that memory was enough.

Two minutes at most, in a temporary folder: once with rows in DRAM and on SSD, once with all rows in DRAM and without
the pipeline; then every row and every dense weight of the two is compared, bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table as Grid

from thermocline.batch import Batch
from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding.bag import EmbeddingBag
from thermocline.embedding.optimizers import Adagrad
from thermocline.embedding.table import Table
from thermocline.training.callbacks import Callback
from thermocline.training.display import Display
from thermocline.training.metrics import auc
from thermocline.training.state import Result
from thermocline.training.trainer import TrainConfig, Trainer
from thermocline.utils.cpu_affinity import cores
from thermocline.utils.text_format import format_size

DIM, FIELDS = 16, 26
HIDDEN = (128, 64)
OPTIMIZER = Adagrad(lr=0.2)


class Model(torch.nn.Module):
    """One logit per example: an MLP over the pooled vectors of all fields."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.bag = EmbeddingBag(table, FIELDS)
        widths = (FIELDS * DIM, *HIDDEN)
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.mlp = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.mlp(self.bag(batch).flatten(1)).squeeze(1)
        return logits


class Deadline(Callback):
    """Ends a run that takes too long: on a slow machine the demo trains less."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = 0.0

    def on_start(self, trainer: Trainer) -> None:
        self._end = time.monotonic() + self._seconds

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if time.monotonic() > self._end:
            trainer.stop()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One training: what it learned and how it went."""

    table: Table
    model: Model
    result: Result


def train(
    console: Console, table: Table, ads: SyntheticAds, config: TrainConfig, *, run_dir: Path | None, seconds: float
) -> Run:
    """The same model from the same beginning, whatever holds the rows."""
    torch.manual_seed(0)
    model = Model(table)
    if table.hbm is not None:
        model.to(table.hbm.device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    callbacks = [Display(console), Deadline(seconds)]
    trainer = Trainer(model, adam, run_dir=run_dir, config=config, callbacks=callbacks)
    test = None if run_dir is None else ads.split("test", examples=8 * ads.batch_size)
    return Run(table, model, trainer.fit(ads, test=test))


def compare(run: Run, memory: Run) -> tuple[int, list[str]]:
    """How many rows were compared, and what differs between the two runs: nothing, if all is well."""
    wrong = []
    rows = different = 0
    for keys, ours in run.table.rows():
        theirs = memory.table.read(keys)
        different += int((ours.view(np.uint32) != theirs.view(np.uint32)).any(1).sum())
        rows += len(keys)
    if different:
        wrong.append(f"{different:,} of {rows:,} rows")
    memory.table.write_back()
    trained = memory.table.dram.stats().dirty
    if rows != trained:
        wrong.append(f"{rows:,} rows trained, {trained:,} in memory")
    weights = zip(run.model.state_dict().items(), memory.model.state_dict().values(), strict=True)
    wrong += [name for (name, a), b in weights if a.cpu().numpy().tobytes() != b.cpu().numpy().tobytes()]
    return rows, wrong


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a GPU, interpreted"


def best_auc(ads: SyntheticAds) -> float:
    """Of the model that made the test's labels."""
    test = ads.split("test", examples=8 * ads.batch_size)
    labels = np.concatenate([batch.label for batch in test])
    return auc(test.true_logits(0, len(labels)), labels)


def report(console: Console, run: Run, best_auc: float) -> None:
    """What the first run gave and what it took."""
    table, result = run.table, run.result
    assert table.store is not None
    assert result.test is not None
    memory, disk, rows = table.dram.stats(), table.store.stats(), len(table.store)
    data = rows * (table.dram.row_bytes + 8)
    budget = memory.budget + disk.mem_budget
    grid = Grid(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    line = grid.add_row
    best = f"the generator's own model has {best_auc:.4f}"
    line("AUC", f"{result.test['auc']:.4f}", f"on {result.test['examples']:,} examples not trained on; {best}")
    trained = f"{result.examples:,} trained in {result.seconds:.1f} s"
    line("speed", f"{result.examples / result.seconds:,.0f} examples/s", trained)
    line("table", format_size(data), f"{rows:,} rows: {DIM} weights, Adagrad's state, the key")
    parts = f"rows {format_size(memory.budget)}, the store's index and buffers {format_size(disk.mem_budget)}"
    line("memory", format_size(budget), f"{data / budget:.1f} x smaller than the table; {parts}")
    if table.hbm is not None:
        gpu = table.hbm.stats()
        line("HBM", format_size(gpu.budget), f"{gpu.capacity:,} rows on the GPU, with their index")
        line(
            "ids found in HBM",
            f"{1 - gpu.misses / gpu.ids:.1%}",
            f"{gpu.misses:,} rows came up, {gpu.written_down:,} went down",
        )
        line(
            "of the others in DRAM",
            f"{memory.read_hits / max(memory.reads, 1):.1%}",
            f"{disk.reads:,} reads of the SSD",
        )
    else:
        pulled = memory.hits + memory.misses
        line("rows from DRAM", f"{memory.hits / pulled:.1%}", "of the unique rows of every batch")
        line("rows from SSD", f"{memory.from_store / pulled:.1%}", f"{disk.reads:,} reads, {disk.engine}")
        line("rows that were new", f"{memory.initialised / pulled:.1%}", "made from their key, no I/O")
    with_buffers = f"index; {disk.mem_total / rows:.2f} B with every buffer"
    line("DRAM per SSD row", f"{disk.mem_index / rows:.2f} B", with_buffers)
    line("disk", format_size(disk.disk_bytes), f"two checkpoints; write amplification {disk.write_amplification:.2f}")
    console.print(grid)


def main(
    steps: Annotated[int, typer.Option(help="Batches to train on.")] = 500,
    keys: Annotated[int, typer.Option(help="Keys of the generated data.")] = 4_000_000,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = 2048,
    hbm: Annotated[str, typer.Option(help="GPU memory for rows, if there is a GPU.")] = "16MB",
    mem: Annotated[str, typer.Option(help="DRAM for rows.")] = "32MB",
    ssd_mem: Annotated[str, typer.Option(help="DRAM of the SSD store: its index and buffers.")] = "16MB",
    seconds: Annotated[float, typer.Option(help="The first training ends after so long, trained or not.")] = 45.0,
    folder: Annotated[Path, typer.Option(help="Where the temporary files are made.")] = Path("."),
) -> None:
    """Trains on ads data with a table several times its memory; checks that one huge memory gives the same bits."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    available = cores()
    torch_threads = max(1, available // 2)  # the pipeline needs the others
    ads = SyntheticAds(keys=keys, fields=FIELDS, batch_size=batch_size, examples=batch_size * steps)
    config = TrainConfig(
        checkpoint_every=max(1, steps // 3),
        log_every=max(1, steps // (100 if console.is_terminal else 10)),
        torch_threads=torch_threads,
        tensorboard=False,
        display=False,
    )
    console.print(f"{ads!r}\n{available} cores, {torch_threads} of them for torch", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="thermocline-demo-", dir=folder) as temporary:
        table = Table(DIM, OPTIMIZER, hbm=hbm, mem=mem, ssd=Path(temporary) / "rows", ssd_mem=ssd_mem)
        where, place = ("DRAM", "") if table.hbm is None else ("HBM", f"HBM of {gpu_name(table.hbm.device)}, ")
        console.rule(f"training with rows in {place}DRAM and on SSD", align="left")
        try:
            run = train(console, table, ads, config, run_dir=Path(temporary) / "run", seconds=seconds)
            trained = run.result.progress.step
            console.rule(f"the same training with all rows in {where}, stages one after the other", align="left")
            assert table.store is not None
            room = 256 * len(table.store) + (64 << 20)
            everything = Table(DIM, OPTIMIZER, hbm=room, mem=room)
            serial = dataclasses.replace(config, steps=trained, depth=1)
            memory = train(console, everything, ads, serial, run_dir=None, seconds=float("inf"))
            report(console, run, best_auc(ads))
            rows, wrong = compare(run, memory)
        finally:
            table.close()
    if wrong:
        console.print(f"[bold red]differs from the run in memory: {', '.join(wrong)}[/]")
        raise typer.Exit(1)
    dense = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"[bold green]checked: {rows:,} rows with their optimizer state and {dense:,} dense weights are, bit for bit, "
        "those of the run in memory[/]",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
