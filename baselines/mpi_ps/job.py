"""`Job`: one rank of a training. Collective: every rank creates a job of one config and calls the same methods."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import thermocline  # noqa: F401  (before torch: sets OMP_WAIT_POLICY, so that waiting threads do not spin)

# isort: split
import torch
from mpi4py import MPI

from baselines.mpi_ps.dense import DenseSum
from baselines.mpi_ps.input_shard import RepeatedBatches, SyntheticShard, check_config, open_shard
from baselines.mpi_ps.route import Router
from baselines.mpi_ps.table import PsTable, StepPlan
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
    """Trains the model of a config. The row budget is per rank; threads default to cores / ranks of the machine.

    seconds    training time after which no rank starts another mini-batch; default: the end of the config
    prepared   mini-batches of generated data made before training and repeated, after a row for every key was created;
               0: neither
    """

    def __init__(
        self,
        config: Config,
        comm: MPI.Intracomm = MPI.COMM_WORLD,
        *,
        seconds: float | None = None,
        prepared: int = 0,
    ) -> None:
        self.config = config = config.resolve()
        check_config(config, comm.size)
        self.comm, self.rank, self.ranks = comm.Dup(), comm.rank, comm.size
        # Collectives of different threads need different communicators.
        self._plan_comm, self._eval_comm = comm.Dup(), comm.Dup()
        multi_threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.depth = config.train.depth if multi_threaded else 1
        self.threads = config.tiers.threads or _cores_per_rank(comm)
        torch.set_num_threads(config.train.torch_threads or self.threads)
        if not has_split(config.data, "train"):
            raise ConfigError("data.train is missing: name at least one file")
        check_paths(config.data, ["train", "valid", "test"])
        train: Any = open_shard(config, "train", self.rank, self.ranks, None)
        self.train_data = train
        features = getattr(train, "features", None)
        self.valid_data = open_shard(config, "valid", self.rank, self.ranks, features)
        self.test_data = open_shard(config, "test", self.rank, self.ranks, features)
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
        if prepared:
            self.train_data = self._prepare(prepared)
        self.optimizers = dense_optimizers(config, self.model)
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        self._dense = DenseSum(self.comm, [p for group in groups for p in group["params"]])
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        if self.rank:
            torch.manual_seed(seed + self.rank)  # dropout differs between ranks; rank 0 equals a single process
        self.step = self.epoch = self.examples = 0
        self._limit = seconds
        self.seconds = 0.0
        """Training time, without evaluation."""
        self.phases = dict.fromkeys(PHASES, 0.0)
        """Seconds of the training thread per phase."""
        self._logged = (0, 0.0)
        self._loss = 0.0
        self._metrics = StreamingMetrics()
        self._lines = Path(config.train.run_dir) / "metrics.jsonl"

    def _prepare(self, batches: int) -> RepeatedBatches:
        """Create the rows of all keys, and this rank's part of the first mini-batches."""
        data = self.train_data
        if not isinstance(data, SyntheticShard):
            raise ConfigError("--prepared: data.format must be synth, whose keys are known before training")
        router = Router(self._plan_comm, self.threads)
        for keys in data.key_pieces():
            self.table.create(keys, router)
        return RepeatedBatches(itertools.islice(data, batches))

    # ---- training

    def fit(self) -> Row | None:
        """Train and test, and write metrics.jsonl. Return the line of the test on rank 0, None on other ranks."""
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
        data = itertools.takewhile(lambda batch: not self._time_is_up(), self.train_data)
        with self._planned(data, self._plan_comm, training=True, steps=steps) as pipeline:
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
            raise ConfigError("data.train has no examples")
        if steps is None or self.step - before < steps:
            self.epoch += 1
            if every is None:
                self._validate()

    def _time_is_up(self) -> bool:
        """Whether this rank stops, by its own clock: the last mini-batches lack examples of ranks that stop first."""
        return self._limit is not None and self.seconds >= self._limit and self.step >= 2 * self.config.train.log_every

    def train_step(self, work: StepPlan) -> None:
        """Train one mini-batch of all ranks: pull, forward and backward, push."""
        table, start = self.table, time.perf_counter()
        self._set_rates()
        table.pull(work)
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

    # ---- planning ahead

    def _planned(
        self, data: Iterable[Batch], comm: MPI.Comm, *, training: bool, steps: int | None = None
    ) -> Pipeline[StepPlan]:
        """Plan steps ahead, in order. All ranks end together: a rank without data left continues without batches."""
        router, ended = Router(comm, self.threads), False

        def plan(work: StepPlan) -> StepPlan:
            nonlocal ended
            if not ended:
                self.table.plan(work, router, training=training)
                ended = work.total == 0
            return work

        batches: Iterator[Batch | None] = itertools.chain(data, itertools.repeat(None))
        source = (StepPlan(batch) for batch in itertools.islice(batches, steps))
        stages: list[tuple[str, Callable[[Any], Any]]] = [("collect", self.table.deduplicate), ("plan", plan)]
        return Pipeline(source, stages, depth=self.depth, finish=StepPlan.release)

    @staticmethod
    def _until_all_end(pipeline: Iterable[StepPlan]) -> Iterator[StepPlan]:
        return itertools.takewhile(lambda work: work.total > 0, pipeline)

    # ---- evaluation and figures

    def evaluate(self, data: Iterable[Batch]) -> Row:
        """Exact metrics over the data of all ranks, equal on every rank. Changes no row."""
        metrics = ExactMetrics()
        for buffer in self.model.buffers():  # batch norm statistics are per rank: those of rank 0 are used
            self.comm.Bcast(buffer.data.numpy(), root=0)
        self.model.eval()
        with torch.no_grad(), self._planned(data, self._eval_comm, training=False) as pipeline:
            for work in self._until_all_end(pipeline):
                self.table.pull(work)
                if work.batch is not None:
                    metrics.update(self.model(work.batch), torch.as_tensor(work.batch.label, dtype=torch.float32))
        self.model.train()
        figures: Row = self._merge_metrics(metrics).compute()
        return figures

    def _merge_metrics(self, metrics: M) -> M:
        """Metrics over all ranks."""
        merged, *others = self.comm.allgather(metrics)
        for other in others:
            merged.merge(other)
        return merged  # type: ignore[no-any-return]

    def _validate(self) -> None:
        if self.valid_data is not None:
            self._write("valid", self.evaluate(self.valid_data))

    def _log(self) -> None:
        (examples, seconds), every = self._logged, self.config.train.log_every
        figures = {
            "loss": self._loss / every,
            **self._merge_metrics(self._metrics).compute(),
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
        position = {"step": self.step, "epoch": self.epoch, "ranks": self.ranks, "seconds": self.seconds}
        row: Row = finite({"event": event, **position, **figures})
        with self._lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row


def _cores_per_rank(comm: MPI.Intracomm) -> int:
    """Cores of the machine / its ranks, at most the cores that this rank may use."""
    machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = int(machine.size)
    machine.Free()
    return max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // ranks))
