"""Optimizers that torch or TorchRec attach to a table's parameter, translated to those of `tc.Table`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any, get_args

import torch

from thermocline.embedding.optimizers import NAMES, SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad

_UNUSED = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments that choose an implementation."""
_NEUTRAL: dict[str, Any] = {
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "maximize": False,
    "lr_decay": 0,
    "amsgrad": False,
    "decoupled_weight_decay": False,
}
"""Arguments that are accepted with these values only."""
_FBGEMM_EPS = 1e-8
"""Value of `eps` for TorchRec's optimizers that are given none."""


class RowParameter(torch.nn.Parameter):
    """Stands for the rows of a table among a model's parameters: float32[0, dim]. The rows are in the table."""

    table: str
    """Name of the table."""


def apply_optimizer_in_backward(
    optimizer_class: type[Any], params: Iterable[torch.nn.Parameter], optimizer_kwargs: dict[str, Any]
) -> None:
    """Update parameters by this optimizer within backward, as in TorchRec.

    Rows of tables are updated once per key at the end of each backward pass: by SGD, Adagrad, RowWiseAdagrad, Adam
    or PartialRowWiseAdam of torch.optim, TorchRec or Thermocline; anything else is refused. Other parameters get the
    optimizer by the function of `torch.distributed.optim`. That function, and TorchRec's, can be used for all
    parameters too.
    """
    for param in params:
        if isinstance(param, RowParameter):
            rate = rows_optimizer(param.table, optimizer_class, optimizer_kwargs).lr
            attached: dict[str, Any] = {"_in_backward_optimizers": _Schedulable(param, rate)}
            attached |= {"_optimizer_classes": optimizer_class, "_optimizer_kwargs": dict(optimizer_kwargs)}
            for name, value in attached.items():
                setattr(param, name, [*getattr(param, name, ()), value])
        else:
            optim: Any = importlib.import_module("torch.distributed.optim")  # takes a second
            optim._apply_optimizer_in_backward(optimizer_class, [param], optimizer_kwargs)


class _Schedulable(torch.optim.Optimizer):
    """Holds the learning rate of a table, for the schedulers of torch. `step` does nothing: backward updates rows."""

    def __init__(self, param: RowParameter, lr: float) -> None:
        super().__init__([param], {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """Nothing."""


def attached_optimizer(param: RowParameter) -> Optimizer | None:
    """Return the optimizer of a table whose parameter got one in backward; None: it got none."""
    classes = getattr(param, "_optimizer_classes", [])
    if len(classes) > 1:
        raise ValueError(
            f"table {param.table!r} has {len(classes)} optimizers in backward: call apply_optimizer_in_backward once"
        )
    return rows_optimizer(param.table, classes[0], param._optimizer_kwargs[0]) if classes else None  # type: ignore[attr-defined]


def learning_rate(param: RowParameter) -> float | None:
    """Return the learning rate of now, which a scheduler may have changed; None: the table's own."""
    for optimizer in getattr(param, "_in_backward_optimizers", []):
        if groups := getattr(optimizer, "param_groups", None):
            return float(groups[0]["lr"])
    return None


def note_step(param: RowParameter) -> None:
    """Tell schedulers that the optimizer has made a step: torch warns if a scheduler's step comes first."""
    for optimizer in getattr(param, "_in_backward_optimizers", []):
        if getattr(optimizer, "param_groups", None):
            optimizer.step()  # of a parameter without elements and without a gradient


def rows_optimizer(table: str, optimizer_class: type[Any], kwargs: dict[str, Any]) -> Optimizer:
    """Return the optimizer of rows that is equal to one of torch or TorchRec. Raises ValueError if there is none."""
    if optimizer_class in get_args(Optimizer):
        made: Optimizer = optimizer_class(**kwargs)
        return made
    kind = optimizer_class.__name__
    translate = _TRANSLATIONS.get(kind)
    if translate is None:
        raise ValueError(f"table {table!r}: its optimizer is {kind}: rows have {NAMES}")
    signature = inspect.signature(optimizer_class.__init__).parameters
    given = {name: p.default for name, p in signature.items() if p.default is not p.empty} | kwargs
    for name, neutral in _NEUTRAL.items():
        if given.get(name, neutral) != neutral:
            raise ValueError(f"table {table!r}: {kind} has {name} {given[name]!r}: rows support {neutral!r} only")
    if "lr" not in given:
        raise ValueError(f"table {table!r}: {kind} has no lr: give it in optimizer_kwargs")
    unknown = kwargs.keys() - _UNUSED - _NEUTRAL.keys() - _ARGUMENTS
    if unknown:
        raise ValueError(f"table {table!r}: {kind} has arguments {sorted(unknown)}, which rows do not support")
    if kind == "PartialRowWiseAdam" and given.get("weight_decay"):
        raise ValueError(
            f"table {table!r}: {kind} has weight_decay {given['weight_decay']!r}, which TorchRec decouples from the "
            "gradient: rows support 0 only; tc.PartialRowWiseAdam(weight_decay=...) is L2"
        )
    common: dict[str, Any] = {"lr": float(given["lr"]), "weight_decay": float(given.get("weight_decay") or 0.0)}
    return translate(given, common)


_ARGUMENTS = {"lr", "weight_decay", "eps", "initial_accumulator_value", "betas", "beta1", "beta2"}


def _sgd(given: dict[str, Any], common: dict[str, Any]) -> Optimizer:
    return SGD(**common)


def _adagrad(given: dict[str, Any], common: dict[str, Any]) -> Optimizer:
    return Adagrad(
        eps=given.get("eps", _FBGEMM_EPS), initial_accumulator=given.get("initial_accumulator_value", 0.0), **common
    )


def _rowwise_adagrad(given: dict[str, Any], common: dict[str, Any]) -> Optimizer:
    return RowWiseAdagrad(
        eps=given.get("eps", _FBGEMM_EPS), initial_accumulator=given.get("initial_accumulator_value", 0.0), **common
    )


def _adam(given: dict[str, Any], common: dict[str, Any]) -> Optimizer:
    return Adam(**_moments(given), **common)


def _partial_rowwise_adam(given: dict[str, Any], common: dict[str, Any]) -> Optimizer:
    return PartialRowWiseAdam(**_moments(given), **common)


def _moments(given: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = given.get("betas", (0.9, 0.999))
    beta1, beta2 = given.get("beta1", beta1), given.get("beta2", beta2)  # FBGEMM's names
    return {"beta1": beta1, "beta2": beta2, "eps": given.get("eps", _FBGEMM_EPS)}


_TRANSLATIONS = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "RowWiseAdagrad": _rowwise_adagrad,
    "Adam": _adam,
    "PartialRowWiseAdam": _partial_rowwise_adam,
}
"""By the name of the class."""
