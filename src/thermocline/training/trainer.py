"""The training loop: `tc.Trainer`. Start with `fit`.

Takes any nn.Module whose forward takes a Batch and returns one logit per example; the tables are those of its
EmbeddingBags. Logging, validation and saving happen between steps, so a checkpoint is always at a step boundary.

    dense_step.py        forward and backward pass: precision, torch.compile
    optimizer_step.py    one update of tables and dense parameters
    graph_step.py        the whole step as a CUDA graph
    evaluation.py        metrics, best step, early stopping
    progressive.py       metrics of predictions before training
    save_policy.py       when to save, resume
    rank_coordinator.py  interrupt, save and stop across ranks
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from thermocline.batch import Batch
from thermocline.config.dense_sync import DenseSync
from thermocline.config.train import TrainConfig as TrainConfig
from thermocline.embedding.member_table import MemberTable
from thermocline.embedding.table import Table, row_tables
from thermocline.errors import ConfigError, CorruptionError, ThermoclineError
from thermocline.pipeline.executor import StageStats
from thermocline.pipeline.lookahead import LookAheadStats
from thermocline.pipeline.prefetch import prefetch
from thermocline.training.callbacks import Callback, MetricsFile, Row, TensorBoard, finite
from thermocline.training.dense_optimizers import use_fused
from thermocline.training.dense_step import DenseStep, Loss
from thermocline.training.display import Display
from thermocline.training.evaluation import evaluate, record_validation
from thermocline.training.graph_step import GraphStep
from thermocline.training.metrics import check_labels
from thermocline.training.optimizer_step import OptimizerStep
from thermocline.training.progressive import ProgressiveValidation
from thermocline.training.rank_coordinator import DAMAGE, INTERRUPT, STOP, RankCoordinator
from thermocline.training.rank_figures import RankFigures, by_name
from thermocline.training.save_policy import SavePolicy
from thermocline.training.signals import caught_signals
from thermocline.training.state import Progress, Result
from thermocline.training.status_file import StatusFile
from thermocline.training.throughput import ThroughputMeter
from thermocline.utils.startup import report_phase
from thermocline.utils.text_format import plural

_FAILED = "stopped by an error"


class _InterruptedWait(Exception):
    """Leaves the loop over batches while it waits for files."""


class Trainer:
    """Trains a model, validates it, saves checkpoints and resumes from them.

    dense_optimizer  one or several optimizers of the model's parameters, or None. Tables have their own optimizers
    run_dir          folder for checkpoints, metrics.jsonl and tensorboard; None: nothing is saved
    loss             (logits, labels) -> scalar; default: mean binary cross entropy
    dense_sync       over several ranks: how dense parameters are synchronized

    Over several ranks (tables are `tc.ShardedTable`), every rank has a trainer and passes its own shard of the data;
    rank 0 writes files and prints. The loss is the mean over ranks of the mean over a rank's batch. Evaluation uses the
    mean of the ranks' dense models; it and saving change nothing that training depends on. A finished `fit` leaves the
    mean on every rank.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dense_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        config: TrainConfig | None = None,
        loss: Loss = torch.nn.functional.binary_cross_entropy_with_logits,
        callbacks: Sequence[Callback] = (),
        dense_sync: DenseSync | None = None,
    ) -> None:
        self.model = model
        if isinstance(dense_optimizer, torch.optim.Optimizer):
            dense_optimizer = [dense_optimizer]
        self.optimizers = list(dense_optimizer or ())
        self.config = config or TrainConfig()
        self.loss = loss
        self.tables = tables_of(model)
        self.ranks = RankCoordinator(self.tables, model, self.optimizers, dense_sync or DenseSync())
        """Agreement with the trainers of other ranks."""
        self.progress = Progress()
        self.position: Any = None
        """Position of the last trained batch."""
        self.ending = ""
        """How the run ended, for display."""
        self.completed_step: int | None = None
        """Step that model and tables hold after a run that finished; None: it trains, failed or was interrupted."""
        self._epoch_batches: int | None = None
        """Batches per epoch: length or estimate of the loader, then the count of the first whole epoch."""
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._saves = SavePolicy(self._run_dir, self.config, self.ranks)
        self._dense_step = DenseStep(model, self.tables, self.config)
        self._optimizer_step = OptimizerStep(self.tables, self.optimizers, self.ranks, self.config)
        self.graph_step = GraphStep(
            model, self.tables, self.optimizers, self._dense_step, self._optimizer_step, loss, self.config
        )
        """Steps as CUDA graphs: `train.graphs`."""
        self._user_callbacks = list(callbacks)
        self._callbacks: list[Callback] = []
        self._stop = False
        self._averaged = False
        """Whether `fit` has ended and replaced every rank's own dense model by the mean."""
        self._losses: list[torch.Tensor] = []
        """Losses of the batches whose gradients are accumulated for the next step."""
        self._progressive = ProgressiveValidation(self.config, self.ranks)
        self._meter = ThroughputMeter(self.tables)
        self._figures = RankFigures(self.tables)
        self._stages: Sequence[StageStats] = ()
        self._lookahead: LookAheadStats | None = None
        self._evaluated_ahead: Row | None = None
        """Figures of the look-ahead of the last evaluation."""
        self._logged = self._first_step = 0
        """Last step that was logged, and the step that `fit` started from."""

    # ---- the loop

    def fit(
        self, train: Iterable[Batch], valid: Iterable[Batch] | None = None, test: Iterable[Batch] | None = None,
        *, resume: bool = False,
    ) -> Result:  # fmt: skip
        """Train until the limit of epochs, steps or patience; then evaluate on `test`.

        resume    continue from the newest checkpoint of run_dir, if any; the result is bit-identical to an
                  uninterrupted run. A loader with `seek(position)` continues from there. Any other loader is read
                  from its start and trained batches are skipped: it must yield the same batches in the same order

        Ctrl-C and SIGTERM finish the step, save, and end the run; a second Ctrl-C ends it immediately.
        """
        if self.config.expects_validation and valid is None:
            raise ValueError(f"TrainConfig.{self.config.expects_validation} needs validation data: fit(train, valid)")
        self._start(train, resume)
        examples_before = self.progress.examples
        try:
            self._call("on_start")
            report_phase("reading the first batches")
            with caught_signals(self._saves.checkpoints is not None) as caught:
                while not self.finished and not self._interrupted(caught):
                    self._train_epoch(train, valid, caught)
                interrupted = self._interrupted(caught)
                if self._damaged:
                    self._stop_for_damage()
                step = self._finish(valid, interrupted=interrupted)
                self.completed_step = None if interrupted else step
                trained = int(self.ranks.total(self.progress.examples - examples_before)[0])
                if interrupted and not caught:  # another rank received the signal: exit here too
                    caught.append(signal.SIGTERM)
            seconds = self._meter.seconds
            tested = None
            if test is not None:
                speed = trained / seconds if trained else None
                tested = self._report("test", {**self.evaluate(test), "step": step, "examples_per_s": speed})
            if not interrupted:
                self._averaged = self.ranks.merge()
        except KeyboardInterrupt:
            if self.ending == _FAILED:  # a second Ctrl-C, before `_finish` was done
                saved = self._saves.saved
                last = "nothing is saved" if saved is None else f"step {saved.step} is saved"
                self.ending = f"interrupted at once: {last}"
            raise
        finally:
            self._call("on_end")
        return Result(self.progress, tested, seconds, trained)

    def _train_epoch(self, train: Iterable[Batch], valid: Iterable[Batch] | None, caught: list[int]) -> None:
        """Train to the end of the epoch, or until the run finishes or is interrupted."""
        with (
            contextlib.suppress(_InterruptedWait),
            prefetch(
                _rest_of_epoch(train, self.progress, self.position),
                *self.tables,
                depth=self.config.depth,
                pull_window=self.config.pull_window,
                flags_fn=lambda: self.ranks.local_flags(
                    bool(caught), self._saves.interval_elapsed(), self._stop, bool(self._damage())
                ),
                idle=(lambda: self._while_waiting(train, caught)) if hasattr(train, "waiting") else None,
            ) as batches,
        ):
            self._stages, self._lookahead = batches.stats, batches.lookahead
            for batch in batches:
                self.ranks.merge_flags(batches.flags)
                if self.progress.step == self._first_step and not self._losses:
                    report_phase(self._first_phase)
                loss = self.train_step(batch)
                if loss is None:
                    continue  # the step accumulates more batches
                self._after_step(loss, valid)
                if self.finished or self._interrupted(caught):
                    return
            self.ranks.merge_flags(batches.flags)
            if hasattr(train, "waiting"):  # no end of an epoch: a resumed run continues with newer files
                self._stop = True
                return
            if self._losses:
                self._after_step(self._update(), valid)
            self._end_epoch(valid)

    @property
    def _first_phase(self) -> str:
        """Description of the first step for `report_phase`."""
        if self.config.compile:
            return "compiling the dense part, which takes up to minutes"
        on_gpu = any(table.hbm is not None for table in self.tables)
        return "compiling kernels for the first step" if on_gpu else "computing the first step"

    def _while_waiting(self, train: Any, caught: list[int]) -> None:
        """Work at a step boundary while no batch is ready: stop, save by time, callbacks.

        Over ranks, the readers agree to end, so that all ranks leave the loop at the same batch; a save by time waits
        for the next step.
        """
        if self.ranks.world > 1:
            if self._stop or caught:
                train.request_end()
            if train.waiting:
                self._call("on_wait")
            return
        if self._stop or self._interrupted(caught):
            raise _InterruptedWait
        if not train.waiting:
            return
        if self._saves.saved != self.progress and self._saves.due_by_time():
            self.save()
        self._call("on_wait")

    def _interrupted(self, caught: list[int]) -> bool:
        return self.ranks.requested(INTERRUPT, bool(caught))

    def _damage(self) -> str:
        """Damage of this rank's stores for which training stops; empty: none."""
        return next((table.damage for table in self.tables if table.spec.on_damage == "stop" and table.damage), "")

    @property
    def _damaged(self) -> bool:
        return self.ranks.requested(DAMAGE, bool(self._damage()))

    def _stop_for_damage(self) -> NoReturn:
        """Save, because undamaged rows are exact, and raise `CorruptionError`. All ranks call it at the same step."""
        self.save()
        saved = "nothing is saved" if self._saves.checkpoints is None else "saved"
        self.ending = f"stopped at step {self.progress.step} because a store is damaged: {saved}"
        cause = self._damage() or "another rank found damage in its store; see its message"
        raise CorruptionError(
            f"training stopped at step {self.progress.step}, {saved}: {cause}, then resume; or set on_damage (tiers."
            'on_damage) to "continue"'
        )

    @property
    def finished(self) -> bool:
        """Whether training is complete, or must stop for damage."""
        progress, config = self.progress, self.config
        out_of_steps = config.steps is not None and progress.step >= config.steps
        stop = self.ranks.requested(STOP, self._stop)
        return stop or progress.stopped or out_of_steps or progress.epoch >= config.epochs or self._damaged

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, counted or estimated; None if unknown."""
        config, batches = self.config, self._epoch_batches
        limits = (config.steps, None if batches is None else config.epochs * -(-batches // config.accumulate))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def save_seconds(self) -> float:
        """Duration of the last save."""
        return self._saves.seconds

    def stop(self) -> None:
        """End the run after the current step."""
        self._stop = True

    def train_step(self, batch: Batch) -> torch.Tensor | None:
        """Run forward and backward; on the last of `accumulate` batches also update, and return the step's loss.

        Over several ranks, an empty batch pads a rank without more data: it only takes part in the update.
        """
        done = self.graph_step.train(batch, self.progress)
        if done is not None:
            self._meter.add(*done)
            # torch.tensor would let other threads have the interpreter lock, in every step.
            self._losses.append(torch.from_numpy(np.array(done.loss, np.float32)))
        elif batch.examples == 0 and self.ranks.world > 1:
            self._losses.append(torch.zeros(()))
        else:
            self._losses.append(self._backward(batch))
        self.position = batch.position
        self.progress.batch += 1
        self.progress.examples += batch.examples
        self.progress.advance_time(batch.time, self.config.max_jump)
        if len(self._losses) < self.config.accumulate:
            return None
        return self._update() if done is None else self._count_step()

    def _backward(self, batch: Batch) -> torch.Tensor:
        logits, label, loss = self._dense_step.forward(batch, self.loss)
        label = label.cpu()
        check_labels(label)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss of step {self.progress.step} is {value}: the step was not applied")
        self._dense_step.backward(loss)
        self._meter.add(logits.detach().cpu(), label, value)
        return loss.detach()

    def _update(self) -> torch.Tensor:
        """Apply the accumulated gradients as one step; return the mean of the losses."""
        self._optimizer_step.apply(self.progress, len(self._losses))
        return self._count_step()

    def _count_step(self) -> torch.Tensor:
        self.progress.step += 1
        self.ranks.after_step(self.progress.step)
        losses = [loss.cpu() if loss.is_cuda else loss for loss in self._losses]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        self._losses = []
        return loss

    def _after_step(self, loss: torch.Tensor, valid: Iterable[Batch] | None) -> None:
        """Log, validate and save if due. Validation is first, so that a resumed run does not repeat it."""
        config, step = self.config, self.progress.step
        if step == self._first_step + 1:
            report_phase(None)
        self._call("on_step", loss)
        if step % config.log_every == 0:
            self._log()
        if self._progressive.ended(self.progress):
            self._meter.settle()
            self._report("progressive", self._progressive.close(self.progress))
        if valid is not None and config.valid_every is not None and step % config.valid_every == 0:
            self.validate(valid)
        if self._saves.due(step):
            self.save()

    def _end_epoch(self, valid: Iterable[Batch] | None) -> None:
        if self.progress.batch == 0:
            raise ValueError(
                f"the training data has no batches in epoch {self.progress.epoch + 1}: a generator can be iterated "
                "only once; pass a list or a loader that can be iterated again"
            )
        if self.progress.epoch + 1 >= self.config.epochs:
            self._log_last_step()  # before the metrics of the epoch are reset
        self.progress.epoch += 1
        self._epoch_batches = self.progress.batch
        self.progress.batch, self.position = 0, None
        self._meter.new_epoch()
        if valid is not None and self.config.valid_every is None:
            self.validate(valid)
        self._call("on_epoch")

    # ---- evaluate, save

    def evaluate(self, data: Iterable[Batch]) -> Row:
        """Return exact AUC, logloss, normalized entropy and calibration on `data`, over all ranks. Changes no state."""
        figures, self._evaluated_ahead = evaluate(self.model, self.tables, data, self.ranks, depth=self.config.depth)
        return figures

    def validate(self, valid: Iterable[Batch]) -> Row:
        """Evaluate on `valid` and update the best AUC; with patience, save the best state."""
        with self._meter.paused():
            figures = self.evaluate(valid)
        is_best = record_validation(self.progress, self.config, figures["auc"])
        row = self._report("valid", figures)
        if is_best or self.config.patience is None:
            self.progress.valid = row
        if is_best and self.config.patience is not None:
            self.save(tag="best")
        return row

    def save(self, tag: str | None = None) -> None:
        """Save a checkpoint now; without a run_dir, do nothing.

        Raises after a `fit` that has replaced the ranks' own dense models by their mean: the checkpoint would not
        contain the state that training continues from.
        """
        if self._averaged and self._saves.checkpoints is not None:
            raise ThermoclineError(
                f"fit has ended, and every rank has the mean of the dense models: the state of step "
                f"{self.progress.step} was saved before; to save under a tag, call save() in a callback during training"
            )
        self._meter.settle()
        checkpoint = self._saves.save(self.progress, self.position, self._meter, self._progressive.state(), tag)
        if checkpoint is not None:
            self._call("on_checkpoint", checkpoint)

    def _report(self, event: str, figures: Row) -> Row:
        """Call the callbacks; return the event without the look-ahead of an evaluation, which depends on time."""
        row: Row = finite({"event": event, "step": self.progress.step, "epoch": self.progress.epoch, **figures})
        if event == "train":
            self._call("on_log", row)
        else:
            ahead = None if event == "progressive" else self._evaluated_ahead
            self._call("on_validation", {**row, "lookahead": finite(ahead)})
        return row

    def _log_last_step(self) -> None:
        """Log the last step of the run unless it is logged, so that a run of a few steps has a log, too."""
        if self.progress.step > self._logged:
            self._log()

    def _log(self) -> None:
        self._logged = self.progress.step
        rate = self._optimizer_step.rate_factor(self.progress, self.progress.step - 1)
        row = {**self._meter.row(self._stages, self._lookahead), "rate": rate}
        for name in ("expired", "admission"):
            if name in row:
                row[name] = {table: self._total_figures(figures) for table, figures in row[name].items()}
        damage = {table.name: table.damage for table in self.tables if table.damage}
        own = self._figures.take(self.progress.examples, row["examples_per_s"], row["lookahead"], damaged=bool(damage))
        ranks = [by_name(figures) for figures in self.ranks.gather(*own)]
        for name in ("examples", "examples_per_s", "damaged_partitions"):
            row[name] = sum(rank[name] for rank in ranks)
        if (latest := self.ranks.latest(self.progress.event_time)) is not None:
            row["event_time"] = latest
        self._report("train", {**row, "damage": damage, "ranks": ranks, "time": time.time()})

    def _total_figures(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return figures of a table over all ranks: sums, of seconds the largest."""
        per_rank = self.ranks.gather(*figures.values())
        return {
            name: max(values) if name == "seconds" else int(sum(values))
            for name, values in zip(figures, zip(*per_rank, strict=True), strict=True)
        }

    # ---- start, end

    def _start(self, train: Iterable[Batch], resume: bool) -> None:
        """Reset the state of an earlier `fit`, open the run folder, and restore it with `resume`."""
        self.ranks.require_equal_settings(self.config, saves=self._run_dir is not None, resume=resume)
        trained = self.progress.step > 0
        self._optimizer_step.discard_gradients()  # left by a failed step
        self._losses = []
        if self.config.torch_threads is not None:
            torch.set_num_threads(self.config.torch_threads)
        self.progress = Progress(rates={table.name: table.optimizer.lr for table in self.tables})
        for table in self.tables:
            table.accumulate = self.config.accumulate
            if self.config.max_jump is not None:
                table.max_time_jump = self.config.max_jump
        self.position = None
        self._stop = self._averaged = False
        self.completed_step = None
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group.setdefault("initial_lr", float(group["lr"]))
        use_fused(self.optimizers)
        restored = self._saves.open(self.tables, self.model, self.optimizers, resume=resume, trained=trained)
        metrics = progressive = None
        if restored is not None:
            if hasattr(train, "waiting") and restored.world != self.ranks.world:
                raise ConfigError(
                    f"data.follow = true: the checkpoint is of {plural(restored.world, 'rank')}, which have read "
                    f"different parts of the files, and this run has {plural(self.ranks.world, 'rank')}: resume with "
                    "the same number of ranks"
                )
            self.progress, metrics, progressive = self._saves.resumed(restored)
            self.position = restored.position
        self._progressive = ProgressiveValidation(self.config, self.ranks, self.progress.step, progressive)
        self._meter = ThroughputMeter(self.tables, metrics, self._progressive.metrics)  # restored tiers count from 0
        self._figures = RankFigures(self.tables)
        self._logged = self._first_step = self.progress.step
        self.ranks.begin()
        self._epoch_batches = _batches_per_epoch(train)
        self.ending = _FAILED
        self._callbacks = list(self._user_callbacks)
        if self.ranks.is_rank0:
            self._callbacks[:0] = _default_callbacks(self._run_dir, self.config)
        self._saves.start_clock()
        self.model.train()
        self.graph_step.start(self.ranks.world)

    def _finish(self, valid: Iterable[Batch] | None, *, interrupted: bool) -> int:
        """Validate, save and restore the best as needed; return the step that the model and tables hold."""
        progress, checkpoints = self.progress, self._saves.checkpoints
        if not interrupted:  # the resumed run logs these steps
            self._log_last_step()
        if valid is not None and progress.validated != progress.step and not interrupted:
            self.validate(valid)
        if self._saves.saved != progress:
            self.save()
        if interrupted:
            self.ending = f"interrupted and saved at step {progress.step}: continue with --resume (resume=True)"
            return progress.step
        examples = int(self.ranks.total(progress.examples)[0])
        self.ending = f"finished after {plural(progress.step, 'step')}, {plural(examples, 'example')}"
        if self.config.patience is None or progress.best_auc is None or checkpoints is None:
            return progress.step
        self.ending += f"; best AUC {progress.best_auc:.4f} at step {progress.best_step}, restored"
        if progress.best_step != progress.step:
            checkpoints.restore("best")
        return progress.best_step

    def _call(self, event: str, *args: Any) -> None:
        with self.ranks.busy():
            for callback in self._callbacks:
                getattr(callback, event)(self, *args)


def _default_callbacks(run_dir: Path | None, config: TrainConfig) -> Iterator[Callback]:
    if run_dir is not None:
        yield MetricsFile(run_dir / "metrics.jsonl")
        yield StatusFile(run_dir / "status.json")
        if config.tensorboard:
            yield TensorBoard(run_dir / "tensorboard")
    if config.display:
        yield Display()


def _rest_of_epoch(train: Any, progress: Progress, position: Any) -> Iterable[Batch]:
    """Return the batches of the current epoch that are not trained yet."""
    if hasattr(train, "set_epoch"):
        train.set_epoch(progress.epoch)
    if progress.batch == 0:
        return train  # type: ignore[no-any-return]
    if hasattr(train, "seek") and position is not None:
        return train.seek(position)  # type: ignore[no-any-return]
    return itertools.islice(train, progress.batch, None)


def _batches_per_epoch(train: Any) -> int | None:
    """Return the length of the loader or its estimate; None if it has neither."""
    with contextlib.suppress(TypeError):  # endless data has no length
        return len(train)
    estimate = getattr(train, "estimated_batches", None)
    return None if estimate is None else estimate()


def tables_of(model: torch.nn.Module) -> list[Table]:
    """Return the tables of the model's EmbeddingBags, in module order."""
    candidates = (getattr(module, "table", None) for module in model.modules())
    tables = row_tables(table for table in candidates if isinstance(table, Table | MemberTable))
    names = [table.name for table in tables]
    if not tables or len(set(names)) != len(names):
        raise ValueError(f"the model's tables are {names}: it needs EmbeddingBags whose tables have unique names")
    if any(table.updated_in_backward for table in tables):
        raise ValueError(
            "the model has a collection of thermocline.torchrec, whose rows backward updates: tc.Trainer would make "
            "a second step: use its TrainPipelineSparseDist or an own loop, or tc.EmbeddingBag with tc.Trainer"
        )
    return tables
