"""`DenseParameters`: synchronizes the dense parameters of all ranks, every step or every k steps.

    sync = DenseParameters.make(model.parameters(), optimizers, groups, buffers=model.buffers())
    sync.begin()                                    # broadcasts rank 0's parameters; after a restore it sends nothing
    loss.backward(); table.step()                   # tables first: autograd may share memory between gradients
    sync.after_backward(); optimizer.step()
    sync.after_step(step)                           # step: number of steps taken, this one included
    with sync.merged(): ...                         # evaluation of the mean model; training is not affected
    sync.merge_now()                                # at the end: every rank keeps that mean

`GradientAveraging` averages gradients every step. `PeriodicAveraging` averages models every k steps: those of all
ranks, or those of the nodes, whose ranks average their gradients every step. Each rank's loss is the mean over its own
batch.

Thread     the training thread; all ranks make the same calls in the same order
Blocks     every call that communicates waits for all ranks, at most `dist.timeout` seconds
Raises     `RankError`; ValueError for parameters or optimizers that do not fit the settings
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.communicator import Groups
from thermocline.distributed.frozen_adam import FrozenAdam
from thermocline.distributed.hierarchical_allreduce import DenseTraffic, FlatBuffer, HierarchicalAllReduce
from thermocline.distributed.model_mean import replaced_by_mean, set_to_mean
from thermocline.distributed.rank_agreement import dense_settings, require_equal, shape_text
from thermocline.distributed.topology import Topology
from thermocline.errors import ConfigError
from thermocline.utils.text_format import parse_size

_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
X, M, V = 0, 1, 2
MakeAllReduce = Callable[..., HierarchicalAllReduce]
"""Takes `groups`, `exact` and `level`, as `HierarchicalAllReduce` does."""


class DenseParameters(abc.ABC):
    """Base of the two modes. `make` chooses by `DenseSync.mode`."""

    @staticmethod
    def make(
        parameters: Iterable[torch.Tensor], optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        groups: Groups, settings: DenseSync | None = None, *, buffers: Iterable[torch.Tensor] = (),
        make_allreduce: MakeAllReduce = HierarchicalAllReduce,
    ) -> DenseParameters:  # fmt: skip
        """Create the synchronization of a model. Collective.

        Raises `ConfigError` if parameters, optimizers or settings differ between ranks.

        parameters       of the model. Frozen ones (`requires_grad` False) get rank 0's values in `begin` and are
                         never averaged
        buffers          of the model; floating-point buffers (running means) are averaged whenever models are merged
        make_allreduce   class or function that creates the all-reduce; simulations of ranks pass their own
        """
        settings = settings or DenseSync()
        every = list(dict.fromkeys(parameters))
        parameters = [parameter for parameter in every if parameter.requires_grad]
        frozen = [parameter for parameter in every if not parameter.requires_grad]
        buffers = list(dict.fromkeys(buffers))
        if isinstance(optimizers, torch.optim.Optimizer):
            optimizers = [optimizers]
        same = dense_settings(parameters, buffers, optimizers, settings)
        same["frozen dense parameters"] = [shape_text(parameter) for parameter in frozen]
        require_equal(groups.train, same, "the dense model must be equal on all ranks")
        sync: DenseParameters
        if settings.mode == "gradients":
            sync = GradientAveraging(parameters, buffers, groups, settings, make_allreduce)
        else:
            sync = PeriodicAveraging(parameters, buffers, groups, settings, make_allreduce, optimizers)
        sync._frozen = frozen
        _live.add(sync)
        return sync

    def __init__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], groups: Groups, settings: DenseSync,
        make_allreduce: MakeAllReduce,
    ) -> None:  # fmt: skip
        self.settings, self.parameters = settings, parameters
        self.buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._groups, self._all_buffers = groups, buffers
        self._frozen: list[torch.Tensor] = []
        self._allreduce = make_allreduce(groups, exact=settings.exact, level="world")
        self._mean = make_allreduce(groups, exact=True, level="world")
        """Computes the mean of `model_mean.py`, for evaluation and `merge_now`."""

    @property
    def traffic(self) -> DenseTraffic:
        """Bytes that this rank has sent so far in `after_backward` and `after_step`."""
        return self._allreduce.traffic

    @property
    @abc.abstractmethod
    def replicas(self) -> tuple[int, ...]:
        """For every rank, the lowest rank whose parameters and optimizer state are always equal to its own.

        A checkpoint stores them once per such group of ranks.
        """

    _begun = False
    _restored = False

    @torch.no_grad()
    def begin(self) -> None:
        """Broadcast rank 0's parameters, frozen ones included, and buffers. Call it before the first step, of a
        restored run too.

        Raises `ConfigError` if torch has different numbers of threads on the ranks: its results depend on it. After
        `load_state_dict` it sends nothing: every rank continues with its own.
        """
        require_equal(self._groups.train, {"torch threads": torch.get_num_threads()}, "set torch_threads of the config")
        self._begun, restored, self._restored = True, self._restored, False
        if self._allreduce.world == 1 or restored:
            return
        tensors = [*self.parameters, *self._frozen, *self._all_buffers]
        for tensor in tensors:
            if not tensor.is_floating_point():
                self._allreduce.broadcast(tensor)
        if floats := [tensor for tensor in tensors if tensor.is_floating_point()]:
            flat = FlatBuffer(floats, self._allreduce)
            flat.copy_from(floats)
            self._allreduce.broadcast(flat.buffer)
            flat.copy_to(floats)

    def _require_begun(self) -> None:
        if not self._begun and self._allreduce.world > 1:
            raise RuntimeError(
                "the ranks may have different dense parameters: call begin() of DenseParameters before the first step"
            )

    @abc.abstractmethod
    def after_backward(self) -> None:
        """Call once per step, after all gradients are computed and before any is used."""

    @abc.abstractmethod
    def after_step(self, step: int) -> bool:
        """Call once per step, after the optimizers' step number `step`. Returns whether models were merged."""

    def merged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the mean over ranks of its parameters and buffers, for evaluation.

        Afterwards parameters and buffers have their own memory again: training does not depend on it. `model_mean.py`
        defines the mean. Do not train inside the context.
        """
        return replaced_by_mean([*self.parameters, *self._all_buffers], self._mean)

    def merge_now(self) -> bool:
        """Give every rank the mean model of `merged`, at the end of training. Returns whether anything was averaged."""
        return set_to_mean([*self.parameters, *self._all_buffers], self._mean)

    @property
    def has_own_state(self) -> bool:
        """Whether ranks differ during training, in parameters or running means: a checkpoint needs this object."""
        return self._allreduce.world > 1 and (self.settings.mode != "gradients" or bool(self._all_buffers))

    def synchronizes(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether any of the tensors is a parameter or buffer of this object."""
        own = {id(tensor) for tensor in (*self.parameters, *self._all_buffers)}
        return any(id(tensor) in own for tensor in tensors)

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs beside the model's and the optimizers'."""

    @abc.abstractmethod
    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError, TypeError or KeyError if `load_state_dict` would. Changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, with the rank's own model and optimizers: `begin` then sends nothing."""
        self.check_state_dict(state)
        self._begun = self._restored = True


_live: weakref.WeakSet[DenseParameters] = weakref.WeakSet()
"""Every object of `DenseParameters.make`."""


def synchronization_of(tensors: Sequence[torch.Tensor]) -> DenseParameters | None:
    """Return a live `DenseParameters` that synchronizes any of the tensors."""
    return next((sync for sync in _live if sync.synchronizes(tensors)), None)


class _Gradients:
    """Averages the gradients of parameters in buckets.

    A rank without a gradient for a parameter adds nothing to its sum. If no rank has one, the parameter keeps none.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce, bucket: str | int) -> None:
        self._allreduce = allreduce
        self._buckets = list(_buckets(parameters, parse_size(bucket, "dense_sync.bucket")))

    @torch.no_grad()
    def average(self) -> None:
        if self._allreduce.members == 1:
            return
        for bucket in self._buckets:
            flat = FlatBuffer(bucket, self._allreduce, extra=len(bucket))
            flat.extra.copy_(torch.tensor([parameter.grad is not None for parameter in bucket]))
            for parameter, view in zip(bucket, flat.views, strict=True):
                if parameter.grad is None:
                    view.fill_(-0.0)  # x + -0.0 is x for every x, including 0.0 and -0.0
                else:
                    view.copy_(parameter.grad)
            self._allreduce.average(flat.buffer)
            for parameter, view, on_any_rank in zip(bucket, flat.views, flat.extra.tolist(), strict=True):
                if on_any_rank and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad is not None:
                    parameter.grad.copy_(view)


class GradientAveraging(DenseParameters):
    """Averages the gradients of all ranks every step."""

    def __init__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], groups: Groups, settings: DenseSync,
        make_allreduce: MakeAllReduce,
    ) -> None:  # fmt: skip
        super().__init__(parameters, buffers, groups, settings, make_allreduce)
        self._gradients = _Gradients(parameters, self._allreduce, settings.bucket)

    @property
    def replicas(self) -> tuple[int, ...]:
        return (0,) * self._allreduce.world

    def after_backward(self) -> None:
        self._require_begun()
        self._gradients.average()

    def after_step(self, step: int) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Accept every state: nothing is read from it."""


def _average(tensors: Sequence[torch.Tensor], allreduce: HierarchicalAllReduce) -> None:
    flat = FlatBuffer(tensors, allreduce)
    flat.copy_from(tensors)
    allreduce.average(flat.buffer)
    flat.copy_to(tensors)


def _buckets(parameters: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Group consecutive parameters up to `limit` bytes. A larger parameter is a bucket by itself."""
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


class _MergedTensor(NamedTuple):
    """A tensor that a merge averages."""

    kind: int
    """X, M or V."""
    parameter: torch.Tensor
    """The parameter that it belongs to."""
    tensor: torch.Tensor


class PeriodicAveraging(DenseParameters):
    """k-step merging: every rank, or every node, steps by itself, and models are averaged every k steps.

    With `scope` "nodes" the ranks of a node average their gradients every step, so that their parameters and moments
    stay equal; a merge averages over nodes. Buffers of a node's ranks differ and are averaged within the node first.

    `DenseSync.merge` chooses the tensors that a merge averages, the three variants of k-step Adam:

    - v_frozen: x and v. All ranks divide by the merged v until the next merge and update their own m and v. The first
      merges follow steps 1, 2, 4, 8, ... below k, so that a merged v exists from step 2 on and is never older than half
      of its steps while it is the mean of few gradients.
    - all: x and the whole optimizer state of a parameter (m and v of Adam).
    - params: x. Every rank divides by its own v, so ranks scale the same gradient differently, and the mean of their
      models may not descend where each of them does.

    x, m and v may have different periods. A merge averages all tensors that are due in one buffer.
    """

    def __init__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], groups: Groups, settings: DenseSync,
        make_allreduce: MakeAllReduce, optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:  # fmt: skip
        super().__init__(parameters, buffers, groups, settings, make_allreduce)
        self._within: HierarchicalAllReduce | None = None
        """Averages gradients and buffers within the node, with scope "nodes"."""
        self._merging = self._allreduce
        """Averages models."""
        if settings.scope == "nodes":
            _check_nodes(groups.topology)
            self._within = make_allreduce(groups, exact=settings.exact, level="node")
            self._merging = make_allreduce(groups, exact=settings.exact, level="nodes")
            self._within.traffic = self._merging.traffic = self._allreduce.traffic
            self._gradients = _Gradients(parameters, self._within, settings.bucket)
        self._periods = settings.periods()
        self._optimizer = {
            parameter: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        missing = sum(parameter not in self._optimizer for parameter in parameters)
        if missing:
            raise ValueError(
                f"{missing} of {len(parameters)} parameters are in no optimizer: add them to one, or set "
                "requires_grad = False"
            )
        if settings.mode == "v_frozen":
            for kind in {type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, FrozenAdam)}:
                raise ValueError(
                    f'dense_sync.merge "v_frozen" requires thermocline.FrozenAdam, not {kind}; "all" and "params" '
                    "accept any optimizer"
                )
        self._step = 0
        self._merged = [0, 0, 0]
        """The step of the last merge of x, m and v."""
        self._flat: dict[tuple[bool, ...], FlatBuffer] = {}
        """Buffers by (x due, m due, v due): different periods give up to seven combinations."""

    @property
    def replicas(self) -> tuple[int, ...]:
        topology = self._allreduce.topology
        if self._within is None:
            return tuple(range(topology.world))
        return tuple(node[0] for node in topology.nodes for _ in node)

    def begin(self) -> None:
        """See `DenseParameters.begin`. Steps are counted from the start of this run, also after an earlier one."""
        if not self._restored:
            self._step, self._merged = 0, [0, 0, 0]
        super().begin()

    def after_backward(self) -> None:
        """Give every parameter a gradient, so that the moments of all ranks have the same number of steps."""
        self._require_begun()
        if self._within is not None:
            self._gradients.average()
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
        averaged = super().merge_now()
        self._merged[X] = self._step
        return self._merge([period is not None for period in self._periods]) or averaged

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "merged": list(self._merged)}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        numbers = [state["step"], *state["merged"]]
        if len(numbers) != 4 or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"the steps of the last merges are {numbers}: they must be 4 numbers of steps")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step, self._merged = state["step"], list(state["merged"])

    @torch.no_grad()
    def _merge(self, requested: list[bool]) -> bool:
        """Average the requested tensors that have changed since their last merge.

        Unchanged tensors are skipped because the mean of equal numbers may differ from them by rounding.
        """
        due = tuple(request and at < self._step for request, at in zip(requested, self._merged, strict=True))
        if not any(due):
            return False
        entries = list(self._tensors(due))
        if not entries:
            return False  # the model has no dense parameters
        flat = self._flat.get(due)
        if flat is None:
            flat = self._flat[due] = FlatBuffer([entry.tensor for entry in entries], self._merging)
        if due[X] and self.buffers and self._within is not None:
            _average(self.buffers, self._within)
        flat.copy_from([entry.tensor for entry in entries])
        self._merging.average(flat.buffer)
        frozen = self.settings.mode == "v_frozen"
        for entry, view in zip(entries, flat.views, strict=True):
            if frozen and entry.kind == V:
                optimizer = self._optimizer[entry.parameter]
                assert isinstance(optimizer, FrozenAdam)
                optimizer.freeze(entry.parameter, view, self._merging.members, monotonic=self.settings.amsgrad)
            else:
                entry.tensor.copy_(view)
        self._merged = [self._step if is_due else at for is_due, at in zip(due, self._merged, strict=True)]
        return True

    def _tensors(self, due: Sequence[bool]) -> Iterator[_MergedTensor]:
        """Yield the due tensors in the same order on all ranks: parameters, buffers, then moments by name."""
        if due[X]:
            yield from (_MergedTensor(X, tensor, tensor) for tensor in (*self.parameters, *self.buffers))
        if not (due[M] or due[V]):
            return
        for parameter in self.parameters:
            state = self._optimizer[parameter].state[parameter]
            for name, tensor in sorted(state.items()):
                if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape or name in ("step", "v_hat"):
                    continue
                kind = M if name in _FIRST_MOMENTS else V
                if due[kind]:
                    yield _MergedTensor(kind, parameter, tensor)


def _check_nodes(topology: Topology) -> None:
    """Raise unless there are several nodes of the same number of ranks."""
    sizes = [len(node) for node in topology.nodes]
    if len(sizes) == 1:
        raise ConfigError(
            f'dist.dense_sync.scope is "nodes", but all {topology.world} ranks are on one node: set it to "ranks", or '
            "start ranks on several nodes"
        )
    if not topology.is_uniform:
        raise ConfigError(
            f'dist.dense_sync.scope is "nodes", but the nodes have {", ".join(map(str, sizes))} ranks: start the same '
            'number on every node, or set it to "ranks"'
        )
