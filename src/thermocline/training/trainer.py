"""The loop, for those who do not want to write one: `tc.Trainer`. Read `fit` first; the rest is what it calls.

Any nn.Module will do whose forward takes a Batch and returns one logit per example; its tables are found by walking its
modules. Everything the loop does beside training happens between steps, so a checkpoint is always a step boundary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from thermocline.batch import Batch
from thermocline.checkpoint.manager import Checkpoint, Checkpoints
from thermocline.config.dense_sync import DenseSync
from thermocline.config.train import TrainConfig as TrainConfig
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError
from thermocline.pipeline.executor import StageStats
from thermocline.pipeline.prefetch import prefetch
from thermocline.training.callbacks import Callback, MetricsFile, Row, TensorBoard, finite
from thermocline.training.display import Display
from thermocline.training.metrics import ExactMetrics
from thermocline.training.rank_coordinator import INTERRUPT, SAVE, STOP, RankCoordinator
from thermocline.training.signals import caught_signals
from thermocline.training.state import Progress, Result
from thermocline.training.throughput import ThroughputMeter
from thermocline.utils.text_format import plural

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_BY_AN_ERROR = "ended by an error"


class Trainer:
    """Trains a model, watches it, saves it, resumes it.

    run_dir          checkpoints, metrics.jsonl and tensorboard go there; none: nothing is saved
    dense_optimizer  of the model's parameters: one, several, or none. Tables have their own
    loss             (logits, labels) -> scalar; default: mean binary cross entropy
    dense_sync       over several ranks: how their dense parameters are kept together

    Over several ranks (tables are `tc.ShardedTable`), every rank has a trainer and gives it its own part of the data;
    rank 0 writes and shows. The loss is the mean over ranks of the mean over a rank's batch.
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
        self._ranks = RankCoordinator(self.tables, model, self.optimizers, dense_sync or DenseSync())
        self.progress = Progress()
        self.position: Any = None
        """Of the last trained batch."""
        self._epoch_batches: int | None = None
        """As the loader says or estimates; after the first whole epoch, as counted."""
        self.ending = ""
        self.save_seconds = 0.0
        self._run_dir = None if run_dir is None else Path(run_dir)
        if self._run_dir is None and self.config.patience is not None:
            raise ValueError("TrainConfig.patience needs a run_dir: the best state is kept in a checkpoint")
        self._given_callbacks = list(callbacks)
        self._callbacks: list[Callback] = []
        self._checkpoints: Checkpoints | None = None
        self._stop = False
        self._losses: list[torch.Tensor] = []
        """Of the batches whose gradients wait for the next step."""
        self._meter = ThroughputMeter(self.tables)
        self._stages: Sequence[StageStats] = ()
        self._saved: Progress | None = None
        self._saved_at = 0.0

    # ---- the loop

    def fit(
        self, train: Iterable[Batch], valid: Iterable[Batch] | None = None, test: Iterable[Batch] | None = None,
        *, resume: bool = False,
    ) -> Result:  # fmt: skip
        """Trains until the epochs, the steps or the patience are used up; then tests.

        resume    goes on from the newest checkpoint of run_dir, if there is one, with the bits of a run never stopped.
                  A loader with `seek(position)` goes on from there; any other is read again and its batches skipped:
                  it must give the same ones in the same order

        Ctrl-C and SIGTERM finish the step, save, and then end the run; a second Ctrl-C ends it at once.
        """
        config = self.config
        if config.needs_validation and valid is None:
            raise ValueError(f"TrainConfig.{config.needs_validation} needs validation data: fit(train, valid)")
        self._start(train, resume)
        already = self.progress.examples
        try:
            self._call("on_start")
            with caught_signals(self._checkpoints is not None) as caught:
                ways: dict[str, Any] = {"depth": config.depth, "pull_window": config.pull_window}
                ways["flags_fn"] = lambda: self._ranks.local_flags(bool(caught), self._clock_says_save(), self._stop)
                while not self.finished and not self._ranks.requested(INTERRUPT, bool(caught)):
                    with prefetch(self._rest_of_epoch(train), *self.tables, **ways) as batches:
                        self._stages = batches.stats
                        for batch in batches:
                            self._ranks.merge_flags(batches.flags)
                            loss = self.train_step(batch)
                            if loss is None:
                                continue  # more batches make this step
                            self._after_step(loss, valid)
                            if self.finished or self._ranks.requested(INTERRUPT, bool(caught)):
                                break
                        else:
                            self._ranks.merge_flags(batches.flags)
                            if self._losses:
                                self._after_step(self._update(), valid)
                            self._end_epoch(valid)
                interrupted = self._ranks.requested(INTERRUPT, bool(caught))
                step = self._finish(valid, interrupted=interrupted)
                trained = int(self._ranks.total(self.progress.examples - already)[0])
                if interrupted and not caught:  # another rank was: all end alike
                    caught.append(signal.SIGTERM)
            seconds = self._meter.seconds
            tested = None
            if test is not None:
                speed = trained / seconds if trained else None
                tested = self._report("test", {**self.evaluate(test), "step": step, "examples_per_s": speed})
        except KeyboardInterrupt:
            if self.ending == _BY_AN_ERROR:  # the second Ctrl-C: the first had it saved
                last = "nothing is saved" if self._saved is None else f"step {self._saved.step} is saved"
                self.ending = f"interrupted at once: {last}"
            raise
        finally:
            self._call("on_end")
        return Result(self.progress, tested, seconds, trained)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        progress, config = self.progress, self.config
        out_of_steps = config.steps is not None and progress.step >= config.steps
        stop = self._ranks.requested(STOP, self._stop)
        return stop or progress.stopped or out_of_steps or progress.epoch >= config.epochs

    @property
    def total_steps(self) -> int | None:
        """Of the whole run, as far as is known; none: endless data."""
        config, batches = self.config, self._epoch_batches
        limits = (config.steps, None if batches is None else config.epochs * -(-batches // config.accumulate))
        return min((limit for limit in limits if limit is not None), default=None)

    def stop(self) -> None:
        """Ends the run after the current step."""
        self._stop = True

    def train_step(self, batch: Batch) -> torch.Tensor | None:
        """Forward and backward; with the last of `accumulate` batches one update of everything, and the step's loss.

        A batch of no examples, of a rank whose data has run out, only takes part in the update.
        """
        if batch.examples == 0 and self._ranks.world > 1:
            self._losses.append(torch.zeros(()))
        else:
            self._losses.append(self._backward(batch))
        self.position = batch.position
        self.progress.batch += 1
        self.progress.examples += batch.examples
        return self._update() if len(self._losses) == self.config.accumulate else None

    def _backward(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch)
        label = torch.as_tensor(batch.label, dtype=torch.float32, device=logits.device)
        if logits.shape != label.shape:
            raise ValueError(f"the model returned {list(logits.shape)} logits for {list(label.shape)} labels")
        loss = self.loss(logits, label)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss of step {self.progress.step} is {value}: nothing of it was applied")
        loss.backward()  # type: ignore[no-untyped-call]
        self._meter.add(logits.detach().cpu(), label.cpu(), value)
        return loss.detach()

    def _update(self) -> torch.Tensor:
        """One step of everything, by the mean of the gradients that wait for it; returns the mean of their losses."""
        self._set_rates()
        if self._ranks.sync is not None:
            for table in self.tables:  # autograd may have given a dense gradient the memory of a row's
                table.reduce_gradients()
            self._ranks.after_backward()
        grads = [p.grad for p in self._dense_parameters() if p.grad is not None]
        scale = self._clipped(1 / len(self._losses), grads)
        for table in self.tables:  # before dense gradients change: their memory may be the same
            table.step(scale=scale)
        if scale != 1 and grads:
            torch._foreach_mul_(grads, scale)
        for optimizer in self.optimizers:
            optimizer.step()
        self._forget_gradients()
        self.progress.step += 1
        self._ranks.after_step(self.progress.step)
        loss = torch.stack([loss.cpu() for loss in self._losses]).mean()
        self._losses = []
        return loss

    def _clipped(self, scale: float, grads: list[torch.Tensor]) -> float:
        """What all gradients are multiplied by: `scale`, or less if their norm would be above `clip_norm`."""
        clip = self.config.clip_norm
        if clip is None:
            return scale
        dense = self._ranks.norm(float(torch.nn.utils.get_total_norm(grads)))
        norm = scale * math.hypot(dense, *(table.gradient_norm() for table in self.tables))
        if not math.isfinite(norm):
            step = self.progress.step
            raise FloatingPointError(f"the norm of the gradients of step {step} is {norm}: nothing of it was applied")
        return scale * clip / norm if norm > clip else scale

    def _forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for table in self.tables:
            table.discard_gradients()

    def _set_rates(self) -> None:
        factor = self._rate(self.progress.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        for table in self.tables:
            table.lr = self.progress.rates[table.name] * factor

    def _rate(self, step: int) -> float:
        return self.config.schedule(step) * self.progress.plateau

    def _dense_parameters(self) -> list[torch.nn.Parameter]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))

    def _after_step(self, loss: torch.Tensor, valid: Iterable[Batch] | None) -> None:
        """Validation comes before a checkpoint: what is saved never has to be validated again."""
        config, step = self.config, self.progress.step
        self._call("on_step", loss)
        if step % config.log_every == 0:
            self._log()
        if valid is not None and config.valid_every is not None and step % config.valid_every == 0:
            self.validate(valid)
        due = config.checkpoint_every is not None and step % config.checkpoint_every == 0
        if due or self._ranks.requested(SAVE, self._clock_says_save()):
            self.save()

    def _clock_says_save(self) -> bool:
        limit = self.config.checkpoint_minutes
        return limit is not None and (time.monotonic() - self._saved_at) / 60 >= limit

    def _end_epoch(self, valid: Iterable[Batch] | None) -> None:
        if self.progress.batch == 0:
            raise ValueError(
                f"the training data has no batches in epoch {self.progress.epoch + 1}: "
                f"a generator runs only once; give a list or a loader whose iteration can begin anew"
            )
        self.progress.epoch += 1
        self._epoch_batches = self.progress.batch
        self.progress.batch, self.position = 0, None
        self._meter.new_epoch()
        if valid is not None and self.config.valid_every is None:
            self.validate(valid)
        self._call("on_epoch")

    # ---- evaluation

    def evaluate(self, data: Iterable[Batch]) -> Row:
        """Exact AUC, logloss, normalised entropy and calibration on `data`. Changes nothing."""
        metrics = ExactMetrics()
        self._ranks.merge()
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), prefetch(data, *self.tables, depth=self.config.depth, training=False) as batches:
                for batch in batches:
                    if batch.examples:
                        label = torch.as_tensor(batch.label, dtype=torch.float32)
                        metrics.update(self.model(batch).cpu(), label.cpu())
        finally:
            for module, training in modes.items():
                module.training = training
        figures = self._ranks.joined(metrics).compute()
        if not figures["examples"]:
            raise ValueError(
                "there are no batches to evaluate on: a generator runs only once; give a list or a loader whose "
                "iteration can begin anew"
            )
        return figures

    def validate(self, valid: Iterable[Batch]) -> Row:
        """Evaluates, and remembers the best: by AUC."""
        progress, config, patience = self.progress, self.config, self.config.patience
        with self._meter.paused():
            figures = self.evaluate(valid)
        defined = math.isfinite(figures["auc"])
        if config.needs_validation and not defined:
            needy = config.needs_validation
            raise ValueError(f"TrainConfig.{needy} needs an AUC: the validation data has labels of one kind only")
        progress.validated = progress.step
        better = defined and (progress.best_auc is None or figures["auc"] > progress.best_auc)
        if better:
            progress.best_auc, progress.best_step, progress.stale = figures["auc"], progress.step, 0
        else:
            progress.stale += 1
            progress.plateau *= config.plateau_factor
        progress.stopped = patience is not None and progress.stale >= patience
        row = self._report("valid", figures)
        if better or patience is None:
            progress.valid = row
        if better and patience is not None:
            self.save(tag="best")
        return row

    def _report(self, event: str, figures: Row) -> Row:
        row: Row = finite({"event": event, "step": self.progress.step, "epoch": self.progress.epoch, **figures})
        self._call("on_log" if event == "train" else "on_validation", row)
        return row

    def _log(self) -> None:
        row = {**self._meter.row(self._stages), "rate": self._rate(self.progress.step - 1)}
        row["examples"], row["examples_per_s"] = self._ranks.total(self.progress.examples, row["examples_per_s"])
        self._report("train", {**row, "examples": int(row["examples"])})

    # ---- begin, save, end

    def _start(self, train: Iterable[Batch], resume: bool) -> None:
        """Restores, or refuses to train over what is there."""
        config, trained = self.config, self.progress.step > 0
        self._forget_gradients()  # of a step that failed
        self._losses = []
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        self.progress = Progress(rates={table.name: table.optimizer.lr for table in self.tables})
        self.position, self._stop, self._saved, self._meter = None, False, None, ThroughputMeter(self.tables)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group.setdefault("initial_lr", group["lr"])
        used = [table.store.path for table in self.tables if table.store is not None and table.store.epoch > 0]
        if self._run_dir is None and (resume or used):
            raise ValueError(
                "resume needs a run_dir" if resume else f"{used[0]} already has commits: give the run's run_dir"
            )
        if self._run_dir is not None:
            again = self._checkpoints is not None
            if self._checkpoints is None:
                made = Checkpoints(
                    self._run_dir, self.tables, self.model, self.optimizers, keep=config.keep,
                    dense_sync=self._ranks.sync,
                )  # fmt: skip
                self._checkpoints = made
            if resume:
                if trained and not self._checkpoints.saved():
                    raise ThermoclineError(
                        f"{self._run_dir} has no checkpoint yet, and the model has been trained: make the model anew"
                    )
                self._resume(self._checkpoints.restore())
            elif again or self._checkpoints.exists:
                raise ThermoclineError(
                    f"{self._run_dir} already has a run: resume=True goes on with it, or use another folder"
                )
        self._ranks.begin()
        self._epoch_batches = _batches_of(train)
        self.ending = _BY_AN_ERROR
        self._callbacks = [*self._own_callbacks(), *self._given_callbacks]
        self._saved_at = time.monotonic()
        self.model.train()

    def _own_callbacks(self) -> Iterator[Callback]:
        if not self._ranks.is_rank0:
            return
        if self._run_dir is not None:
            yield MetricsFile(self._run_dir / "metrics.jsonl")
            if self.config.tensorboard:
                yield TensorBoard(self._run_dir / "tensorboard")
        if self.config.display:
            yield Display()

    def _resume(self, saved: Checkpoint | None) -> None:
        metrics = None
        if saved is not None:
            self.progress, self.position = Progress(**saved.extra["trainer"]), saved.position
            metrics = saved.extra["metrics"]
            if saved.world != self._ranks.world:  # the ranks have other parts of the data now: the epoch begins anew
                self.progress.batch, metrics = 0, None
                trained = sum(extra["trainer"]["examples"] for extra in saved.extras)
                self.progress.examples = trained if self._ranks.is_rank0 else 0
            self._saved = dataclasses.replace(self.progress)
        # Restoring has made new tiers, which count from 0.
        self._meter = ThroughputMeter(self.tables, metrics)

    def _rest_of_epoch(self, train: Any) -> Iterable[Batch]:
        progress = self.progress
        if hasattr(train, "set_epoch"):
            train.set_epoch(progress.epoch)
        if progress.batch == 0:
            return train  # type: ignore[no-any-return]
        if hasattr(train, "seek") and self.position is not None:
            return train.seek(self.position)  # type: ignore[no-any-return]
        return itertools.islice(train, progress.batch, None)

    def save(self, tag: str | None = None) -> None:
        """A checkpoint, here and now; without a run_dir, nothing."""
        if self._checkpoints is None:
            return
        start = time.monotonic()
        self._ranks.merge()
        with self._meter.paused():
            extra = {"trainer": dataclasses.asdict(self.progress), "metrics": self._meter.state()}
            checkpoint = self._checkpoints.save(self.progress.step, self.position, extra, tag=tag)
        self._ranks.saved()
        self._saved, self._saved_at = dataclasses.replace(self.progress), time.monotonic()
        self.save_seconds = self._saved_at - start
        self._call("on_checkpoint", checkpoint)

    def _finish(self, valid: Iterable[Batch] | None, *, interrupted: bool) -> int:
        """Returns the step whose state the model and its tables hold now."""
        progress = self.progress
        if valid is not None and progress.validated != progress.step and not interrupted:
            self.validate(valid)
        if self._saved != progress:
            self.save()
        if interrupted:
            self.ending = f"interrupted and saved at step {progress.step}: --resume (resume=True) goes on from there"
            return progress.step
        examples = int(self._ranks.total(progress.examples)[0])
        self.ending = f"finished after {plural(progress.step, 'step')}, {plural(examples, 'example')}"
        if self.config.patience is None or progress.best_auc is None or self._checkpoints is None:
            return progress.step
        self.ending += f"; best AUC {progress.best_auc:.4f} at step {progress.best_step}, restored"
        if progress.best_step != progress.step:
            self._checkpoints.restore("best")
        return progress.best_step

    def _call(self, what: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(self, *args)


def _batches_of(train: Any) -> int | None:
    """Batches per epoch, counted or estimated by the loader; none: it cannot say."""
    with contextlib.suppress(TypeError):  # endless data has no length
        return len(train)
    estimate = getattr(train, "estimated_batches", None)
    return None if estimate is None else estimate()


def tables_of(model: torch.nn.Module) -> list[Table]:
    """The tables a model's bags read, in the order of its modules."""
    found = (getattr(module, "table", None) for module in model.modules())
    tables = list(dict.fromkeys(table for table in found if isinstance(table, Table)))
    names = [table.name for table in tables]
    if not tables or len(set(names)) != len(names):
        raise ValueError(f"the model's tables are {names}: it needs EmbeddingBags, and each table a name of its own")
    return tables
