"""Dense gradients of all ranks, added up by MPI while the sparse ones travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI


class DenseSum:
    """One flat buffer: all gradients, then the loss. Its sum is begun before the push and waited for after it."""

    def __init__(self, comm: MPI.Comm, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._comm = comm
        self._parameters = list(dict.fromkeys(parameters))
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters) + 1)
        pieces = torch.split(self._flat[:-1], [p.numel() for p in self._parameters])
        self._views = [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]
        self._loss = 0.0
        self._request: MPI.Request | None = None

    def begin(self, loss: float, weight: float) -> None:
        """Of this rank's examples; weight 0: it had none."""
        self._loss = loss
        if self._comm.size == 1:
            return  # the gradients are where they should be
        if weight == 0:
            self._flat.zero_()
        else:
            for view, parameter in zip(self._views, self._parameters, strict=True):
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            self._flat[-1] = loss
            if weight != 1:
                self._flat *= weight
        self._request = self._comm.Iallreduce(MPI.IN_PLACE, self._flat.numpy())

    def finish(self) -> float:
        """Every parameter's gradient is now the mean over all ranks; returns that of the loss."""
        if self._request is not None:
            self._request.Wait()
            self._request = None
            self._flat *= 1 / self._comm.size
            for view, parameter in zip(self._views, self._parameters, strict=True):
                parameter.grad = view
            self._loss = float(self._flat[-1])
        return self._loss
