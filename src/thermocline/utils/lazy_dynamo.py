"""Keeps torch.optim from importing torch._dynamo in a process that compiles nothing: the import takes seconds.

The methods of torch's optimizers import it to exclude themselves from graphs that torch.compile traces. While the
module is not loaded, nothing traces.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

_DECORATED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def defer_dynamo() -> None:
    """Undecorate the methods of torch's optimizers, unless torch._dynamo is already loaded."""
    import torch

    if "torch._dynamo" in sys.modules:
        return
    for name in _DECORATED:
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        vars(method)["__dynamo_disable"] = method  # the decorator imports torch._dynamo if this is missing


def optimizer_step(optimizer: Any) -> None:
    """Call `optimizer.step()`, of a torch optimizer without its decorators if torch._dynamo is not loaded."""
    import torch
    from torch.optim import optimizer as module

    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooks = hooks or module._global_optimizer_pre_hooks or module._global_optimizer_post_hooks
    own = not type(optimizer).__module__.startswith(("torch.optim.", "thermocline."))
    if "torch._dynamo" in sys.modules or hooks or own or optimizer.defaults.get("differentiable"):
        optimizer.step()
        return
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
