"""`FrozenAdam`: torch's Adam with denominators that can be frozen, for k-step merging (`PeriodicAveraging`).

Without frozen parameters it calls torch's Adam and has its bits. The state of a frozen parameter also has a merged
second moment `v_hat`, the step of the merge `v_hat_step` = s, and the number of merged ranks `v_hat_ranks` = n. Its
update is

    x -= lr * m / (1 - beta1^t)  /  (sqrt(max(v_hat / (1 - beta2^s), v / (1 - beta2^t) / n)) + eps)

where t advances and s does not: the bias correction of v_hat is that of the steps it was computed from. m and v are
updated as in Adam.

Reason for the maximum: second moments are not negative, so the mean over all ranks is at least v / n. A v_hat below
that is out of date, without any bound: a unit that was inactive in all merged steps has v_hat = 0, and its first
gradient would be divided by eps. With the maximum a step is at most sqrt(n) times as long as Adam's.

Called on the training thread. It never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from thermocline.errors import FormatError

Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]

FROZEN_STATE = ("v_hat", "v_hat_step", "v_hat_ranks")
"""State names of a frozen parameter beside Adam's. They are stored in checkpoints."""


class FrozenAdam(torch.optim.Adam):
    """torch.optim.Adam with `freeze`. The state of a frozen parameter has `FROZEN_STATE` beside Adam's."""

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, decoupled_weight_decay: bool = False, maximize: bool = False,
        foreach: bool | None = None, fused: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay,
            decoupled_weight_decay=decoupled_weight_decay, maximize=maximize, foreach=foreach, fused=fused,
        )  # fmt: skip
        self._corrected: dict[torch.Tensor, torch.Tensor] = {}
        """v_hat / (1 - beta2^s) by frozen parameter, computed on first use."""

    @torch.no_grad()
    def freeze(self, parameter: torch.Tensor, moment: torch.Tensor, ranks: int, *, monotonic: bool = False) -> None:
        """Use `moment`, the mean of v over `ranks` ranks, in the parameter's denominator from now on.

        monotonic   no element of the frozen moment decreases
        """
        state = self.state[parameter]
        if "exp_avg_sq" not in state:
            raise ValueError("the parameter has no second moment yet: call step() before freeze()")
        if "v_hat" not in state:
            state["v_hat"] = torch.zeros_like(state["exp_avg_sq"])
        if monotonic:
            torch.maximum(state["v_hat"], moment.to(state["v_hat"].dtype), out=state["v_hat"])
        else:
            state["v_hat"].copy_(moment)
        state["v_hat_step"], state["v_hat_ranks"] = float(state["step"]), float(ranks)
        self._corrected.pop(parameter, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._corrected.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, with torch.optim.Adam's arguments and result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Parameters, gradients, m, v, maxima of amsgrad (unused), steps.
            columns: tuple[list[torch.Tensor], ...] = ([], [], [], [], [], [])
            self._init_group(group, *columns)  # type: ignore[no-untyped-call]
            params, grads, m, v, _, steps = columns
            frozen = ["v_hat" in self.state[p] for p in params]
            if not all(frozen):
                _torch_adam(group, *(_where(column, frozen, False) for column in (params, grads, m, v, steps)))
            if any(frozen):
                self._frozen_step(group, *(_where(column, frozen, True) for column in (params, grads, m, v, steps)))
        return loss

    def _frozen_step(
        self, group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor], m: list[torch.Tensor],
        v: list[torch.Tensor], steps: list[torch.Tensor],
    ) -> None:  # fmt: skip
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        torch._foreach_add_(steps, 1)
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if decay and group["decoupled_weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        step_sizes = [-lr / (1 - beta1 ** float(step)) for step in steps]
        ranks = [self.state[p]["v_hat_ranks"] for p in params]
        divisors = [(1 - beta2 ** float(step)) * count for step, count in zip(steps, ranks, strict=True)]
        denominators = list(torch._foreach_div(v, divisors))
        torch._foreach_maximum_(denominators, [self._bias_corrected(p, beta2) for p in params])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, m, denominators, step_sizes)

    def _bias_corrected(self, parameter: torch.Tensor, beta2: float) -> torch.Tensor:
        corrected = self._corrected.get(parameter)
        if corrected is None:
            state = self.state[parameter]
            corrected = self._corrected[parameter] = state["v_hat"] / (1 - beta2 ** state["v_hat_step"])
        return corrected


def check_frozen_state(state_dict: dict[str, Any]) -> None:
    """Raise `FormatError` if frozen parameters of a saved state lack entries that `step` needs."""
    for state in state_dict["state"].values():
        missing = [name for name in FROZEN_STATE if "v_hat" in state and name not in state]
        if missing:
            raise FormatError(
                f"the checkpoint's k-step Adam state is of an earlier version and lacks {', '.join(missing)}: several "
                "ranks cannot resume from it. Resume with one process for some steps, then with several ranks, or "
                "start a new run. eval and predict can read it"
            )


def without_frozen_state(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return a saved optimizer, {"kind": ..., "state": state_dict}, without the frozen denominators.

    A single rank never merges, so nothing would renew them.
    """
    states = optimizer["state"]["state"]
    kept = {n: {name: v for name, v in state.items() if name not in FROZEN_STATE} for n, state in states.items()}
    return {**optimizer, "state": {**optimizer["state"], "state": kept}}


def _torch_adam(
    group: dict[str, Any], params: list[torch.Tensor], grads: list[torch.Tensor], m: list[torch.Tensor],
    v: list[torch.Tensor], steps: list[torch.Tensor],
) -> None:  # fmt: skip
    beta1, beta2 = group["betas"]
    adam(
        params, grads, m, v, [], steps,
        amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"], weight_decay=group["weight_decay"],
        decoupled_weight_decay=group["decoupled_weight_decay"], maximize=group["maximize"], foreach=group["foreach"],
        fused=group["fused"],
    )  # fmt: skip


def _where(values: list[torch.Tensor], flags: list[bool], flag: bool) -> list[torch.Tensor]:
    return [value for value, value_flag in zip(values, flags, strict=True) if value_flag is flag]
