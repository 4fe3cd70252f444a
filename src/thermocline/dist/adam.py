"""`FrozenAdam`: torch's Adam, whose denominators can be frozen: the optimizer of k-step merging.

While nothing is frozen it is torch's Adam, bit for bit (it calls it). A frozen parameter has a merged second moment in
its state, `v_hat`, and the step it was merged at, `v_hat_step` = s. From then on it moves by

    x -= lr * m / (1 - beta1^t)  /  (sqrt(v_hat / (1 - beta2^s)) + eps)

where t goes on and s stays: the bias correction of v_hat belongs to the steps that made it. m and v go on as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class FrozenAdam(torch.optim.Adam):
    """As torch.optim.Adam, with `freeze`. Its state is Adam's, and v_hat and v_hat_step once frozen."""

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, decoupled_weight_decay: bool = False, maximize: bool = False,
        foreach: bool | None = None, fused: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay,
            decoupled_weight_decay=decoupled_weight_decay, maximize=maximize, foreach=foreach, fused=fused,
        )  # fmt: skip
        self._denominators: dict[torch.Tensor, torch.Tensor] = {}
        """sqrt(v_hat / correction) + eps, of frozen parameters that have stepped since; made when needed."""

    @torch.no_grad()
    def freeze(self, parameter: torch.Tensor, moment: torch.Tensor, *, never_fall: bool = False) -> None:
        """`moment` takes the place of the parameter's v in denominators; `never_fall`: no element becomes less."""
        state = self.state[parameter]
        if "exp_avg_sq" not in state:
            raise ValueError("a parameter can be frozen once it has stepped: it has no second moment yet")
        if "v_hat" not in state:
            state["v_hat"] = torch.zeros_like(state["exp_avg_sq"])
        if never_fall:
            torch.maximum(state["v_hat"], moment.to(state["v_hat"].dtype), out=state["v_hat"])
        else:
            state["v_hat"].copy_(moment)
        state["v_hat_step"] = float(state["step"])
        self._denominators.pop(parameter, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._denominators.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As of torch.optim.Adam."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Parameters, gradients, m, v, amsgrad's maxima (unused), steps.
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
        sizes = [-lr / (1 - beta1 ** float(step)) for step in steps]
        torch._foreach_addcdiv_(params, m, [self._denominator(p, beta2, group["eps"]) for p in params], sizes)

    def _denominator(self, parameter: torch.Tensor, beta2: float, eps: float) -> torch.Tensor:
        known = self._denominators.get(parameter)
        if known is None:
            state = self.state[parameter]
            known = (state["v_hat"].sqrt() / (1 - beta2 ** state["v_hat_step"]) ** 0.5).add_(eps)
            self._denominators[parameter] = known
        return known


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
    return [value for value, is_so in zip(values, flags, strict=True) if is_so is flag]
