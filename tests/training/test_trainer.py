"""Trainer: a resumed run equals an uninterrupted run, the best step is restored, progress is reported."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run import EXAMPLES, Ads, World, differing
from helpers.stream import CONFIG, write_file
from rich.console import Console

import thermocline as tc
from thermocline.config.lr_schedule import Schedule
from thermocline.training.callbacks import Callback
from thermocline.training.display import Display
from thermocline.training.run import Run
from thermocline.training.trainer import TrainConfig, Trainer, tables_of

TRAIN, VALID, TEST = Ads(7), Ads(4, seed=1), Ads(4, seed=2)
QUIET: dict[str, Any] = {"display": False, "tensorboard": False, "checkpoint_minutes": None}
STORAGES = ["memory", "ssd"]
REPRODUCIBLE = ("event", "step", "epoch", "rate", "examples", "auc", "logloss", "ne", "calibration")


class Crash(Exception):
    """A simulated crash of a run."""


class CrashAtStep(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        if trainer.progress.step == self.step:
            raise Crash


def trainer_of(world: World, path: Path | None = None, callbacks: Any = (), **config: Any) -> Trainer:
    run_dir = None if path is None else path / "run"
    settings = TrainConfig(**{**QUIET, **config})
    return Trainer(world.model, world.optimizer, run_dir=run_dir, config=settings, callbacks=callbacks)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without columns that depend on time or on the step at which the process started."""
    rows = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k in REPRODUCIBLE} for row in rows]


# ---- bit-identical training


def test_fit_equals_a_plain_loop(tmp_path: Path) -> None:
    world = World(None)
    world.train(TRAIN)
    world.train(TRAIN)
    expected = world.bits()
    other = World(None)
    result = trainer_of(other, epochs=2, depth=3).fit(TRAIN)
    assert (result.progress.step, result.progress.epoch, result.examples) == (14, 2, 14 * EXAMPLES)
    bits = other.bits()
    assert differing(bits, expected) == []


FULL: dict[str, Any] = {
    "epochs": 3,
    "schedule": Schedule(kind="cosine", warmup_steps=3, decay_steps=12),
    "clip_norm": 0.05,
    "valid_every": 4,
    "patience": 50,
    "plateau_factor": 0.5,
    "log_every": 2,
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizers", ["adagrad", "adam"])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, storage: str, optimizers: str) -> None:
    def world_at(path: Path) -> World:
        return World(path if storage == "ssd" else None, optimizers)

    world = world_at(tmp_path / "whole")
    whole = trainer_of(world, tmp_path / "whole", **FULL).fit(TRAIN, VALID, TEST)
    expected = world.bits()
    world.close()
    path = tmp_path / "killed"
    for step in (2, 7, 8, 15, 20):  # before the first save, at the end of an epoch, at a validation, inside an epoch
        world = world_at(path)
        trainer = trainer_of(world, path, [CrashAtStep(step)], checkpoint_every=3, depth=1 + step % 3, **FULL)
        with pytest.raises(Crash):
            trainer.fit(TRAIN, VALID, TEST, resume=True)
        world.close()
    world = world_at(path)
    result = trainer_of(world, path, **FULL).fit(TRAIN, VALID, TEST, resume=True)
    assert differing(world.bits(), expected) == []
    assert result.progress == whole.progress
    assert result.progress.plateau < 1, "learning rates were lowered"
    assert result.test is not None
    assert whole.test is not None
    assert whole.test.pop("examples_per_s") > 0
    assert result.test.pop("examples_per_s") > 0
    assert result.test == whole.test
    assert lines_of(path) == lines_of(tmp_path / "whole")
    world.close()


def test_loader_without_seek_is_read_from_its_start(tmp_path: Path) -> None:
    batches = list(Ads(9))
    for batch in batches:
        batch.position = None
    expected = World(None)
    trainer_of(expected, epochs=2).fit(batches)
    world = World(None)
    with pytest.raises(Crash):
        trainer_of(world, tmp_path, [CrashAtStep(14)], epochs=2, checkpoint_every=4).fit(batches)
    world.close()
    world = World(None)
    trainer_of(world, tmp_path, epochs=2).fit(batches, resume=True)
    assert differing(world.bits(), expected.bits()) == []
    world.close()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_finishes_the_step_saves_and_ends(
    tmp_path: Path, number: signal.Signals, error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    class SendSignal(Callback):
        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            if trainer.progress.step == 5:
                os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    world = World(None)
    with pytest.raises(error):
        trainer_of(world, tmp_path, [SendSignal()], epochs=2, display=True).fit(TRAIN, VALID)
    assert signal.getsignal(number) is handler
    assert "interrupted and saved at step 5: continue with --resume (resume=True)" in capsys.readouterr().out
    world.close()
    world = World(None)
    trainer = trainer_of(world, tmp_path, epochs=2)
    trainer.fit(TRAIN, VALID, resume=True)
    expected = World(None)
    trainer_of(expected, epochs=2).fit(TRAIN, VALID)
    assert differing(world.bits(), expected.bits()) == []
    world.close()


# ---- gradient accumulation


def train_plain_loop(world: World, batches: list[Any], accumulate: int) -> None:
    """Plain loop: the mean of the gradients of each group; the last group may be smaller."""
    for table in world.tables:
        table.accumulate = accumulate
    for begin in range(0, len(batches), accumulate):
        group = batches[begin : begin + accumulate]
        for batch in group:
            torch.nn.functional.binary_cross_entropy_with_logits(world.model(batch), batch.label).backward()
        for table in world.tables:
            table.step(scale=1 / len(group))
        for parameter in world.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / len(group))
        world.optimizer.step()
        world.optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [2, 3, 7, 20])
def test_accumulation_equals_a_plain_loop(accumulate: int) -> None:
    expected = World(None, "adam")
    for _ in range(2):
        train_plain_loop(expected, list(TRAIN), accumulate)
    losses: list[float] = []

    class Recorder(Callback):
        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            losses.append(float(loss))
            assert all(table.pending_gradients == 0 for table in trainer.tables)

    world = World(None, "adam")
    trainer = trainer_of(world, callbacks=[Recorder()], epochs=2, accumulate=accumulate, depth=2)
    progress = trainer.fit(list(TRAIN)).progress
    steps = 2 * -(-7 // accumulate)
    assert (progress.step, progress.examples, len(losses)) == (steps, 14 * EXAMPLES, steps)
    assert trainer.total_steps == steps
    assert differing(world.bits(), expected.bits()) == []


class CrashAtBatch(Ads):
    """A source that raises before its nth batch."""

    def __init__(self, batches: int, nth: int) -> None:
        super().__init__(batches)
        self.left = nth

    def batch(self, n: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Crash
        return super().batch(n)


@pytest.mark.parametrize("storage", STORAGES)
def test_run_crashed_between_accumulated_batches_equals_uninterrupted_run(tmp_path: Path, storage: str) -> None:
    def world_at(path: Path) -> World:
        return World(path if storage == "ssd" else None, "adam")

    settings = {**FULL, "accumulate": 3, "log_every": 1}
    world = world_at(tmp_path / "whole")
    whole = trainer_of(world, tmp_path / "whole", **settings).fit(TRAIN, VALID, TEST)
    expected = world.bits()
    world.close()
    path = tmp_path / "killed"
    for nth, depth in ((1, 1), (4, 2), (5, 1), (7, 2), (4, 1)):
        world = world_at(path)
        with pytest.raises(Crash):
            trainer_of(world, path, checkpoint_every=1, depth=depth, **settings).fit(
                CrashAtBatch(7, nth), VALID, TEST, resume=True
            )
        saved = tc.Checkpoints(path / "run", world.tables, world.model, world.optimizer).saved()
        assert all(checkpoint.extra["trainer"]["batch"] in (0, 3, 6, 7) for checkpoint in saved)
        world.close()
    world = world_at(path)
    result = trainer_of(world, path, **settings).fit(TRAIN, VALID, TEST, resume=True)
    assert differing(world.bits(), expected) == []
    assert result.progress == whole.progress
    assert lines_of(path) == lines_of(tmp_path / "whole")
    world.close()


def test_ignored_sigint_stays_ignored(tmp_path: Path) -> None:
    """Background jobs of a shell start with SIGINT ignored."""

    class SendSignal(Callback):
        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            if trainer.progress.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    world = World(None)
    try:
        result = trainer_of(world, tmp_path, [SendSignal()]).fit(TRAIN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.progress.epoch == 1
    world.close()


def test_sigint_between_accumulated_batches_finishes_the_step(tmp_path: Path) -> None:
    world = World(None)
    forward, calls = world.model.forward, 0

    def forward_with_signal(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(batch)

    world.model.forward = forward_with_signal
    with pytest.raises(KeyboardInterrupt):
        trainer_of(world, tmp_path, accumulate=3).fit(TRAIN)
    (saved,) = tc.Checkpoints(tmp_path / "run", world.tables, world.model, world.optimizer).saved()
    assert (saved.step, saved.position) == (2, {"batch": 6})
    world.close()


# ---- state after a failure


@pytest.mark.parametrize("storage", STORAGES)
def test_resume_discards_the_gradients_of_a_failed_step(tmp_path: Path, storage: str) -> None:
    """In one process: the step fails between backward and update, with dense gradients and pinned rows left."""
    expected = World(None)
    trainer_of(expected).fit(TRAIN)
    world = World(tmp_path if storage == "ssd" else None)
    trainer = trainer_of(world, tmp_path, checkpoint_every=2)
    step, calls = world.optimizer.step, 0

    def failing_step() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Crash
        step()

    world.optimizer.step = failing_step  # type: ignore[assignment,method-assign]
    with pytest.raises(Crash):
        trainer.fit(TRAIN)
    assert world.model.out.weight.grad is not None
    trainer.fit(TRAIN, resume=True)
    assert differing(world.bits(), expected.bits()) == []
    world.close()


def test_trained_model_without_a_checkpoint_cannot_resume(tmp_path: Path) -> None:
    """The initial state of the tables is saved, that of the dense model is not."""
    world = World(None)
    trainer = trainer_of(world, tmp_path, [CrashAtStep(2)])
    with pytest.raises(Crash):
        trainer.fit(TRAIN)
    with pytest.raises(tc.ThermoclineError, match=r"has no checkpoint.*create a new model"):
        trainer.fit(TRAIN, resume=True)
    world.close()


def test_repeated_validation_is_written_once(tmp_path: Path) -> None:
    """The run crashes after the validation of an epoch; its last save is before it."""

    class CrashAfterEpoch(Callback):
        def on_epoch(self, trainer: Trainer) -> None:
            raise Crash

    world = World(None)
    with pytest.raises(Crash):
        trainer_of(world, tmp_path, [CrashAfterEpoch()], checkpoint_every=7).fit(TRAIN, VALID)
    world.close()
    world = World(None)
    trainer_of(world, tmp_path).fit(TRAIN, VALID, resume=True)
    assert [(row["event"], row["step"]) for row in lines_of(tmp_path)] == [("train", 7), ("valid", 7)]
    world.close()


def test_missing_or_exhausted_validation_data_raises(tmp_path: Path) -> None:
    world = World(None)
    with pytest.raises(ValueError, match="patience needs validation data"):
        trainer_of(world, tmp_path, patience=1).fit(TRAIN)
    with pytest.raises(ValueError, match="valid_every needs validation data"):
        trainer_of(world, tmp_path, valid_every=1).fit(TRAIN)
    with pytest.raises(ValueError, match="evaluation data has no batches: a generator can be iterated only once"):
        trainer_of(world, epochs=2).fit(TRAIN, iter(VALID))
    world.close()


def test_evaluation_restores_the_mode_of_every_module() -> None:
    world = World(None)
    trainer = trainer_of(world)
    trainer.fit(TRAIN)
    world.model.norm.eval()
    trainer.evaluate(VALID)
    assert world.model.training
    assert not world.model.norm.training
    world.model.eval()
    trainer.evaluate(VALID)
    assert not any(module.training for module in world.model.modules())


# ---- validation and the best step


@pytest.mark.parametrize("storage", STORAGES)
def test_patience_ends_the_run_and_restores_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    aucs = iter([0.6, 0.7, 0.65, 0.8, 0.79, 0.8, 0.9])
    world = World(tmp_path if storage == "ssd" else None)
    bits: dict[int, dict[str, bytes]] = {}

    class Recorder(Callback):
        def on_validation(self, trainer: Trainer, row: Any) -> None:
            if row["event"] == "valid":
                bits[trainer.progress.step] = watched.bits()

    watched = world
    trainer = trainer_of(world, tmp_path, [Recorder()], epochs=9, valid_every=3, patience=2, keep=1)
    monkeypatch.setattr(trainer, "evaluate", lambda data: {"auc": next(aucs, 0.5), "examples": 1})
    # bits() runs during a pipeline here, whose pinned rows the check would reject.
    monkeypatch.setattr(tc.DramTier, "check", lambda self, *, idle=True: None)
    result = trainer.fit(TRAIN, VALID, TEST)
    progress = result.progress
    assert (progress.step, progress.best_step, progress.best_auc, progress.stopped) == (18, 12, 0.8, True)
    assert progress.valid is not None
    assert progress.valid["step"] == 12
    assert result.test is not None
    assert (result.test["auc"], result.test["step"]) == (0.9, 12)
    assert differing(world.bits(), bits[12]) == []
    world.close()
    # A resumed run is already finished and restores the best again.
    watched = world = World(tmp_path if storage == "ssd" else None)
    trainer = trainer_of(world, tmp_path, [CrashAtStep(19)], epochs=9, valid_every=3, patience=2, keep=1)
    resumed = trainer.fit(TRAIN, VALID, resume=True)
    assert resumed.progress == progress
    assert differing(world.bits(), bits[12]) == []
    world.close()


def test_validation_after_each_epoch_and_at_the_end(tmp_path: Path) -> None:
    world = World(None)
    result = trainer_of(world, tmp_path, epochs=5, steps=17, checkpoint_every=7).fit(TRAIN, VALID, TEST)
    rows = [(row["event"], row["step"], row["epoch"]) for row in lines_of(tmp_path)]
    assert rows == [("valid", 7, 1), ("valid", 14, 2), ("train", 17, 2), ("valid", 17, 2), ("test", 17, 2)]
    assert result.test is not None
    assert 0 < result.test["auc"] < 1
    assert result.test["examples"] == 4 * EXAMPLES
    saved = tc.Checkpoints(tmp_path / "run", world.tables, world.model, world.optimizer).saved()
    assert [checkpoint.step for checkpoint in saved] == [14, 17]
    world.close()


def test_evaluation_changes_nothing() -> None:
    world = World(None)
    trainer = trainer_of(world)
    trainer.fit(TRAIN)
    before = world.bits(), world.tables[0].dram.stats().resident
    assert trainer.evaluate(VALID) == trainer.evaluate(list(VALID))
    assert (world.bits(), world.tables[0].dram.stats().resident) == before
    assert world.model.training


def test_equal_labels_have_no_auc(tmp_path: Path) -> None:
    batches = [TRAIN.batch(0)]
    batches[0].label = torch.ones(EXAMPLES)
    world = World(None)
    result = trainer_of(world, tmp_path, display=True).fit(TRAIN, batches, batches)
    assert result.test is not None
    assert result.test["auc"] is None
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    world.close()
    world = World(None)
    with pytest.raises(ValueError, match="patience needs an AUC"):
        trainer_of(world, tmp_path / "other", patience=1).fit(TRAIN, batches)
    world.close()
    with pytest.raises(ValueError, match="plateau_factor needs an AUC"):
        trainer_of(World(None), plateau_factor=0.5).fit(TRAIN, batches)


def test_training_improves_the_auc() -> None:
    world = World(None)
    trainer = trainer_of(world, epochs=4)
    before = trainer.evaluate(VALID)["auc"]
    trainer.fit(Ads(40))
    assert trainer.evaluate(VALID)["auc"] > max(0.6, before + 0.05)


def test_checkpoint_minutes(tmp_path: Path) -> None:
    class Count(Callback):
        saved = 0

        def on_checkpoint(self, trainer: Trainer, checkpoint: tc.Checkpoint) -> None:
            self.saved += 1

    for minutes, expected in ((1e-9, 7 + 1), (60.0, 1)):  # and one at the end, because the epoch count has changed
        world, count = World(None), Count()
        trainer_of(world, tmp_path / str(minutes), [count], checkpoint_minutes=minutes).fit(TRAIN)
        assert count.saved == expected
        world.close()


# ---- callbacks and display


def test_order_of_callbacks(tmp_path: Path) -> None:
    calls: list[str] = []

    class Recorder(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                calls.append(name.removeprefix("on_"))
            return super().__getattribute__(name)

        def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
            assert loss.requires_grad is False
            if trainer.progress.step == 5:
                trainer.stop()

    world = World(None)
    trainer = trainer_of(world, tmp_path, [Recorder()], epochs=3, log_every=2, checkpoint_every=3, patience=9)
    trainer.fit(Ads(3), VALID, TEST)
    first_epoch = ["step", "step", "log", "step", "checkpoint", "validation", "checkpoint", "epoch"]
    rest = ["step", "log", "step", "log", "validation", "checkpoint", "validation"]
    assert calls == ["start", *first_epoch, *rest, "end"]
    world.close()


def test_metrics_file_tensorboard_and_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path)
    trainer = trainer_of(world, tmp_path, display=True, tensorboard=True, log_every=2, checkpoint_every=4)
    trainer.fit(TRAIN, VALID, TEST)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["train"] * 4 + ["valid", "test"]
    assert rows[-1].keys() >= {"auc", "logloss", "ne", "calibration", "examples", "step", "examples_per_s"}
    log = rows[2]
    assert log.keys() >= {"loss", "auc", "logloss", "ne", "calibration", "examples_per_s", "rate"}
    assert set(log["tables"]) == {"a", "b"}
    for sources in rows[0]["tables"].values():
        assert sum(sources.values()) == pytest.approx(1)
        assert sources["new"] > 0
    assert list(log["stages"]) == ["read", "collect", "pull", "load", "train"]
    assert all(set(stage) == {"busy", "wait", "blocked", "fill"} for stage in log["stages"].values())
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    out = capsys.readouterr().out
    for text in (
        "epoch 1/1  step 2  loss 0.",
        "examples/s",
        "a: memory ",
        "queue ",
        "saved step 4 in",
        "test at step 7: auc 0.",
    ):
        assert text in out
    assert "finished after 7 steps, 112 examples" in out
    world.close()


def test_live_display_renders(tmp_path: Path) -> None:
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=True, width=150))
    world = World(None)
    trainer_of(world, tmp_path, [display], log_every=3, checkpoint_every=3).fit(TRAIN, VALID)
    for text in ("busy", "blocked", "step 6", "valid at step 7", "saved step 3", "finished after 7 steps"):
        assert text in output.getvalue()
    world.close()


# ---- misuse


def test_folder_or_store_of_another_run_is_not_reused(tmp_path: Path) -> None:
    world = World(tmp_path)
    trainer = trainer_of(world, tmp_path)
    trainer.fit(TRAIN)
    with pytest.raises(tc.ThermoclineError, match="continue it with resume=True"):
        trainer.fit(TRAIN)
    world.close()
    world = World(tmp_path)
    with pytest.raises(tc.ThermoclineError, match="continue it with resume=True"):
        trainer_of(world, tmp_path).fit(TRAIN)
    with pytest.raises(tc.ThermoclineError, match="already has commits"):
        trainer_of(world, tmp_path / "other").fit(TRAIN)
    with pytest.raises(ValueError, match="already has commits"):
        trainer_of(world).fit(TRAIN)
    world.close()


def test_wrong_settings_name_the_field() -> None:
    for field in (
        "epochs",
        "steps",
        "accumulate",
        "depth",
        "clip_norm",
        "valid_every",
        "patience",
        "plateau_factor",
        "keep",
        "log_every",
    ):
        with pytest.raises(ValueError, match=rf"train\.{field} is 0"):
            TrainConfig(**{field: 0})
    with pytest.raises(TypeError):
        TrainConfig(1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().epochs = 2  # type: ignore[misc]
    world = World(None)
    with pytest.raises(ValueError, match="patience needs a run_dir"):
        trainer_of(world, patience=1)
    with pytest.raises(ValueError, match="resume=True needs a run_dir"):
        trainer_of(world).fit(TRAIN, resume=True)


def test_wrong_models_and_data_raise() -> None:
    with pytest.raises(ValueError, match="needs EmbeddingBags"):
        tables_of(torch.nn.Linear(1, 1))
    world = World(None)
    with pytest.raises(ValueError, match="no batches in epoch 2: a generator can be iterated only once"):
        trainer_of(world, epochs=2).fit(iter(TRAIN))
    world.model.forward = lambda batch: torch.zeros(3)
    with pytest.raises(ValueError, match=r"returned logits of shape \[3\] for \[16\] labels"):
        trainer_of(world).fit(TRAIN)
    world = World(None)
    trainer = trainer_of(world)
    trainer.loss = lambda logits, label: logits.sum() * math.nan
    before = world.bits()
    with pytest.raises(FloatingPointError, match="the loss of step 0 is nan"):
        trainer.fit(TRAIN)
    assert [name for name in differing(world.bits(), before) if name.startswith("table")] == []


def test_torch_threads_are_restored_on_resume(tmp_path: Path) -> None:
    world = World(None)
    trainer_of(world, tmp_path, torch_threads=2).fit(TRAIN)
    assert torch.get_num_threads() == 2
    world.close()
    world = World(None)  # sets one thread
    trainer_of(world, tmp_path).fit(TRAIN, resume=True)
    assert torch.get_num_threads() == 2
    world.close()
    torch.set_num_threads(1)


def test_a_config_trains_rows_with_partial_rowwise_adam(tmp_path: Path) -> None:
    write_file(tmp_path / "in" / "0.csv", ((i % 2, i, i % 7, i % 5) for i in range(64)))
    overrides = ["train.optimizer=partial_rowwise_adam"]
    with Run(tc.Config.parse(CONFIG.format(folder=tmp_path), overrides)) as run:
        run.fit()
        assert isinstance(run.table.spec.optimizer, tc.PartialRowWiseAdam)
        assert [type(optimizer) for optimizer in run.optimizers] == [torch.optim.Adam]
        assert any(rows[:, run.table.dim :].any() for _, rows in run.table.rows())  # moments
