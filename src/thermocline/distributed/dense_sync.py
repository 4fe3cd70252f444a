"""Dense parameters of several ranks: what a training loop calls, and the mean of gradients every step.

    sync = DenseParameters.make(model.parameters(), optimizers, groups, buffers=model.buffers())
    sync.begin()                                    # rank 0's parameters to all
    loss.backward(); table.step()                   # tables first: autograd may share memory between gradients
    sync.after_backward(); optimizer.step()
    sync.after_step(step)                           # step: how many have been taken, this one included
    sync.merge_now()                                # before evaluation, before a checkpoint, at the end

All ranks make the same calls in the same order. The loss of a rank is the mean over its own batch.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.communicator import Groups
from thermocline.distributed.frozen_adam import FROZEN
from thermocline.distributed.hierarchical_allreduce import Flat, Mean, Sent, tree_sum
from thermocline.utils.text_format import parse_size


class DenseParameters(abc.ABC):
    """Keeps the dense parameters of all ranks together, in one of the ways of `DenseSync`."""

    @staticmethod
    def make(
        parameters: Iterable[torch.Tensor], optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        groups: Groups, settings: DenseSync | None = None, *, buffers: Iterable[torch.Tensor] = (),
    ) -> DenseParameters:  # fmt: skip
        """`buffers`: of the model; those of floating point (running means) are averaged whenever models are merged."""
        from thermocline.distributed.periodic_averaging import MergedModels  # it builds on this module

        settings = settings or DenseSync()
        parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        buffers = [buffer for buffer in dict.fromkeys(buffers) if buffer.is_floating_point()]
        if settings.mode == "gradients":
            return AveragedGradients(parameters, buffers, groups, settings)
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        return MergedModels(parameters, buffers, groups, settings, optimizers)

    def __init__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], groups: Groups, settings: DenseSync
    ) -> None:
        self.settings, self.parameters, self.buffers = settings, parameters, buffers
        self._mean = Mean(groups, exact=settings.exact)

    @property
    def sent(self) -> Sent:
        """Bytes of dense parameters this rank has sent so far, within its node and between nodes."""
        return self._mean.sent

    @property
    def own_state(self) -> bool:
        """Whether the optimizers' state is each rank's own even after a merge: then a checkpoint holds every rank's."""
        return False

    @torch.no_grad()
    def begin(self) -> None:
        """Every rank takes rank 0's parameters and buffers."""
        tensors = [*self.parameters, *self.buffers]
        if tensors and self._mean.world > 1:
            flat = Flat(tensors, self._mean)
            flat.fill(tensors)
            self._mean.broadcast(flat.buffer)
            flat.give(tensors)

    @abc.abstractmethod
    def after_backward(self) -> None:
        """Once per step, when all gradients of the step are there and none has been used."""

    @abc.abstractmethod
    def after_step(self, step: int) -> bool:
        """Once per step, after the optimizers'; `step` have been taken. Returns whether models were merged."""

    @abc.abstractmethod
    def merge_now(self) -> bool:
        """All ranks have one model afterwards. Returns whether anything had to be done."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model and the optimizers' states to go on with the same bits."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to what `state_dict` found."""


class AveragedGradients(DenseParameters):
    """Every step: every rank gets the mean of all ranks' gradients, in buckets.

    A parameter that has no gradient on some ranks counts there as absent from the sum; on none, it stays without one.
    """

    def __init__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], groups: Groups, settings: DenseSync
    ) -> None:
        super().__init__(parameters, buffers, groups, settings)
        self._buckets = list(_buckets(parameters, parse_size(settings.bucket, "dense_sync.bucket")))
        self._stepped = False

    @torch.no_grad()
    def after_backward(self) -> None:
        self._stepped = True
        if self._mean.world == 1:
            return
        for bucket in self._buckets:
            flat = Flat(bucket, self._mean, extra=len(bucket))
            here = [parameter.grad is not None for parameter in bucket]
            flat.extra.copy_(torch.tensor(here))
            for parameter, view in zip(bucket, flat.views, strict=True):
                if parameter.grad is None:
                    view.fill_(-0.0)  # x + -0.0 is x for every x, 0.0 and -0.0 too: the rank is skipped
                else:
                    view.copy_(parameter.grad)
            self._mean(flat.buffer)
            for parameter, view, somewhere in zip(bucket, flat.views, flat.extra.tolist(), strict=True):
                if somewhere and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad is not None:
                    parameter.grad.copy_(view)

    def after_step(self, step: int) -> bool:
        return False

    @torch.no_grad()
    def merge_now(self) -> bool:
        """Models are one already; running means of batches are not."""
        if not self._stepped or not self.buffers:
            return False
        flat = Flat(self.buffers, self._mean)
        flat.fill(self.buffers)
        self._mean(flat.buffer)
        flat.give(self.buffers)
        self._stepped = False
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"stepped": self._stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stepped = state["stepped"]


def states_for_others(ranks: Sequence[list[dict[str, Any]]], world: int) -> list[dict[str, Any]]:
    """The optimizers' states that `world` other ranks begin with, each the same, from those of the ranks that saved.

    Moments become their means. With equal models and a common denominator the mean model then moves on as it would
    have, by the mean of m, and the next merge finds the mean of v. What is equal stays as it is. A process by itself
    merges nothing, so it keeps no denominator that only a merge renews.
    """
    return [
        {
            **one[0],
            "state": {**one[0]["state"], "state": _averaged([of_rank["state"]["state"] for of_rank in one], world)},
        }
        for one in zip(*ranks, strict=True)
    ]


def _averaged(states: list[dict[int, dict[str, Any]]], world: int) -> dict[int, dict[str, Any]]:
    """Of one optimizer: by parameter, what it remembers of it."""
    return {
        parameter: {
            name: _mean_of([state[parameter][name] for state in states])
            for name in own
            if world > 1 or name not in FROZEN
        }
        for parameter, own in states[0].items()
    }


def _mean_of(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, torch.Tensor) or all(torch.equal(first, other) for other in values[1:]):
        return first
    return tree_sum(values, [range(len(values))]) * (1 / len(values))


def _buckets(parameters: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Neighbours together as long as they fit; what is larger than a bucket is one by itself."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
