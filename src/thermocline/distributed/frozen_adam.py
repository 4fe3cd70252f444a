"""`FrozenAdam`: torch's Adam, whose denominators can be frozen: the optimizer of k-step merging.

While nothing is frozen it is torch's Adam, bit for bit (it calls it). A frozen parameter has in its state a merged
second moment, `v_hat`, the step it was merged at, `v_hat_step` = s, and how many ranks it is the mean of, `v_hat_ranks`
= n. From then on it moves by

    x -= lr * m / (1 - beta1^t)  /  (sqrt(max(v_hat / (1 - beta2^s), v / (1 - beta2^t) / n)) + eps)

where t goes on and s stays: the bias correction of v_hat belongs to the steps that made it. m and v go on as ever.

Why the maximum: second moments are not negative, so whatever the other ranks have, the mean of all is at least v / n. A
v_hat below that is out of date, and there is no bound to how far: a unit that no example of the merged steps woke has
v_hat = 0, and its first gradient would be divided by eps. So a step is at most sqrt(n) times as long as Adam's can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from thermocline.errors import FormatError

Params = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]

FROZEN = ("v_hat", "v_hat_step", "v_hat_ranks")
"""What a frozen parameter's state has beside Adam's."""


class FrozenAdam(torch.optim.Adam):
    """As torch.optim.Adam, with `freeze`. Its state is Adam's, and `FROZEN` once frozen."""

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
        """v_hat / (1 - beta2^s), of frozen parameters that have stepped since; made when needed."""

    @torch.no_grad()
    def freeze(self, parameter: torch.Tensor, moment: torch.Tensor, ranks: int, *, never_fall: bool = False) -> None:
        """`moment`, the mean of so many ranks' v, takes the place of the parameter's v in denominators.

        `never_fall`: no element becomes less than it was.
        """
        state = self.state[parameter]
        if "exp_avg_sq" not in state:
            raise ValueError("a parameter can be frozen once it has stepped: it has no second moment yet")
        if "v_hat" not in state:
            state["v_hat"] = torch.zeros_like(state["exp_avg_sq"])
        if never_fall:
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
        of = [(1 - beta2 ** float(step)) * self.state[p]["v_hat_ranks"] for p, step in zip(params, steps, strict=True)]
        below = list(torch._foreach_div(v, of))
        torch._foreach_maximum_(below, [self._correct(p, beta2) for p in params])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(params, m, below, sizes)

    def _correct(self, parameter: torch.Tensor, beta2: float) -> torch.Tensor:
        known = self._corrected.get(parameter)
        if known is None:
            state = self.state[parameter]
            known = self._corrected[parameter] = state["v_hat"] / (1 - beta2 ** state["v_hat_step"])
        return known


def require_whole(state_dict: dict[str, Any]) -> None:
    """Raises `FormatError` for a state whose frozen parameters lack what `step` needs: of an earlier version."""
    for state in state_dict["state"].values():
        lacking = [name for name in FROZEN if "v_hat" in state and name not in state]
        if lacking:
            raise FormatError(
                f"the checkpoint has k-step Adam's state of an earlier version, without {', '.join(lacking)}: "
                "ranks cannot train on with it. Resume it for some steps with one process, which needs none of that, "
                "and then with ranks; or begin a new run. eval and predict read it as it is"
            )


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
