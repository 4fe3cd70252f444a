"""What the experiments train with: a whole run that can be cut anywhere, and a stream of batches that is watched."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.experiment import Json, Setup, Work
from thermocline.batch import Batch
from thermocline.config.schema import Config
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.pipeline.executor import StageStats
from thermocline.pipeline.prefetch import prefetch
from thermocline.training.callbacks import Callback, Row
from thermocline.training.run import Run
from thermocline.training.run_dir import config_of, has_run
from thermocline.training.trainer import Trainer
from thermocline.utils.cpu_affinity import cores

_SAVING = 0.1  # of a step's time is kept for saving and testing


def torch_threads() -> int:
    """Half of the cores: the pipeline needs the others."""
    return max(1, cores() // 2)


class _Until(Callback):
    """Ends a run when the step's time is nearly up; tells how far it is."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._spare = _SAVING * work.left

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step % 8 == 0:
            self._work.tell(trainer.progress.step / (trainer.total_steps or trainer.progress.step))
            if self._work.left < self._spare:
                trainer.stop()


def train(config: Config, work: Work) -> Json | None:
    """Trains and tests a config in the step's folder; none: its time is up, and the next call goes on."""
    run_dir = str(work.folder / "run")
    # Threads of torch are part of what was trained: those of the machine that began it.
    threads = config_of(run_dir).train.torch_threads if has_run(run_dir) else torch_threads()
    settings = dataclasses.replace(
        config.train, run_dir=run_dir, torch_threads=threads, display=False, tensorboard=False
    )
    with Run(dataclasses.replace(config, train=settings)) as run:
        result = run.fit(resume=True, callbacks=[_Until(work)])
        if result.progress.epoch < settings.epochs:
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


class _Logs(Callback):
    """Every log of a run with the time since its first step. A run that takes too long is an error."""

    def __init__(self, work: Work) -> None:
        self._work, self._begin = work, 0.0
        self.rows: list[Row] = []

    def on_start(self, trainer: Trainer) -> None:
        self._begin = time.perf_counter()

    def on_log(self, trainer: Trainer, row: Row) -> None:
        seconds = time.perf_counter() - self._begin
        self.rows.append({**row, "seconds": seconds})
        self._work.tell(trainer.progress.step / (trainer.total_steps or trainer.progress.step))
        if self._work.left < 0:
            raise ThermoclineError(
                f"{trainer.progress.step} of {trainer.total_steps} steps took {seconds:.0f} s, all that a step of a "
                "reproduction has: a smaller --effort trains less"
            )


def watch(config: Config, work: Work) -> tuple[list[Row], Row]:
    """Trains a config from the beginning to its end; its logs, each with its time, and its test."""
    train = dataclasses.replace(
        config.train, run_dir=str(work.folder / "run"), torch_threads=torch_threads(), display=False, tensorboard=False
    )
    logs = _Logs(work)
    with Run(dataclasses.replace(config, train=train)) as run:
        result = run.fit(callbacks=[logs])
    return logs.rows, result.test or {}


def table(
    dim: int, optimizer: Any, setup: Setup, *, hbm: int, mem: int, ssd: Path | None = None, ssd_mem: int = 256 << 20
) -> Table:
    """Rows in the tiers that this machine has: without a GPU, memory is the top one."""
    return Table(
        dim,
        optimizer,
        hbm=hbm if setup.device == "cuda" else None,
        mem=mem,
        ssd=ssd,
        ssd_mem=ssd_mem,
        seed=setup.seed,
        device=setup.device,
    )


def stream(
    source: Iterable[Batch],
    table: Table,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    depth: int = 4,
    after: Callable[[Batch, torch.Tensor, Sequence[StageStats]], bool],
) -> list[StageStats]:
    """Trains batch after batch until there are no more, or `after(batch, its logits, stages)` is false."""
    torch.set_num_threads(torch_threads())
    model.train()
    with prefetch(source, table, depth=depth) as ready:
        for batch in ready:
            logits = model(batch)
            label = torch.as_tensor(batch.label, dtype=torch.float32, device=logits.device)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label).backward()  # type: ignore[no-untyped-call]
            table.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if not after(batch, logits.detach(), ready.stats):
                break
        return [dataclasses.replace(stage) for stage in ready.stats]


def seconds_of(work: Callable[[], object], *, repeat: int, device: str) -> float:
    """The median of several goes."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
