"""Training loops that the experiments share: resumable runs, logged runs and a loop over a stream of batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from experiments.experiment import Json, Setup, StepContext
from thermocline.batch import Batch
from thermocline.config.schema import Config
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.pipeline.executor import StageStats
from thermocline.pipeline.prefetch import Prefetch, prefetch
from thermocline.training.callbacks import Callback, Row
from thermocline.training.run import Run
from thermocline.training.run_dir import config_of, has_run
from thermocline.training.save_policy import SavePolicy
from thermocline.training.trainer import TrainConfig, Trainer
from thermocline.utils.cpu_affinity import cores

_SAVING = 0.1  # share of a step's time that is reserved for the checkpoint and the test


def torch_threads() -> int:
    """Return half of the cores; the pipeline uses the others."""
    return max(1, cores() // 2)


def _quiet(config: Config, run_dir: Path, threads: int | None) -> Config:
    """Set the run folder and torch's threads; switch off the display and TensorBoard."""
    train = dataclasses.replace(
        config.train, run_dir=str(run_dir), torch_threads=threads, display=False, tensorboard=False
    )
    return dataclasses.replace(config, train=train)


def _progress(trainer: Trainer) -> float:
    return trainer.progress.step / (trainer.total_steps or trainer.progress.step)


class _StopInTime(Callback):
    """Stops a run when the step's time is nearly over, and reports its progress."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._reserve = _SAVING * context.seconds_left

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step % 8 == 0:
            self._context.report_progress(_progress(trainer))
            if self._context.seconds_left < self._reserve:
                trainer.stop()


def train(config: Config, context: StepContext) -> Json | None:
    """Train and test a config in the step's folder; None means that time is over and the next call resumes."""
    run_dir = context.folder / "run"
    # torch's thread count changes its bits: a resumed run keeps that of the machine that started it.
    threads = config_of(str(run_dir)).train.torch_threads if has_run(str(run_dir)) else torch_threads()
    with Run(_quiet(config, run_dir, threads)) as run:
        result = run.fit(resume=True, callbacks=[_StopInTime(context)])
        if result.progress.epoch < config.train.epochs:
            return None
        assert result.test is not None
        rows = sum(len(keys) for keys, _ in run.table.rows())
        row_bytes = run.table.dram.row_bytes
    return {
        "auc": result.test["auc"],
        "logloss": result.test["logloss"],
        "examples": result.progress.examples,
        "examples_per_s": result.test["examples_per_s"],
        "rows": rows,
        "row_bytes": row_bytes,
    }


class _TimedLogs(Callback):
    """Collects the logs of a run with the seconds since its start. Exceeding the step's time is an error."""

    def __init__(self, context: StepContext) -> None:
        self._context, self._start = context, 0.0
        self.rows: list[Row] = []

    def on_start(self, trainer: Trainer) -> None:
        self._start = time.perf_counter()

    def on_log(self, trainer: Trainer, row: Row) -> None:
        seconds = time.perf_counter() - self._start
        self.rows.append({**row, "seconds": seconds})
        self._context.report_progress(_progress(trainer))
        if self._context.seconds_left < 0:
            raise ThermoclineError(
                f"{trainer.progress.step} of {trainer.total_steps} training steps took {seconds:.0f} s, the limit of "
                "one experiment step; a smaller --effort trains less"
            )


def train_logged(config: Config, context: StepContext) -> tuple[list[Row], Row]:
    """Train a config from start to end; return its logs with their times, and its test metrics."""
    logs = _TimedLogs(context)
    with Run(_quiet(config, context.folder / "run", torch_threads())) as run:
        result = run.fit(callbacks=[logs])
    return logs.rows, result.test or {}


def make_table(
    dim: int,
    optimizer: Any,
    setup: Setup,
    *,
    hbm: int,
    mem: int,
    ssd: Path | None = None,
    ssd_mem: int = 256 << 20,
    lookahead: int | str = "auto",
) -> Table:
    """Create a table with the tiers of this machine; without a GPU, DRAM is the top tier."""
    return Table(
        dim,
        optimizer,
        hbm=hbm if setup.device == "cuda" else None,
        mem=mem,
        ssd=ssd,
        ssd_mem=ssd_mem,
        lookahead=lookahead,
        seed=setup.seed,
        device=setup.device,
    )


def train_stream(
    source: Iterable[Batch],
    table: Table,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    depth: int = 4,
    pull_window: int = 1,
    after: Callable[[Batch, torch.Tensor, Prefetch], bool],
) -> list[StageStats]:
    """Train on batches until the source ends or `after(batch, logits, prefetch)` returns False."""
    torch.set_num_threads(torch_threads())
    model.train()
    with prefetch(source, table, depth=depth, pull_window=pull_window) as ready:
        for batch in ready:
            logits = model(batch)
            label = torch.as_tensor(batch.label, dtype=torch.float32, device=logits.device)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()  # type: ignore[no-untyped-call]
            table.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if not after(batch, logits.detach(), ready):
                break
        return [dataclasses.replace(stage) for stage in ready.stats]


class Meter(Protocol):
    """Measures a training, and decides when it ends."""

    stages_at_end: Sequence[Any]

    def after_batch(self, examples: int, ahead: Any, stages: Sequence[Any]) -> bool:
        """Count a batch; return whether the training continues."""


class _Metered(Callback):
    """Calls a meter after every step of a trainer."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._examples = 0

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        examples, self._examples = trainer.progress.examples - self._examples, trainer.progress.examples
        if not self._meter.after_batch(examples, trainer._lookahead, trainer._stages):
            trainer.stop()


class _NoSaves(SavePolicy):
    """Saves nothing, and accepts a store with commits: those of the rows that were generated before."""

    @staticmethod
    def _require_no_run_dir_needed(tables: Sequence[Table], resume: bool) -> None:
        pass


def train_metered(
    source: Iterable[Batch],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    meter: Meter,
    *,
    depth: int,
    pull_window: int,
) -> Json:
    """Train with `tc.Trainer` until the meter ends it; return how many steps were recorded, and why others were not."""
    config = TrainConfig(
        depth=depth, pull_window=pull_window, torch_threads=torch_threads(), display=False, tensorboard=False,
        checkpoint_minutes=None,
    )  # fmt: skip
    trainer = Trainer(model, optimizer, config=config, callbacks=[_Metered(meter)])
    trainer._saves = _NoSaves(None, config, trainer.ranks)
    trainer.fit(source)
    meter.stages_at_end = [dataclasses.replace(stage) for stage in trainer._stages]
    return {"steps": trainer.progress.step, "recorded": trainer.graph_step.replays, "reason": trainer.graph_step.reason}


def page_locked(batch: Batch) -> Batch:
    """Move ids and labels of a batch to page-locked memory, if there is a GPU: uploads then need no copy before."""
    if torch.cuda.is_available():
        batch.ids = torch.from_numpy(batch.ids.view(np.int64)).pin_memory().numpy().view(np.uint64)
        batch.label = torch.as_tensor(batch.label).pin_memory()
    return batch


def free_page_locked() -> None:
    """Return page-locked memory that is no longer used to the system: torch would keep it."""
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # only in torch with CUDA


def median_seconds(function: Callable[[], object], *, repeat: int, device: str) -> float:
    """Return the median time of several calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
