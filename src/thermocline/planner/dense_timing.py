"""A model's network and its optimizer, timed inside a training: steps of made-up examples, one after the other.

By itself a network finds its inputs, its memory and its instructions in the caches, step after step. In a training
working sets, rows and metrics come between, and its inputs are rows just gathered.
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
_SECONDS, _WARM, _FEWEST, _MOST = 1.0, 3, 7, 100
"""How long is timed, after some steps; steps at least and at most."""
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


class Timed(NamedTuple):
    """Of a step."""

    seconds: float
    """Of processors."""
    own: float
    """Of them, those of the calling thread."""


class Inside(NamedTuple):
    """The parts of a step that are the model's."""

    network: Timed
    """Forward, loss, backward."""
    optimizer: Timed
    """Of its parameters."""


def inside_training(
    config: ModelConfig, fields: int, dense: int, batch: int, optimizer: DenseOptimizer, threads: int
) -> Inside:
    """Medians over some steps, with so many threads of torch's and as many of the table's."""
    keep_freed_memory()  # as training does
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        training = _Training(config, fields, dense, batch, optimizer, threads)
        for _ in range(_WARM):
            training.step()
        end = time.perf_counter() + _SECONDS
        while training.steps < _WARM + _FEWEST or (training.steps < _WARM + _MOST and time.perf_counter() < end):
            training.step()
        return training.found()
    finally:
        torch.set_num_threads(before)


class _Training:
    """As the loop in `train.py`, but everything on one thread's word, and with a clock."""

    def __init__(
        self, config: ModelConfig, fields: int, dense: int, batch: int, optimizer: DenseOptimizer, threads: int
    ) -> None:
        self._ads = SyntheticAds(keys=max(_KEYS, fields), fields=fields, dense=dense, batch_size=batch)
        size = _KEYS * (4 * row_dim(config) + 90) + (8 << 20) + 8 * batch * fields * row_dim(config)
        self._table = Table(row_dim(config), SGD(lr=0.0), mem=size, device="cpu", threads=threads)
        self._model: Any = build(config, self._table, fields, dense)
        self._model.features.bag.register_forward_hook(self._rows_are_there)
        self._optimizer = _OPTIMIZERS[optimizer](parameter_groups(config, self._model), lr=1e-9)
        self._meter = ThroughputMeter([self._table])
        self._clock = (0.0, 0.0)
        self._taken: list[tuple[Timed, Timed]] = []

    @property
    def steps(self) -> int:
        return len(self._taken)

    def _lap(self) -> Timed:
        """Since the last one."""
        now = time.process_time(), time.thread_time()
        lap = Timed(now[0] - self._clock[0], now[1] - self._clock[1])
        self._clock = now
        return lap

    def _rows_are_there(self, *_: object) -> None:
        self._lap()

    def step(self) -> None:
        batch = self._ads.batch(self.steps)
        prepared = self._table.prepare(batch)
        batch.prepared[self._table] = prepared
        logits = self._model(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.as_tensor(batch.label))
        loss.backward()  # type: ignore[no-untyped-call]
        network = self._lap()  # since the rows were there
        self._meter.add(logits.detach(), batch.label, float(loss.detach()))
        self._table.step()
        self._lap()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken.append((network, self._lap()))
        assert prepared.pins is not None
        prepared.pins.release()

    def found(self) -> Inside:
        middle = np.median(np.array(self._taken[_WARM:]), axis=0)
        return Inside(*(Timed(*part) for part in middle.tolist()))


def shared(timed: Timed, threads: int) -> float:
    """The part of it that threads share: what one does alone, and its share of what all do, is its own time."""
    if threads == 1:
        return 1.0  # nothing can be told of more
    return min(1.0, max(0.0, (1 - timed.own / timed.seconds) / (1 - 1 / threads)))
