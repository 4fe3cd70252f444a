"""`Job`: one rank of a training; every rank makes one of the same config and calls the same methods."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import thermocline  # noqa: F401  (before torch: its waiting threads then leave the cores to others)

# isort: split
import torch
from mpi4py import MPI

from baselines.mpi_ps.dense import DenseSum
from baselines.mpi_ps.route import Router
from baselines.mpi_ps.share import check, open_share
from baselines.mpi_ps.table import Planned, PsTable
from thermocline.batch import Batch
from thermocline.config.schema import Config
from thermocline.data.open_data import check_paths, has_split
from thermocline.embedding.initializers import Normal
from thermocline.errors import ConfigError
from thermocline.models import build, row_dim
from thermocline.pipeline.executor import Pipeline
from thermocline.training.callbacks import Row, finite
from thermocline.training.metrics import ExactMetrics, StreamingMetrics
from thermocline.training.run import dense_optimizers, row_optimizer
from thermocline.utils import atomic_file

M = TypeVar("M", bound=ExactMetrics)
PHASES = ("wait", "pull", "compute", "push", "dense")


class Job:
    """Trains a config's model. Row budgets are per rank; threads are the cores over the ranks that share them.

    seconds   of training, after which no rank begins another mini-batch; none: all that the config says
    """

    def __init__(self, config: Config, comm: MPI.Intracomm = MPI.COMM_WORLD, *, seconds: float | None = None) -> None:
        self.config = config = config.resolve()
        check(config, comm.size)
        self.comm, self.rank, self.ranks = comm.Dup(), comm.rank, comm.size
        self._ahead = comm.Dup()  # collectives of two threads must not meet on one communicator
        self._aside = comm.Dup()
        several = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.depth = config.train.depth if several else 1
        self.threads = config.tiers.threads or _cores_each(comm)
        torch.set_num_threads(config.train.torch_threads or self.threads)
        if not has_split(config.data, "train"):
            raise ConfigError("data.train is missing: it must name at least one file")
        check_paths(config.data, ["train", "valid", "test"])
        train: Any = open_share(config, "train", self.rank, self.ranks, None)
        self.train_data = train
        features = getattr(train, "features", None)
        self.valid_data = open_share(config, "valid", self.rank, self.ranks, features)
        self.test_data = open_share(config, "test", self.rank, self.ranks, features)
        seed = config.train.seed
        torch.manual_seed(seed)
        self.table = PsTable(
            self.comm,
            row_dim(config.model),
            row_optimizer(config),
            mem=config.tiers.mem,
            seed=seed,
            initial=Normal(scale=config.model.initial),
            threads=self.threads,
        )
        self.model = build(config.model, self.table, train.fields, train.dense)
        self.optimizers = dense_optimizers(config, self.model)
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        self._dense = DenseSum(self.comm, [p for group in groups for p in group["params"]])
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        if self.rank:
            torch.manual_seed(seed + self.rank)  # every rank drops out others; the first, those of a single process
        self.step = self.epoch = self.examples = 0
        self._limit = seconds
        self.seconds = 0.0
        """Of training: evaluation is not counted."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        """Seconds of the training thread, by what it did."""
        self._logged = (0, 0.0)
        self._loss = 0.0
        self._metrics = StreamingMetrics()
        self._lines = Path(config.train.run_dir) / "metrics.jsonl"

    # ---- training

    def fit(self) -> Row | None:
        """Trains and tests as the config says; writes metrics.jsonl. Returns the test's line, on the first rank."""
        train = self.config.train
        self._begin()
        while self.epoch < train.epochs and (train.steps is None or self.step < train.steps):
            self._train_epoch(None if train.steps is None else train.steps - self.step)
        row = None
        if self.test_data is not None:
            row = self._write("test", {**self.evaluate(self.test_data), "examples_per_s": self.examples / self.seconds})
        return row

    def _train_epoch(self, steps: int | None) -> None:
        if hasattr(self.train_data, "set_epoch"):
            self.train_data.set_epoch(self.epoch)
        self._metrics = StreamingMetrics()
        self.model.train()
        every, before = self.config.train.valid_every, self.step
        self.comm.Barrier()
        since = time.perf_counter()
        data = itertools.takewhile(lambda batch: not self._over(), self.train_data)
        with self._planned(data, self._ahead, training=True, steps=steps) as pipeline:
            for work in self._until_all_end(pipeline):
                self._phase("wait", since)
                self.train_step(work)
                self.seconds += time.perf_counter() - since
                if self.step % self.config.train.log_every == 0:
                    self._log()
                if every is not None and self.step % every == 0:
                    self._validate()
                since = time.perf_counter()
        if self.step == before:
            raise ConfigError("the training data has no examples")
        if steps is None or self.step - before < steps:
            self.epoch += 1
            if every is None:
                self._validate()

    def _over(self) -> bool:
        """Each rank by its own clock: the last mini-batches lack the examples of those that end first."""
        return self._limit is not None and self.seconds >= self._limit and self.step >= 2 * self.config.train.log_every

    def train_step(self, work: Planned) -> None:
        """One mini-batch of all ranks: pull, forward and backward, push."""
        table, start = self.table, time.perf_counter()
        self._set_rates()
        table.fetch(work)
        start = self._phase("pull", start)
        loss = 0.0
        if work.batch is not None:
            logits = self.model(work.batch)
            label = torch.as_tensor(work.batch.label, dtype=torch.float32)
            mean = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
            mean.backward()  # type: ignore[no-untyped-call]
            loss = float(mean.detach())
            self._metrics.update(logits, label)
        start = self._phase("compute", start)
        self._dense.begin(loss, work.weight)
        start = self._phase("dense", start)
        table.push(work)
        start = self._phase("push", start)
        self._loss += self._dense.finish()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._phase("dense", start)
        self.step += 1
        self.examples += work.total

    def _phase(self, name: str, since: float) -> float:
        now = time.perf_counter()
        self.phases[name] += now - since
        return now

    def _set_rates(self) -> None:
        factor = self.config.train.schedule(self.step)
        self.table.lr = self.table.optimizer.lr * factor
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    # ---- what is planned ahead

    def _planned(
        self, data: Iterable[Batch], comm: MPI.Comm, *, training: bool, steps: int | None = None
    ) -> Pipeline[Planned]:
        """Steps in order, keys exchanged. Ranks end together, so those whose data ends first go on with nothing."""
        router, over = Router(comm, self.threads), False

        def plan(work: Planned) -> Planned:
            nonlocal over
            if not over:
                self.table.plan(work, router, training=training)
                over = work.total == 0
            return work

        batches: Iterator[Batch | None] = itertools.chain(data, itertools.repeat(None))
        source = (Planned(batch) for batch in itertools.islice(batches, steps))
        stages: list[tuple[str, Callable[[Any], Any]]] = [("collect", self.table.gather), ("plan", plan)]
        return Pipeline(source, stages, depth=self.depth, finish=Planned.release)

    @staticmethod
    def _until_all_end(pipeline: Iterable[Planned]) -> Iterator[Planned]:
        return itertools.takewhile(lambda work: work.total > 0, pipeline)

    # ---- evaluation and figures

    def evaluate(self, data: Iterable[Batch]) -> Row:
        """Exact metrics over all ranks' shares, the same on every rank. Changes nothing."""
        metrics = ExactMetrics()
        for buffer in self.model.buffers():  # batch norm's statistics are of a rank's own examples: the first's count
            self.comm.Bcast(buffer.data.numpy(), root=0)
        self.model.eval()
        with torch.no_grad(), self._planned(data, self._aside, training=False) as pipeline:
            for work in self._until_all_end(pipeline):
                self.table.fetch(work)
                if work.batch is not None:
                    metrics.update(self.model(work.batch), torch.as_tensor(work.batch.label, dtype=torch.float32))
        self.model.train()
        figures: Row = self._of_all(metrics).compute()
        return figures

    def _of_all(self, metrics: M) -> M:
        """What all ranks have seen."""
        first, *others = self.comm.allgather(metrics)
        for other in others:
            first.merge(other)
        return first  # type: ignore[no-any-return]

    def _validate(self) -> None:
        if self.valid_data is not None:
            self._write("valid", self.evaluate(self.valid_data))

    def _log(self) -> None:
        (examples, seconds), every = self._logged, self.config.train.log_every
        figures = {
            "loss": self._loss / every,
            **self._of_all(self._metrics).compute(),
            "examples_per_s": (self.examples - examples) / (self.seconds - seconds),
            "examples": self.examples,
            "phases": dict(self.phases),
        }
        self._logged, self._loss = (self.examples, self.seconds), 0.0
        self._write("train", figures)

    def _begin(self) -> None:
        if self.rank == 0:
            atomic_file.make_folder(self._lines.parent)
            atomic_file.atomic_write(self._lines.parent / "config.toml", self.config.to_toml().encode())
            self._lines.write_text("")

    def _write(self, event: str, figures: Row) -> Row | None:
        if self.rank:
            return None
        where = {"step": self.step, "epoch": self.epoch, "ranks": self.ranks, "seconds": self.seconds}
        row: Row = finite({"event": event, **where, **figures})
        with self._lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def _cores_each(comm: MPI.Intracomm) -> int:
    """Cores over the ranks of this machine; fewer where the rank is bound to fewer."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = int(here.size)
    here.Free()
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks))
