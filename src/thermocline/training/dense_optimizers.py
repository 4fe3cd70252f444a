"""Fused implementations of torch's dense optimizers on a GPU: one kernel updates all parameters of a group.

`use_fused` changes Adam, AdamW, SGD and Adagrad in place, unless their `foreach` or `fused` was set: `fused=True`, Adam
also `capturable=True`, and learning rates in GPU memory. So the same kernels run with and without CUDA graphs, with the
same bits, and a schedule changes the rate of a captured graph. On a CPU nothing changes.

A saved state does not depend on the implementation: `state_dict` has rates as numbers and the flags that the optimizer
was made with, and `load_state_dict` accepts the state of any implementation and device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from thermocline.utils.lazy_dynamo import optimizer_step

_GPU = "cuda"
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Not their subclasses, whose `step` may read rates and step numbers on the host."""
_FLAGS = ("foreach", "fused", "capturable")


def use_fused(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let optimizers of parameters on a GPU use torch's fused kernels; again after such a call, do nothing."""
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "_thermocline_fused", None), _Fused) and _can_fuse(optimizer):
            optimizer._thermocline_fused = _Fused(optimizer)  # type: ignore[attr-defined]


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group: in place, if it is in GPU memory."""
    if isinstance(group["lr"], torch.Tensor):
        if group.get("rate") != rate:
            group["lr"].fill_(rate)
            group["rate"] = rate
    else:
        group["lr"] = rate


def _can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) not in _FUSED:
        return False
    for group in optimizer.param_groups:
        if group.get("foreach") is not None or group.get("fused") is not None or group.get("differentiable"):
            return False
        if any(p.device.type != _GPU or not p.is_floating_point() for p in group["params"]):
            return False
        if group.get("lr_decay"):
            return False
    kind: Any = type(optimizer)
    return _fused_on_gpu(kind)


@functools.cache
def _fused_on_gpu(kind: Any) -> bool:
    """Whether this version of torch has a fused kernel of the optimizer for GPUs, with the rate in GPU memory."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=_GPU))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer_step(kind([parameter], lr=torch.zeros((), device=_GPU), fused=True))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


class _Fused:
    """The fused implementation of one optimizer, and its conversion from and to saved states."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._own = [{name: group[name] for name in _FLAGS if name in group} for group in optimizer.param_groups]
        """Flags that the optimizer was made with."""
        # Captured graphs have the addresses of these tensors: they are never replaced.
        devices = [group["params"][0].device for group in optimizer.param_groups]
        self._rates = [torch.zeros((), device=device) for device in devices]
        # It runs both captured and not, and `_can_fuse` has checked the parameters.
        vars(optimizer).update(_warned_capturable_if_run_uncaptured=True, _need_device_dtype_check_for_fused=False)
        self._enable(optimizer)
        optimizer.register_state_dict_post_hook(self._portable)
        optimizer.register_load_state_dict_post_hook(self._enable)

    def _enable(self, optimizer: torch.optim.Optimizer) -> None:
        for group, tensor in zip(optimizer.param_groups, self._rates, strict=True):
            rate = float(group["lr"])
            group.setdefault("initial_lr", rate)
            tensor.fill_(rate)
            group["lr"], group["rate"], group["fused"] = tensor, rate, True
            if "capturable" in group:
                group["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)

    def _portable(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = []
        for group, flags in zip(saved["param_groups"], self._own, strict=True):
            rate = group["rate"] if isinstance(group["lr"], torch.Tensor) else group["lr"]
            groups.append({**{k: v for k, v in group.items() if k != "rate"}, "lr": rate, **flags})
        states = {
            number: {k: v.cpu() if k == "step" else v for k, v in state.items()}
            for number, state in saved["state"].items()
        }
        return {"state": states, "param_groups": groups}
