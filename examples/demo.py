"""Train on generated ads data with a table several times larger than its memory, then check the result bit for bit.

`make demo` runs this program; it takes at most two minutes. It trains the same model twice: first with rows in DRAM and
on SSD, then with all rows in DRAM and without the pipeline. It compares every row and every dense weight of the two.
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
TEST_BATCHES = 8


# ---- training


class Model(torch.nn.Module):
    """An MLP over the pooled vectors of all fields, with one logit per example."""

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
    """Stops a run after some seconds, so that the demo trains less on a slow machine."""

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
    """A finished training."""

    table: Table
    model: Model
    result: Result


def train(
    console: Console, table: Table, ads: SyntheticAds, config: TrainConfig, *, run_dir: Path | None, seconds: float
) -> Run:
    """Train a model from the same initial weights in every call; with a run folder, save and test it too."""
    torch.manual_seed(0)
    model = Model(table)
    if table.hbm is not None:
        model.to(table.hbm.device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    callbacks = [Display(console), Deadline(seconds)]
    trainer = Trainer(model, adam, run_dir=run_dir, config=config, callbacks=callbacks)
    test = None if run_dir is None else ads.split("test", examples=TEST_BATCHES * ads.batch_size)
    return Run(table, model, trainer.fit(ads, test=test))


# ---- comparison and report


def compare(tiered: Run, memory: Run) -> tuple[int, list[str]]:
    """Compare rows and dense weights of two runs; return the number of rows and a list of the differences."""
    differences = []
    rows = different = 0
    for keys, values in tiered.table.rows():
        expected = memory.table.read(keys)
        different += int((values.view(np.uint32) != expected.view(np.uint32)).any(1).sum())
        rows += len(keys)
    if different:
        differences.append(f"{different:,} of {rows:,} rows")
    memory.table.write_back()
    trained = memory.table.dram.stats().dirty
    if rows != trained:
        differences.append(f"{rows:,} rows trained, {trained:,} in memory")
    for (name, a), b in zip(tiered.model.named_parameters(), memory.model.parameters(), strict=True):
        if a.detach().cpu().numpy().tobytes() != b.detach().cpu().numpy().tobytes():
            differences.append(name)
    return rows, differences


def best_auc(ads: SyntheticAds) -> float:
    """Return the test AUC of the model that generated the labels."""
    test = ads.split("test", examples=TEST_BATCHES * ads.batch_size)
    labels = np.concatenate([batch.label for batch in test])
    return auc(test.true_logits(0, len(labels)), labels)


def print_report(console: Console, run: Run, best_auc: float) -> None:
    """Print AUC, speed, memory and I/O of a run through the tiers."""
    table, result = run.table, run.result
    assert table.store is not None
    assert result.test is not None
    dram, ssd, rows = table.dram.stats(), table.store.stats(), len(table.store)
    table_bytes = rows * (table.dram.row_bytes + 8)
    budget = dram.budget + ssd.mem_budget
    grid = Grid(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    line = grid.add_row
    best = f"the generator's own model has {best_auc:.4f}"
    line("AUC", f"{result.test['auc']:.4f}", f"on {result.test['examples']:,} examples not trained on; {best}")
    trained = f"{result.examples:,} trained in {result.seconds:.1f} s"
    line("speed", f"{result.examples / result.seconds:,.0f} examples/s", trained)
    line("table", format_size(table_bytes), f"{rows:,} rows: {DIM} weights, Adagrad's state, the key")
    parts = f"rows {format_size(dram.budget)}, the store's index and buffers {format_size(ssd.mem_budget)}"
    line("memory", format_size(budget), f"{table_bytes / budget:.1f} x smaller than the table; {parts}")
    if table.hbm is not None:
        hbm = table.hbm.stats()
        line("HBM", format_size(hbm.budget), f"{hbm.capacity:,} rows on the GPU, with their index")
        moves = f"{hbm.misses:,} rows loaded, {hbm.written_back:,} written back"
        line("ids found in HBM", f"{1 - hbm.misses / hbm.ids:.1%}", moves)
        line("of the others in DRAM", f"{dram.read_hits / max(dram.reads, 1):.1%}", f"{ssd.reads:,} reads of the SSD")
    else:
        pulled = dram.hits + dram.misses
        line("rows from DRAM", f"{dram.hits / pulled:.1%}", "of the unique rows of every batch")
        line("rows from SSD", f"{dram.from_store / pulled:.1%}", f"{ssd.reads:,} reads, {ssd.engine}")
        line("rows that were new", f"{dram.initialised / pulled:.1%}", "made from their key, no I/O")
    with_buffers = f"index; {ssd.mem_total / rows:.2f} B with every buffer"
    line("DRAM per SSD row", f"{ssd.mem_index / rows:.2f} B", with_buffers)
    line("disk", format_size(ssd.disk_bytes), f"two checkpoints; write amplification {ssd.write_amplification:.2f}")
    console.print(grid)


def gpu_name(device: torch.device) -> str:
    """Return the name of the GPU; tests run its kernels in Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a GPU, interpreted"


def main(
    steps: Annotated[int, typer.Option(help="Number of training batches.")] = 500,
    keys: Annotated[int, typer.Option(help="Number of keys of the generated data.")] = 4_000_000,
    batch_size: Annotated[int, typer.Option(help="Examples per batch.")] = 2048,
    hbm: Annotated[str, typer.Option(help="GPU memory for rows, if there is a GPU.")] = "16MB",
    mem: Annotated[str, typer.Option(help="DRAM for rows.")] = "32MB",
    ssd_mem: Annotated[str, typer.Option(help="DRAM for the index and buffers of the SSD store.")] = "16MB",
    seconds: Annotated[float, typer.Option(help="Time limit of the first training.")] = 45.0,
    folder: Annotated[Path, typer.Option(help="Parent of the temporary folder.")] = Path("."),
) -> None:
    """Train with a table several times larger than its memory; check that enough memory gives the same bits."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    available = cores()
    torch_threads = max(1, available // 2)  # the pipeline uses the other cores
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
        top_tier = "DRAM" if table.hbm is None else "HBM"
        tiers = "DRAM" if table.hbm is None else f"HBM of {gpu_name(table.hbm.device)}, DRAM"
        try:
            console.rule(f"training with rows in {tiers} and on SSD", align="left")
            tiered = train(console, table, ads, config, run_dir=Path(temporary) / "run", seconds=seconds)

            console.rule(f"the same training with all rows in {top_tier}, stages one after the other", align="left")
            assert table.store is not None
            enough = 256 * len(table.store) + (64 << 20)
            whole = Table(DIM, OPTIMIZER, hbm=enough, mem=enough)
            serial = dataclasses.replace(config, steps=tiered.result.progress.step, depth=1)
            memory = train(console, whole, ads, serial, run_dir=None, seconds=float("inf"))

            print_report(console, tiered, best_auc(ads))
            rows, differences = compare(tiered, memory)
        finally:
            table.close()
    if differences:
        console.print(f"[bold red]differs from the run in memory: {', '.join(differences)}[/]")
        raise typer.Exit(1)
    dense = sum(p.numel() for p in tiered.model.parameters())
    console.print(
        f"[bold green]checked: {rows:,} rows with their optimizer state and {dense:,} dense weights are, bit for bit, "
        "those of the run in memory[/]",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
