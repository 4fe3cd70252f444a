"""Training steps as CUDA graphs: `train.graphs`. A step is two replays, which take the host microseconds.

    forward    rows are pooled, model, loss; logits and loss are copied to the host, which checks the loss
    update     backward pass, sums of the gradients of each key, update of rows and dense parameters

The two are recorded once per shape of batch. Batch, plan and constants of the step are copied to fixed addresses before
each replay. Everything that changes from step to step is in device memory: batch, plan, learning rates, numbers of
steps. The same kernels run in the same order as without graphs, so the bits are the same.

A batch of a shape that was not seen before runs without a graph; so does every batch if the model cannot be recorded:
it reads the batch or a result on the host. The reason is in `GraphStep.reason`, and in a warning.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from thermocline.batch import Batch
from thermocline.config.train import TrainConfig
from thermocline.embedding.table import Table
from thermocline.errors import ConfigError, LabelError, NotRecordable, ThermoclineError
from thermocline.training.dense_step import DenseStep, Forward, Loss
from thermocline.training.metrics import check_labels
from thermocline.training.optimizer_step import OptimizerStep
from thermocline.training.state import Progress
from thermocline.utils.recording import Recording, current_stream

_MAX_STEPS = 2
"""Shapes of batches that are recorded: each has buffers of its own."""
_MAX_SHAPES = 256


class GraphResult(NamedTuple):
    """Results of one step in host memory, valid until the next."""

    logits: torch.Tensor
    label: torch.Tensor
    loss: float


class FixedBatch:
    """Stands for all batches of one shape while a step is recorded. Its tensors have fixed addresses.

    What a batch has on the host differs from batch to batch: a model that reads it cannot be recorded.
    """

    learned_weights = None

    def __init__(self, like: Batch, label: torch.Tensor, dense: torch.Tensor | None) -> None:
        self.examples, self.fields, self.names = like.examples, like.fields, like.names
        self.label, self.dense = label, dense
        self.prepared: dict[Any, Any] = {}

    def __len__(self) -> int:
        return self.examples

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(f"the model reads batch.{name} on the host, which differs from batch to batch")


class _Input:
    """A tensor at a fixed address on the device, and page-locked memory to fill it from."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> None:
        self.tensor = torch.empty(like.shape, dtype=dtype or like.dtype, device=device)
        self._locked = torch.empty(like.shape, dtype=self.tensor.dtype, pin_memory=device.type == "cuda")

    def load(self, value: Any) -> torch.Tensor:
        """Fill the tensor on the current stream; return `value` in host memory, valid until the next call.

        The copy of the call before must have ended.
        """
        given = torch.as_tensor(value)
        if not given.is_cuda and not given.is_pinned():
            given = self._locked.copy_(given)
        self.tensor.copy_(given, non_blocking=True)
        return given.cpu() if given.is_cuda else given


class GraphStep:
    """The recorded steps of one trainer."""

    def __init__(
        self,
        model: torch.nn.Module,
        tables: Sequence[Table],
        optimizers: Sequence[torch.optim.Optimizer],
        dense_step: DenseStep,
        optimizer_step: OptimizerStep,
        loss: Loss,
        config: TrainConfig,
    ) -> None:
        self._model, self._tables, self._optimizers = model, tables, optimizers
        self._dense_step, self._optimizer_step, self._loss = dense_step, optimizer_step, loss
        self._config = config
        self.reason = ""
        """Why all steps run without a graph; empty: those that can are recorded."""
        self.replays = 0
        """Steps that ran as recorded."""
        self._enabled = False
        self._steps: dict[Any, _RecordedStep] = {}
        self._seen: Counter[Any] = Counter()
        self._state: tuple[Any, ...] = ()
        self._modules: list[torch.nn.Module] = []

    def start(self, ranks: int) -> None:
        """Forget all recordings: a run begins, or parameters were restored. `ranks`: processes that train."""
        self._steps, self._seen = {}, Counter()
        self._modules = list(self._model.modules())
        mode = self._config.graphs
        self.reason, self._enabled = "", mode != "off" and self._on_device()
        for table in self._tables:
            table.backend.record_planning(mode != "off")
        if mode == "on" and not self._on_device():
            raise ConfigError('train.graphs is "on": CUDA graphs need a model and tables on a GPU; use "auto" or "off"')
        if self._enabled and (reason := self._obstacle(ranks)):
            self._give_up(reason)

    def _on_device(self) -> bool:
        return bool(self._tables) and self._dense_step.device.type == "cuda"

    def _obstacle(self, ranks: int) -> str:
        """Return why no step can be recorded, as far as is known before the first one; empty: nothing known."""
        if ranks > 1:
            return "several ranks train"
        if self._config.accumulate > 1:
            return f"train.accumulate is {self._config.accumulate}"
        if self._config.clip_norm is not None:
            return "train.clip_norm is set, and the host reads the norm"
        for optimizer in self._optimizers if torch.cuda.is_available() else ():
            if not all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
                return (
                    f"the learning rate of {type(optimizer).__name__} is not in GPU memory: use Adam, AdamW, SGD or "
                    "Adagrad of torch.optim without the arguments foreach and fused"
                )
        return next((reason for table in self._tables if (reason := table.backend.cannot_record())), "")

    def _give_up(self, reason: str) -> None:
        self.reason, self._enabled, self._steps = reason, False, {}
        if self._config.graphs == "on":
            raise ThermoclineError(f'train.graphs is "on", but a step cannot be recorded: {reason}. Use "auto"')
        warnings.warn(f"train.graphs: steps run without CUDA graphs, because {reason}", stacklevel=3)

    def train(self, batch: Batch, progress: Progress) -> GraphResult | None:
        """Train on a batch as recorded; None: the caller trains without a graph, and nothing was done.

        Raises `LabelError` if a label is neither 0 nor 1, and `FloatingPointError` if the loss is not finite; the step
        is then not applied.
        """
        if not self._enabled:
            return None
        step = self._find(batch)
        if step is None:
            return None
        undo = None if step.recorded else self._undo_point()
        try:
            step.prepare(progress)
            result = step.run(batch, progress)
        except (FloatingPointError, LabelError):
            raise
        except Exception as error:
            if undo is None:
                raise
            undo()
            line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            self._give_up(line if isinstance(error, NotRecordable) else f"of {type(error).__name__}: {line}")
            return None
        self.replays += step.recorded
        return result

    def _undo_point(self) -> Callable[[], None]:
        """Return a function that undoes a failed step: gradients, buffers, random numbers and steps of tables."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        counts = [table.step_count for table in self._tables]
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None

        def undo() -> None:
            self._optimizer_step.discard_gradients()
            for buffer, before in buffers:
                buffer.copy_(before)
            for table, count in zip(self._tables, counts, strict=True):
                table.step_count = count
            torch.set_rng_state(random[0])
            if random[1] is not None:
                torch.cuda.set_rng_state(random[1])

        return undo

    def _find(self, batch: Batch) -> _RecordedStep | None:
        shape = self._shape(batch)
        if shape is None:
            return None
        state = self._model_state()
        if not _same(state, self._state):  # frozen, unfrozen, or moved since the last step
            self._steps, self._state = {}, state
        step = self._steps.get(shape)
        if step is None and len(self._steps) < _MAX_STEPS and len(self._seen) < _MAX_SHAPES:
            self._seen[shape] += 1
            if self._seen[shape] > 1:
                step = self._steps[shape] = _RecordedStep(self, batch)
        return step

    def _shape(self, batch: Batch) -> Any:
        """Return what all batches of a recorded step have in common; None: the batch cannot be copied."""
        if batch.learned_weights is not None or batch.examples == 0:
            return None
        shape: list[Any] = [batch.examples, batch.fields, batch.names]
        for values in (batch.label, batch.dense):
            if values is not None and not isinstance(values, (np.ndarray, torch.Tensor)):
                return None
            shape.append(None if values is None else (values.shape, values.dtype))
        for table in self._tables:
            plan = batch.prepared.get(table)
            plan_shape = None if plan is None else table.backend.plan_shape(plan)
            if plan_shape is None:
                return None
            shape.append(plan_shape)
        return tuple(shape)

    def _model_state(self) -> tuple[Any, ...]:
        """Return what a recording depends on besides the batch: modes, frozen parts, and where tensors are."""
        state: list[Any] = [bag.requires_grad for table in self._tables for bag in table.bags]
        for module in self._modules:
            state.append(module.training)
            for parameter in module._parameters.values():
                state += (parameter, parameter is None or parameter.requires_grad)
            state += module._buffers.values()
        for optimizer in self._optimizers:
            state += [optimizer.state, optimizer.param_groups]
        return tuple(state)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


class _RecordedStep:
    """The step of all batches of one shape. The first runs as it is, which compiles kernels; then it is recorded."""

    def __init__(self, steps: GraphStep, like: Batch) -> None:
        self._tables, self._loss = steps._tables, steps._loss
        self._dense_step, self._optimizer_step = steps._dense_step, steps._optimizer_step
        self._device = self._dense_step.device
        self._label = _Input(torch.as_tensor(like.label), torch.float32, self._device)
        self._dense = None if like.dense is None else _Input(torch.as_tensor(like.dense), None, self._device)
        fixed = FixedBatch(like, self._label.tensor, None if self._dense is None else self._dense.tensor)
        self._rows = [table.backend.recorded_rows(like.prepared[table]) for table in self._tables]
        fixed.prepared = {table: rows.plan for table, rows in zip(self._tables, self._rows, strict=True)}
        self._batch: Any = fixed
        locked = self._device.type == "cuda"
        self._logits = torch.empty(like.examples, pin_memory=locked)
        self._loss_value = torch.empty((), pin_memory=locked)
        self._result: Forward | None = None
        self._uses = 0
        self._forward_recording: Recording[None] | None = None
        self._update_recording: Recording[None] | None = None

    @property
    def recorded(self) -> bool:
        return self._update_recording is not None

    def prepare(self, progress: Progress) -> None:
        """Set the learning rates; record the step before its second use. What fails to be recorded has not run."""
        self._optimizer_step.set_rates(progress)  # not recorded: a change of the rates is a launch
        self._uses += 1
        if self._uses == 2:
            self._forward_recording = Recording(self._forward, self._device)
            pool = self._forward_recording.pool
            counts = [table.step_count for table in self._tables]
            self._update_recording = Recording(lambda: self._update(progress), self._device, pool=pool)
            for table, count in zip(self._tables, counts, strict=True):
                table.step_count = count
            self._result = None  # steps without a graph must not find its autograd nodes, which have its stream

    def run(self, batch: Batch, progress: Progress) -> GraphResult:
        """Train on a batch of the shape."""
        plans = [batch.prepared[table] for table in self._tables]
        label = self._label.load(batch.label)
        if self._dense is not None:
            self._dense.load(batch.dense)
        for rows, plan in zip(self._rows, plans, strict=True):
            rows.load(plan)
        if self._forward_recording is None:
            self._forward()
        else:
            self._forward_recording.replay()
        try:
            check_labels(label)  # while the GPU computes
        except LabelError:
            self._optimizer_step.discard_gradients()
            raise
        finally:
            if self._device.type == "cuda":
                current_stream(self._device).synchronize()
        loss = float(self._loss_value)
        if not math.isfinite(loss):
            self._optimizer_step.discard_gradients()
            raise FloatingPointError(f"the loss of step {progress.step} is {loss}: the step was not applied")
        steps = [table.step_count + 1 for table in self._tables]
        for rows, table, step in zip(self._rows, self._tables, steps, strict=True):
            table.set_step_time([batch])
            rows.set_constants(step, table.lr, 1.0)
        if self._update_recording is None:
            self._update(progress)
        else:
            self._update_recording.replay()
        for rows, plan, table, step in zip(self._rows, plans, self._tables, steps, strict=True):
            rows.launched(plan)
            table.step_count = step
            table.expire_after_step()
        return GraphResult(self._logits, label, loss)

    def _forward(self) -> None:
        with self._recording():
            self._result = self._dense_step.forward(self._batch, self._loss)
            self._logits.copy_(self._result.logits.detach(), non_blocking=True)
            self._loss_value.copy_(self._result.loss.detach(), non_blocking=True)

    def _update(self, progress: Progress) -> None:
        assert self._result is not None
        with self._recording():
            self._dense_step.backward(self._result.loss)
            self._optimizer_step.apply(progress, 1)
        if self._forward_recording is None:
            self._result = None

    def _recording(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for rows in self._rows:
            stack.enter_context(rows.recording())
        return stack
