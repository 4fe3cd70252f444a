"""Models merged every k steps: between merges every rank steps by itself, and nothing is sent.

What a merge averages, the three readings of k-step Adam (`DenseSync.merge`):

- v_frozen: x and v. All ranks divide by the merged v until the next merge; each one's own m and v go on. The first
  merges follow steps 1, 2, 4, 8 and so on below k: there is a merged v from step 2 on, and while it is of few gradients
  it is never older than half of them.
- all: x and everything the optimizer remembers of a parameter (m and v of Adam).
- params: x. Every rank divides by a v of its own: ranks weigh the same gradient differently, and the mean of their
  models need not go down where each of them does.

x, m and v may have periods of their own. A merge packs what is due into one buffer and averages that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.frozen_adam import FrozenAdam
from thermocline.distributed.hierarchical_allreduce import Flat

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
X, M, V = 0, 1, 2


class _Piece(NamedTuple):
    """A tensor of a merge: which of x, m and v it is, whose, and what is averaged."""

    kind: int
    parameter: torch.Tensor
    tensor: torch.Tensor


class MergedModels(DenseParameters):
    """Averages models every k steps. `DenseParameters.make` makes it."""

    def __init__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], groups: Groups, settings: DenseSync,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        super().__init__(parameters, buffers, groups, settings)
        self._periods = settings.periods()
        self._optimizer = {
            parameter: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        strangers = sum(parameter not in self._optimizer for parameter in parameters)
        if strangers:
            raise ValueError(f"{strangers} of {len(parameters)} parameters are in none of the optimizers: freeze them")
        if settings.mode == "v_frozen":
            for kind in {type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, FrozenAdam)}:
                raise ValueError(
                    f'dense_sync.merge "v_frozen" needs thermocline.FrozenAdam, not {kind}; "all" and '
                    f'"params" take any optimizer'
                )
        self._step = 0
        self._merged = [0, 0, 0]
        """The step of the last merge of x, m and v."""
        self._flat: dict[tuple[bool, ...], Flat] = {}
        """By what is due: with separate periods there are up to seven kinds of merges."""

    @property
    def own_state(self) -> bool:
        return self.settings.mode != "all"

    def after_backward(self) -> None:
        """Every parameter steps on every rank, so that moments of all ranks are of as many steps."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def after_step(self, step: int) -> bool:
        self._step = step
        return self._merge([period is not None and self._is_due(step, period) for period in self._periods])

    def _is_due(self, step: int, period: int) -> bool:
        early = self.settings.mode == "v_frozen" and step < period
        return step & (step - 1) == 0 if early else step % period == 0

    def merge_now(self) -> bool:
        return self._merge([period is not None for period in self._periods])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "merged": list(self._merged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._merged = state["step"], list(state["merged"])

    @torch.no_grad()
    def _merge(self, wanted: list[bool]) -> bool:
        """Of what is wanted and has changed since it was merged: the mean of equal numbers need not be that number."""
        due = tuple(want and at < self._step for want, at in zip(wanted, self._merged, strict=True))
        if not any(due):
            return False
        pieces = list(self._pieces(due))
        if not pieces:
            return False  # a model of tables alone
        flat = self._flat.get(due)
        if flat is None:
            flat = self._flat[due] = Flat([piece.tensor for piece in pieces], self._mean)
        flat.fill([piece.tensor for piece in pieces])
        self._mean(flat.buffer)
        frozen = self.settings.mode == "v_frozen"
        for piece, view in zip(pieces, flat.views, strict=True):
            if frozen and piece.kind == V:
                optimizer = self._optimizer[piece.parameter]
                assert isinstance(optimizer, FrozenAdam)
                optimizer.freeze(piece.parameter, view, self._mean.world, never_fall=self.settings.amsgrad)
            else:
                piece.tensor.copy_(view)
        self._merged = [self._step if is_due else at for is_due, at in zip(due, self._merged, strict=True)]
        return True

    def _pieces(self, due: Sequence[bool]) -> Iterator[_Piece]:
        """In an order that all ranks share: x of all parameters, buffers, then moments by name."""
        if due[X]:
            yield from (_Piece(X, tensor, tensor) for tensor in (*self.parameters, *self.buffers))
        if not (due[M] or due[V]):
            return
        for parameter in self.parameters:
            state = self._optimizer[parameter].state[parameter]
            for name, tensor in sorted(state.items()):
                if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape or name in ("step", "v_hat"):
                    continue
                kind = M if name in _FIRST_MOMENTS else V
                if due[kind]:
                    yield _Piece(kind, parameter, tensor)
