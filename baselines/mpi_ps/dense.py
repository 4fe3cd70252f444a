"""Sum of the dense gradients of all ranks, by MPI, concurrent with the exchange of row gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI


class DenseSum:
    """Sums one flat buffer (all gradients, then the loss); started before the push, completed after it."""

    def __init__(self, comm: MPI.Comm, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._comm = comm
        self._parameters = list(dict.fromkeys(parameters))
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters) + 1)
        pieces = torch.split(self._flat[:-1], [p.numel() for p in self._parameters])
        self._views = [piece.view_as(p) for piece, p in zip(pieces, self._parameters, strict=True)]
        self._loss = 0.0
        self._request: MPI.Request | None = None

    def begin(self, loss: float, weight: float) -> None:
        """Start the sum; `weight` scales this rank's gradients and loss, and is 0 for a rank without examples."""
        self._loss = loss
        if self._comm.size == 1:
            return  # the gradients are already in place
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
        """Wait for the sum, set every gradient to the mean over all ranks, and return the mean loss."""
        if self._request is not None:
            self._request.Wait()
            self._request = None
            self._flat *= 1 / self._comm.size
            for view, parameter in zip(self._views, self._parameters, strict=True):
                parameter.grad = view
            self._loss = float(self._flat[-1])
        return self._loss
