"""Processor time of a model's dense network and its optimizer, measured inside training steps on generated examples.

A network that runs alone finds its inputs, weights and instructions in the CPU caches. In a training, deduplication,
row updates and metrics run between its passes, and its inputs are rows gathered just before.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from thermocline.data.synthetic import SyntheticAds
from thermocline.embedding.optimizers import SGD
from thermocline.embedding.table import Table
from thermocline.models import ModelConfig, build, parameter_groups, row_dim
from thermocline.planner.cost_model import DenseOptimizer
from thermocline.training.throughput import ThroughputMeter
from thermocline.utils.malloc import keep_freed_memory

_KEYS = 100_000
_WARMUP_STEPS = 3
_SECONDS, _MIN_STEPS, _MAX_STEPS = 1.0, 7, 100
"""Duration of the measurement, and bounds on its number of steps."""
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


class CpuTime(NamedTuple):
    """Processor seconds per step."""

    total: float
    """All threads."""
    caller: float
    """The calling thread."""


class DenseTiming(NamedTuple):
    """Parts of a step that belong to the dense network."""

    network: CpuTime
    """Forward, loss, backward."""
    optimizer: CpuTime


def time_dense_network(
    config: ModelConfig, fields: int, dense: int, batch: int, optimizer: DenseOptimizer, threads: int
) -> DenseTiming:
    """Measure medians over training steps, with `threads` torch threads and as many threads of the table.

    fields    id fields per example
    dense     dense features per example
    batch     examples per step
    """
    keep_freed_memory()  # as training does
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        training = _TimedTraining(config, fields, dense, batch, optimizer, threads)
        for _ in range(_WARMUP_STEPS):
            training.step()
        end = time.perf_counter() + _SECONDS
        min_steps, max_steps = _WARMUP_STEPS + _MIN_STEPS, _WARMUP_STEPS + _MAX_STEPS
        while training.steps < min_steps or (training.steps < max_steps and time.perf_counter() < end):
            training.step()
        return training.medians()
    finally:
        torch.set_num_threads(before)


def parallel_share(measured: CpuTime, threads: int) -> float:
    """Fraction s of the work that all threads share; the calling thread does the rest alone.

    caller / total = (1 - s) + s / threads. With one thread the fraction is not observable and taken as 1.
    """
    if threads == 1:
        return 1.0
    return min(1.0, max(0.0, (1 - measured.caller / measured.total) / (1 - 1 / threads)))


class _TimedTraining:
    """Training steps without a pipeline: every stage runs on the calling thread, and the dense parts are timed."""

    def __init__(
        self, config: ModelConfig, fields: int, dense: int, batch: int, optimizer: DenseOptimizer, threads: int
    ) -> None:
        self._ads = SyntheticAds(keys=max(_KEYS, fields), fields=fields, dense=dense, batch_size=batch)
        mem = _KEYS * (4 * row_dim(config) + 90) + (8 << 20) + 8 * batch * fields * row_dim(config)
        self._table = Table(row_dim(config), SGD(lr=0.0), mem=mem, device="cpu", threads=threads)
        self._model: Any = build(config, self._table, fields, dense)
        self._model.features.bag.register_forward_hook(self._on_rows_pooled)
        self._optimizer = _OPTIMIZERS[optimizer](parameter_groups(config, self._model), lr=1e-9)
        self._meter = ThroughputMeter([self._table])
        self._last = (0.0, 0.0)
        self._times: list[tuple[CpuTime, CpuTime]] = []

    @property
    def steps(self) -> int:
        return len(self._times)

    def _lap(self) -> CpuTime:
        """Processor time since the previous call."""
        now = time.process_time(), time.thread_time()
        lap = CpuTime(now[0] - self._last[0], now[1] - self._last[1])
        self._last = now
        return lap

    def _on_rows_pooled(self, *_: object) -> None:
        self._lap()

    def step(self) -> None:
        batch = self._ads.batch(self.steps)
        prepared = self._table.prepare(batch)
        batch.prepared[self._table] = prepared
        logits = self._model(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.as_tensor(batch.label))
        loss.backward()  # type: ignore[no-untyped-call]
        network = self._lap()  # since _on_rows_pooled
        self._meter.add(logits.detach(), batch.label, float(loss.detach()))
        self._table.step()
        self._lap()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._times.append((network, self._lap()))
        assert prepared.pins is not None
        prepared.pins.release()

    def medians(self) -> DenseTiming:
        medians = np.median(np.array(self._times[_WARMUP_STEPS:]), axis=0)
        return DenseTiming(*(CpuTime(*part) for part in medians.tolist()))
