"""Recorded training steps against steps without recordings: the same bits, whatever happens between them.

Without a GPU a recording calls its function on the same fixed buffers, under Triton's interpreter.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import all_keys, bits, one_torch_thread, weights_of

import thermocline as tc
from thermocline.config.lr_schedule import Schedule
from thermocline.embedding.row_statistics import NAMES, RowStatistics
from thermocline.kernels import INTERPRETED
from thermocline.tiers.hbm import bytes_for
from thermocline.training import throughput
from thermocline.training.graph_step import GraphStep
from thermocline.training.metrics import StreamingMetrics
from thermocline.training.throughput import ThroughputMeter

DEVICE: Any = "interpreter" if INTERPRETED else "cuda"
FIELDS, DENSE = 2, 3
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    one_torch_thread()
    monkeypatch.setattr(GraphStep, "_on_device", lambda self: True)


def batches_of(
    count: int,
    *,
    size: int = 8,
    one_hot: bool = False,
    last: int | None = None,
    weighted: bool = False,
    keys: int = 50,
    locked: bool = False,
) -> list[tc.Batch]:
    """Batches of `size` examples with varying numbers of ids, the last of `last` examples; `locked`: in page-locked
    memory."""
    rng = np.random.default_rng(7)
    batches = []
    for n in range(count):
        examples = last if last is not None and n == count - 1 else size
        sizes = np.ones(examples * FIELDS, int) if one_hot else rng.integers(0, 4, examples * FIELDS)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        ids = rng.integers(0, keys, offsets[-1]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        if locked:
            ids = torch.from_numpy(ids.view(np.int64)).pin_memory().numpy().view(np.uint64)
        batches.append(
            tc.Batch(
                ids,
                offsets,
                FIELDS,
                rng.normal(size=len(ids)).astype(np.float32) if weighted else None,
                dense=rng.normal(size=(examples, DENSE)).astype(np.float32),
                label=torch.from_numpy(rng.integers(0, 2, examples).astype(np.float32)),
                position={"batch": n + 1},
                time=np.random.default_rng(n).integers(0, 2**40, examples),
            )
        )
    return batches


class Model(torch.nn.Module):
    def __init__(self, table: tc.Table, bags: list[tuple[Any, Any]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = torch.nn.ModuleList(tc.EmbeddingBag(table, fields, pooling=pooling) for fields, pooling in bags)
        width = sum(len(bag.fields) for bag in self.bags) * table.dim + DENSE  # type: ignore[arg-type, misc]
        layers = (torch.nn.Linear(width, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.25), torch.nn.Linear(4, 1))
        self.net = torch.nn.Sequential(*layers)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        rows = [bag(batch).flatten(1) for bag in self.bags]
        dense = torch.as_tensor(batch.dense).to(rows[0].device)
        return self.net(torch.cat([*rows, dense], 1)).squeeze(1)  # type: ignore[no-any-return]


class ReadsIds(Model):
    """Uses the batch on the host, after random numbers were drawn."""

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return super().forward(batch) * float(len(batch.ids))


class SwappedBags(Model):
    def forward(self, batch: tc.Batch) -> torch.Tensor:
        rows = [bag(batch).flatten(1) for bag in reversed(self.bags)]  # type: ignore[call-overload]
        return self.net(torch.cat([*rows, torch.as_tensor(batch.dense).to(rows[0].device)], 1)).squeeze(1)  # type: ignore[no-any-return]


class Outcome:
    """A finished training."""

    def __init__(
        self,
        graphs: Any,
        batches: list[tc.Batch],
        *,
        kind: type[Model] = Model,
        bags: Any = ((FIELDS, "sum"),),
        optimizer: Any = None,
        run_dir: Path | None = None,
        valid: list[tc.Batch] | None = None,
        callbacks: Any = (),
        resume: bool = False,
        rows: int = 45,
        precision: Any = "fp32",
        admission: Any = None,
        expiry: Any = None,
        statistics: Any = (),
        **config: Any,
    ) -> None:
        optimizer = optimizer or tc.Adagrad(lr=0.05)
        floats = 4 + optimizer.state_floats(4) if precision == "fp32" else 3 + optimizer.state_floats(4)
        options: dict[str, Any] = {"device": DEVICE, "precision": precision, "admission": admission, "expiry": expiry}
        hbm = bytes_for(rows, floats + RowStatistics.of(statistics).words)
        self.table = tc.Table(4, optimizer, hbm=hbm, mem="4MB", statistics=statistics, **options)
        self.model = kind(self.table, list(bags)).to(self.table.backend.device)
        adam = torch.optim.Adam(self.model.net.parameters(), lr=0.01)
        settings = tc.TrainConfig(graphs=graphs, display=False, tensorboard=False, depth=2, log_every=2, **config)
        self.rows: list[Any] = []
        self.trainer = tc.Trainer(
            self.model, adam, run_dir=run_dir, config=settings, callbacks=[*callbacks, _Log(self.rows)]
        )
        torch.manual_seed(11)
        self.trainer.fit(batches, valid, resume=resume)
        self.bits = (
            weights_of(self.model),
            [bits(buffer) for buffer in self.model.buffers()],
            bits(self.table.read(all_keys(batches))),
            [bits(values) for values in self.table.read_statistics(all_keys(batches)).values()] if statistics else [],
            (self.table.expired.runs, self.table.expired.rows),
        )
        if run_dir is not None:
            self.table.close()


class _Log(tc.Callback):
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def on_log(self, trainer: tc.Trainer, row: Any) -> None:
        self._rows.append({name: row[name] for name in ("step", "loss", "auc", "logloss", "rate")})

    on_validation = lambda self, trainer, row: self._rows.append((row["auc"], row["logloss"]))  # noqa: E731


def same(batches: list[tc.Batch], **options: Any) -> Outcome:
    """Train both ways and compare parameters, buffers, rows, metrics and counts; return the recorded one."""
    plain, recorded = Outcome("off", batches, **options), Outcome("on", batches, **options)
    assert recorded.bits == plain.bits
    assert recorded.rows == plain.rows
    assert recorded.table.step_count == plain.table.step_count
    assert sum(recorded.table.tier_counts().values()) == sum(plain.table.tier_counts().values())
    assert plain.trainer.graph_step.replays == 0
    assert recorded.trainer.graph_step.replays > 0
    return recorded


def test_schedule_validation_and_a_short_last_batch() -> None:
    """The learning rates change in each step, rows are evicted, and the last batch of each epoch runs as it is."""
    batches = batches_of(6, last=5)
    schedule = Schedule(kind="cosine", warmup_steps=3, decay_steps=10)
    outcome = same(batches, valid=batches[:2], valid_every=3, epochs=2, schedule=schedule, optimizer=tc.Adam(lr=0.01))
    assert outcome.trainer.graph_step.replays == 8  # of 12: two short batches, one to see the shape, one as it is
    assert outcome.table.hbm is not None
    assert outcome.table.hbm.stats().evictions > 0


def test_one_id_per_bag_and_stochastic_rounding() -> None:
    same(batches_of(5, one_hot=True), precision="bf16")


def test_several_bags_mean_and_weights() -> None:
    same(batches_of(5, weighted=True), bags=[([0], "sum"), ([1], "mean")], optimizer=tc.RowWiseAdagrad(lr=0.05))


def test_admission_counts_the_batches_of_recorded_steps(tmp_path: Path) -> None:
    shared = tc.Admission(count=3, otherwise="shared", memory="64KB")
    batches = batches_of(7)
    outcome = same(batches, admission=shared)
    stats = outcome.table.admission_stats
    assert stats is not None
    assert stats.batches == 7
    assert stats.keys_admitted > 0 < stats.ids_refused
    assert stats.log_bytes == 0
    state = outcome.table.rank_state()["admission"]
    assert len(state["admitted"]) == 0  # each step has trained all bags: admitted keys have rows
    assert (
        state["keys"].tolist()
        == Outcome("off", batches, admission=shared).table.rank_state()["admission"]["keys"].tolist()
    )
    with pytest.warns(UserWarning, match='has admission with otherwise="zero"'):
        Outcome("auto", batches, admission=tc.Admission(count=3, otherwise="zero"))


def test_statistics_and_expiry_of_recorded_steps() -> None:
    """Step, event time, labels and decays change from step to step; expiries run between replays."""
    rule = tc.Expiry(every=3, spread=2, unused_steps=2, min_score=0.2, decay=0.8)
    outcome = same(batches_of(12), statistics=NAMES, expiry=rule, bags=[([0], "sum"), ([1], "mean")])
    assert outcome.table.expired.rows > 5
    assert outcome.trainer.graph_step.replays > 4
    with pytest.warns(UserWarning, match="labels of a bag with pooling 'none' are on the host"):
        Outcome("auto", batches_of(4, one_hot=True), statistics=["click"], bags=[([0], "none"), ([1], "none")])


def test_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    batches = batches_of(9)
    whole = Outcome("off", batches, run_dir=tmp_path / "whole", checkpoint_every=5)

    class Stop(tc.Callback):
        def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
            if trainer.progress.step == 5:
                trainer.stop()

    Outcome("on", batches, run_dir=tmp_path / "run", callbacks=[Stop()])
    resumed = Outcome("on", batches, run_dir=tmp_path / "run", resume=True)
    assert resumed.bits == whole.bits
    assert resumed.trainer.graph_step.replays > 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(ReadsIds, "batch.ids"), (SwappedBags, "each bag of table")],
)
def test_a_model_that_cannot_be_recorded(kind: type[Model], reason: str) -> None:
    """The steps run without, with the same bits: random numbers and buffers of the attempt are undone."""
    batches, bags = batches_of(4), [([0], "sum"), ([1], "sum")]
    plain = Outcome("off", batches, kind=kind, bags=bags)
    with pytest.warns(UserWarning, match=reason):
        recorded = Outcome("auto", batches, kind=kind, bags=bags)
    assert recorded.bits == plain.bits
    assert recorded.trainer.graph_step.replays == 0
    assert reason in recorded.trainer.graph_step.reason
    with pytest.raises(tc.ThermoclineError, match=f'train.graphs is "on".*{reason}'):
        Outcome("on", batches, kind=kind, bags=bags)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"accumulate": 2}, "accumulate is 2"),
        ({"clip_norm": 1.0}, "norm"),
        ({"optimizer": tc.SGD(lr=0.1, lazy="catch_up")}, "replay missed steps"),
    ],
)
def test_settings_without_graphs(setting: dict[str, Any], reason: str) -> None:
    batches = batches_of(4)
    with pytest.warns(UserWarning, match=reason):
        recorded = Outcome("auto", batches, **setting)
    plain = Outcome("off", batches, **setting)
    assert recorded.bits == plain.bits


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU "auto" runs without graphs, and says nothing; "on" is an error."""
    monkeypatch.undo()
    model = Model(tc.Table(4, tc.SGD(), mem="4MB"), [(FIELDS, "sum")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = tc.Trainer(model, config=tc.TrainConfig(graphs="auto"))
        trainer.graph_step.start(1)
    with pytest.raises(tc.ConfigError, match=r"train.graphs is .on.: CUDA graphs need"):
        tc.Trainer(model, config=tc.TrainConfig(graphs="on")).graph_step.start(1)


class Keep(tc.Callback):
    """Keeps the state after the last step."""

    steps = 0

    def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
        self.steps, self._trainer, self._before = trainer.progress.step, trainer, self._state(trainer)

    def unchanged(self) -> bool:
        return self._state(self._trainer) == self._before

    @staticmethod
    def _state(trainer: tc.Trainer) -> Any:
        table = trainer.tables[0]
        return weights_of(trainer.model), table.step_count, bits(table.read(all_keys(batches_of(6))))


def test_a_loss_that_is_not_finite_is_not_applied() -> None:
    batches = batches_of(5)
    batches[4].dense = np.full_like(batches[4].dense, np.inf)

    keep = Keep()
    with pytest.raises(FloatingPointError, match="the loss of step 4 is nan: the step was not applied"):
        Outcome("on", batches, callbacks=[keep])
    assert keep.steps == 4
    assert keep.unchanged()


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("threshold", [1, 100])  # metrics on another thread, and on the caller's
@pytest.mark.parametrize("step", [1, 4])  # runs as it is, recorded
def test_a_step_with_a_wrong_label_is_not_applied(
    monkeypatch: pytest.MonkeyPatch, graphs: str, threshold: int, step: int
) -> None:
    monkeypatch.setattr(throughput, "_LARGE_EXAMPLES", threshold)
    batches = batches_of(6)
    batches[step].label[3] = 2.0
    keep = Keep()
    with pytest.raises(ValueError, match=r"^a label is 2.0: labels must be 0 or 1"):
        Outcome(graphs, batches, callbacks=[keep])
    assert keep.steps == step
    assert keep.unchanged()


def test_metrics_on_a_thread_use_the_labels_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread reads logits and labels of a step after the next one has run, which overwrites fixed buffers."""
    monkeypatch.setattr(throughput, "_LARGE_EXAMPLES", 1)
    start, wait, update = ThroughputMeter._start, ThroughputMeter._wait, StreamingMetrics.update
    gate = threading.Event()

    def late_wait(meter: ThroughputMeter) -> None:
        gate.set()
        wait(meter)
        gate.clear()

    def late_start(meter: ThroughputMeter, *args: Any) -> None:
        late_wait(meter)
        start(meter, *args)

    def late_update(metrics: StreamingMetrics, scores: Any, labels: Any, *, check: bool) -> None:
        assert gate.wait(60)
        update(metrics, scores, labels, check=check)

    monkeypatch.setattr(ThroughputMeter, "_wait", late_wait)
    monkeypatch.setattr(ThroughputMeter, "_start", late_start)
    monkeypatch.setattr(StreamingMetrics, "update", late_update)
    same(batches_of(6))


def test_parameters_frozen_between_steps_are_recorded_again() -> None:
    class Freeze(tc.Callback):
        def on_step(self, trainer: tc.Trainer, loss: torch.Tensor) -> None:
            if trainer.progress.step == 4:
                trainer.model.net[0].requires_grad_(False)  # type: ignore[index, operator, union-attr]

    same(batches_of(8), callbacks=[Freeze()])


@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1024, 9000])  # on the caller's thread; with a thread for metrics
def test_many_steps_on_a_gpu(size: int, precision: str) -> None:
    """Sixty steps with misses, evictions and a short last batch, from ids in page-locked memory."""
    batches = batches_of(30, size=size, last=700, one_hot=True, keys=6 * size, locked=True)
    outcome = same(batches, epochs=2, rows=5 * size, precision=precision, optimizer=tc.Adam(lr=0.01))
    assert outcome.trainer.graph_step.replays > 50
    assert outcome.table.hbm is not None
    assert outcome.table.hbm.stats().evictions > 0


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_compiled_dense_part_is_recorded(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.compile` with `train.graphs`. Without a GPU, traced by torch.compile and run by torch."""
    if INTERPRETED:
        compile_model = torch.compile

        def traced(model: Any, *, dynamic: bool, options: Any) -> Any:
            assert options == {"deterministic": True}
            return compile_model(model, dynamic=dynamic, backend="aot_eager")

        monkeypatch.setattr(torch, "compile", traced)

    class Compiled(Model):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.net[2].p = dropout

    torch.compiler.reset()
    outcome = same(batches_of(7), kind=Compiled, compile=True)
    assert type(outcome.trainer._dense_step._run).__name__ == "OptimizedModule"
