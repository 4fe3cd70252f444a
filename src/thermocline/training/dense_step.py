"""The dense part of a training step: forward and backward pass in `train.dense_precision`, with `train.compile`.

fp32   matrix products in fp32, whatever torch's own setting is
tf32   matrix products of fp32 tensors in TF32 on a GPU: 10 bits of mantissa, sums in fp32
bf16   torch's autocast: matrix products in bf16; parameters, gradients, optimizer state and embedding rows stay fp32

Logits enter the loss as fp32. Evaluation does not use this module: it computes in fp32, as `thermocline eval` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thermocline.batch import Batch
from thermocline.config.train import DensePrecision, TrainConfig
from thermocline.embedding.graph_op import outside_graphs
from thermocline.embedding.table import Table
from thermocline.errors import ThermoclineError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIZES = 8
"""Batch sizes that a compiled model accepts; torch's limit of compilations of one function is the same number."""


class Forward(NamedTuple):
    """Result of a forward pass."""

    logits: torch.Tensor
    """float32[examples]."""
    label: torch.Tensor
    """float32[examples], on the device of the logits."""
    loss: torch.Tensor


class DenseStep:
    """Forward and backward pass of one model. The update is in optimizer_step.py."""

    def __init__(self, model: torch.nn.Module, tables: Sequence[Table], config: TrainConfig) -> None:
        self._model, self._tables = model, tables
        self._precision, self._compile = config.dense_precision, config.compile
        self._run: Callable[[Batch], torch.Tensor] = model
        self._sizes: set[int] = set()
        """Batch sizes for which the model was compiled."""
        if self._compile:
            # Deterministic: no choice between kernels by their measured time, which would change bits between runs.
            # Not dynamic: the code depends on the batch size only, not on the sizes that preceded it.
            self._run = torch.compile(model, dynamic=False, options={"deterministic": True})

    @property
    def device(self) -> torch.device:
        """Device of the dense parameters; without any, of the rows."""
        return dense_device(self._model, self._tables)

    def forward(self, batch: Batch, loss: Loss) -> Forward:
        """Compute logits and loss. Raises if the model returns another number of logits than labels."""
        if self._compile:
            self._check_size(batch.examples)
        device = self.device
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self._precision == "bf16")
        with self._arithmetic(device), autocast, self._one_line_errors():
            logits = self._run(batch).float()
        label = torch.as_tensor(batch.label, dtype=torch.float32, device=logits.device)
        if logits.shape != label.shape:
            raise ValueError(f"the model returned logits of shape {list(logits.shape)} for {list(label.shape)} labels")
        return Forward(logits, label, loss(logits, label))

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of dense parameters and rows."""
        with self._arithmetic(self.device), self._one_line_errors():
            loss.backward()  # type: ignore[no-untyped-call]

    def _check_size(self, examples: int) -> None:
        self._sizes.add(examples)
        if len(self._sizes) > SIZES:
            raise ThermoclineError(
                f"train.compile = true compiles the model once per batch size, at most {SIZES} times: {examples} "
                "examples are one size more. Use batches of equal size, or set train.compile = false"
            )

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Raise errors of torch.compile as `ThermoclineError`."""
        if not self._compile:
            yield
            return
        from torch._dynamo import config, exc  # takes more than a second: only where it is used

        try:
            # By default torch runs a model beyond the limit uncompiled, with a warning. Bags are not compiled.
            with config.patch(fail_on_recompile_limit_hit=True), outside_graphs():
                yield
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise ThermoclineError(
                f"train.compile = true: torch.compile cannot compile {type(self._model).__name__}: {reason}. Set "
                "train.compile = false"
            ) from error

    @contextlib.contextmanager
    def _arithmetic(self, device: torch.device) -> Iterator[None]:
        """Set the precision of fp32 matrix products on a GPU, which is global in torch, and restore it."""
        wanted = "tf32" if self._precision == "tf32" else "ieee"
        current = torch.backends.cuda.matmul.fp32_precision
        if device.type != "cuda" or wanted == current or {wanted, current} == {"ieee", "none"}:
            yield
            return
        # The newer attribute cannot be set alone: torch then raises in the older functions, which inductor calls.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if wanted == "tf32" else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def dense_device(model: torch.nn.Module, tables: Sequence[Table]) -> torch.device:
    """Return the device of the dense parameters; without any, of the rows."""
    parameter = next(model.parameters(), None)
    if parameter is not None:
        return parameter.device
    hbm: Any = tables[0].hbm
    return torch.device("cpu") if hbm is None else hbm.device


def precision_text(precision: DensePrecision, compiled: bool, device: torch.device) -> str:
    """Describe precision and compilation of the dense part, for the log; empty: as torch computes by default."""
    effective: str = precision
    if precision == "tf32" and not has_tf32(device):
        effective = "fp32 (tf32 needs a GPU of compute capability 8.0 or more)"
    text = "" if precision == "fp32" else f"dense part in {effective}"
    return ", ".join(part for part in (text, "compiled" if compiled else "") if part)


def has_tf32(device: torch.device) -> bool:
    """Whether the device multiplies matrices in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
