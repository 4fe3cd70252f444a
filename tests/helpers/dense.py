"""Random dense models trained by several ranks, and `DenseSimulation`, which trains all ranks in one process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from helpers.ranks import Nodes, run_ranks
from thermocline.checkpoint import state_tree
from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.frozen_adam import FrozenAdam
from thermocline.distributed.hierarchical_allreduce import HierarchicalAllReduce

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A random training run, determined by its fields."""

    seed: int
    sync: DenseSync
    steps: int = 6
    batch_norm: bool = False
    unused: bool = False
    """Whether some ranks do not use some parameters in some steps."""
    save_at: int = 0
    """Step after which all state is saved to bytes and loaded into new objects; 0: never."""
    evaluate_at: tuple[int, ...] = ()
    """Steps after which the tensors of the merged model are recorded."""
    merge_at: tuple[int, ...] = ()
    """Steps after which `merge_now` is called."""
    decay: float = 0.0


class Net(torch.nn.Module):
    """Two layers, a scalar, a layer that a batch may leave out, and a parameter that is never used."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        inputs, hidden = (int(n) for n in torch.randint(1, 9, (2,)))
        self.inputs = inputs
        self.first = torch.nn.Linear(inputs, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden) if case.batch_norm else torch.nn.Identity()
        self.last = torch.nn.Linear(hidden, 1)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.optional = torch.nn.Linear(inputs, 1)
        self.never = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, use_optional: bool) -> torch.Tensor:
        y = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale
        return (y + self.optional(x) if use_optional else y).squeeze(1)


def backward(case: Case, net: Net, rank: int, step: int) -> None:
    """Compute the gradients of one rank's batch of one step."""
    rng = torch.Generator().manual_seed(case.seed * 1_000_003 + step * 101 + rank)
    x = torch.randn(5, net.inputs, generator=rng) * (1 + rank)
    y = (torch.rand(5, generator=rng) < 0.5).float()
    use_optional = not case.unused or (case.seed + rank + step) % 3 != 0
    torch.nn.functional.binary_cross_entropy_with_logits(net(x, use_optional), y).backward()


def optimizer_of(case: Case, net: Net) -> torch.optim.Optimizer:
    return FrozenAdam(net.parameters(), lr=0.05, betas=(0.8, 0.95), weight_decay=case.decay)


def state_of(net: Net, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return copies of all tensors that training changes, by name."""
    tensors = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return tensors


# ---- ranks


def train(groups: Groups, cases: list[Case]) -> list[tuple[Tensors, int, int]]:
    """Train all cases on this rank. Returns final tensors and bytes sent within and between nodes, by case.

    The tensors of merged models are named "step/name".
    """
    return [_train(groups, case) for case in cases]


def _train(groups: Groups, case: Case) -> tuple[Tensors, int, int]:
    net, optimizer, sync = _make(groups, case)
    evaluated: Tensors = {}
    with torch.no_grad():  # `begin` replaces the parameters of all ranks but rank 0
        for parameter in net.parameters():
            parameter += groups.topology.rank
    sync.begin()
    for step in range(1, case.steps + 1):
        backward(case, net, groups.topology.rank, step)
        sync.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.after_step(step)
        if step in case.merge_at:
            sync.merge_now()
            assert not sync.merge_now()  # nothing has changed since
        if step in case.evaluate_at:
            own = state_of(net, optimizer)
            with sync.merged():
                evaluated |= {f"{step}/{name}": value.clone() for name, value in net.state_dict().items()}
            assert_same(state_of(net, optimizer), own, (case, step))
        if step == case.save_at:
            tensors: Tensors = {}
            tree = (net.state_dict(), optimizer.state_dict(), sync.state_dict())
            packed = state_tree.pack(tree, tensors, "")
            saved = state_tree.unpack(packed, state_tree.decode(state_tree.encode(tensors)))
            net, optimizer, sync = _make(groups, case)
            for target, state in zip((net, optimizer, sync), saved, strict=True):
                target.load_state_dict(state)
            sync.begin()
    sync.merge_now()
    return state_of(net, optimizer) | evaluated, sync.traffic.within, sync.traffic.between


def _make(groups: Groups, case: Case) -> tuple[Net, torch.optim.Optimizer, DenseParameters]:
    net = Net(case)
    optimizer = optimizer_of(case, net)
    sync = DenseParameters.make(net.parameters(), optimizer, groups, case.sync, buffers=net.buffers())
    return net, optimizer, sync


def average(groups: Groups, length: int, exact: bool) -> torch.Tensor:
    """Return the mean of `noise` over all ranks."""
    allreduce = HierarchicalAllReduce(groups, exact=exact)
    buffer = torch.zeros(allreduce.padded_length(length))
    buffer[:length] = noise(groups.topology.rank, length)
    allreduce.average(buffer)
    return buffer[:length]


def noise(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


# ---- simulation in one process


def mean(values: list[torch.Tensor | None], nodes: Nodes) -> torch.Tensor | None:
    """Add the ranks of each node left to right, then the nodes, without the ranks that have no value; multiply once.

    `nodes` need not have all ranks.
    """
    total = None
    for node in nodes:
        partial = None
        for value in (values[rank] for rank in node):
            if value is not None:
                partial = value if partial is None else partial + value
        if partial is not None:
            total = partial if total is None else total + partial
    return None if total is None else total * (1 / sum(map(len, nodes)))


def merge_steps(sync: DenseSync, period: int, steps: int) -> set[int]:
    """Return the steps, up to `steps`, after which tensors with this period are merged."""
    early = {2**n for n in range(20) if 2**n < period} if sync.mode == "v_frozen" else set()
    return {step for step in range(1, steps + 1) if step in early or step % period == 0}


class DenseSimulation:
    """Models and moments of all ranks in one process, with Adam written out."""

    def __init__(self, case: Case, nodes: Nodes) -> None:
        self.case, self.nodes = case, nodes
        self.nets = [Net(case) for node in nodes for _ in node]
        self.units = (
            [(node[0],) for node in nodes] if case.sync.scope == "nodes" else [(n,) for n in range(len(self.nets))]
        )
        """A rank of everything that steps alone: ranks, or nodes."""
        self.merging: Nodes = tuple(self.units) if case.sync.scope == "nodes" else nodes
        self.moments: list[dict[str, Tensors]] = [{} for _ in self.nets]
        self.frozen: dict[str, tuple[torch.Tensor, int]] = {}
        self.merged = {"x": 0, "m": 0, "v": 0}
        self.evaluated: Tensors = {}

    def run(self) -> list[Tensors]:
        """Train on one torch thread, as ranks do, and return the final tensors of every rank."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> list[Tensors]:
        case, sync = self.case, self.case.sync
        for step in range(1, case.steps + 1):
            for rank, net in enumerate(self.nets):
                net.zero_grad()
                backward(case, net, rank, step)
            if sync.mode == "gradients":
                self.average_gradients([self.nodes])
            elif sync.scope == "nodes":
                self.average_gradients([(node,) for node in self.nodes])
            for rank in range(len(self.nets)):
                self.adam(rank, step)
            now = step in case.merge_at or step == case.steps
            periods = () if sync.mode == "gradients" else tuple(zip("xmv", sync.periods(), strict=True))
            for kind, period in periods:
                if period is not None and step in merge_steps(sync, period, case.steps):
                    self.merge(kind, step)
            if now:
                self.merge_model(step)
                for kind, period in periods:
                    if period is not None:
                        self.merge(kind, step)
            if step in case.evaluate_at:
                self.evaluate(step)
        return [self.state(rank) for rank in range(len(self.nets))]

    def named(self) -> Iterator[tuple[str, list[Any]]]:
        by_rank = [dict(net.named_parameters()) for net in self.nets]
        for name in by_rank[0]:
            yield name, [parameters[name] for parameters in by_rank]

    def average_gradients(self, groups: Sequence[Nodes]) -> None:
        """Average the gradients of each group of ranks."""
        for _, parameters in self.named():
            for nodes in groups:
                averaged = mean([parameter.grad for parameter in parameters], nodes)
                for rank in (rank for node in nodes for rank in node):
                    parameters[rank].grad = None if averaged is None else averaged.clone()

    @torch.no_grad()
    def adam(self, rank: int, step: int) -> None:
        for name, parameter in self.nets[rank].named_parameters():
            grad = parameter.grad
            if grad is None:
                if self.case.sync.mode == "gradients":
                    continue
                grad = torch.zeros_like(parameter)
            state = self.moments[rank].setdefault(
                name, {"m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter), "t": torch.tensor(0.0)}
            )
            state["t"] = state["t"] + 1
            t = float(state["t"])
            if self.case.decay:
                grad = grad.add(parameter, alpha=self.case.decay)
            state["m"] = torch.lerp(state["m"], grad, 1 - 0.8)
            state["v"] = (state["v"] * 0.95).addcmul(grad, grad, value=1 - 0.95)
            if name in self.frozen:
                merged, at = self.frozen[name]
                lower_bound = state["v"] / ((1 - 0.95**t) * len(self.units))
                denominator = torch.maximum(merged / (1 - 0.95**at), lower_bound).sqrt() + 1e-8
            else:
                denominator = state["v"].sqrt() / (1 - 0.95**t) ** 0.5 + 1e-8
            parameter.copy_(torch.addcdiv(parameter, state["m"], denominator, value=-(0.05 / (1 - 0.8**t))))

    @torch.no_grad()
    def merge(self, kind: str, step: int) -> None:
        if self.merged[kind] == step:
            return
        self.merged[kind] = step
        if kind == "x":
            self.merge_buffers()
        for name, parameters in self.named():
            if kind == "x":
                merged = mean([p.detach().clone() for p in parameters], self.merging)
                for parameter in parameters:
                    parameter.copy_(merged)
                continue
            merged = mean([moments[name][kind] for moments in self.moments], self.merging)
            assert merged is not None
            if self.case.sync.mode == "v_frozen":
                old = self.frozen.get(name)
                if self.case.sync.amsgrad and old is not None:
                    merged = torch.maximum(old[0], merged)
                self.frozen[name] = (merged, step)
            else:
                for moments in self.moments:
                    moments[name][kind] = merged

    @torch.no_grad()
    def merge_buffers(self) -> None:
        for buffers in zip(*(net.buffers() for net in self.nets), strict=True):
            if not buffers[0].is_floating_point():
                continue
            if self.case.sync.scope == "nodes":  # within every node first
                for node in self.nodes:
                    merged = mean([buffer.clone() for buffer in buffers], (node,))
                    for rank in node:
                        buffers[rank].copy_(merged)
            merged = mean([buffer.clone() for buffer in buffers], self.merging)
            for buffer in buffers:
                buffer.copy_(merged)

    @torch.no_grad()
    def mean_model(self) -> Tensors:
        """Return equal tensors as they are, integers of rank 0, and the mean of the others."""
        means = {}
        for name, first in self.nets[0].state_dict().items():
            values = [net.state_dict()[name] for net in self.nets]
            differs = first.is_floating_point() and any(not torch.equal(first, value) for value in values)
            averaged = mean(values, self.nodes) if differs else first
            assert averaged is not None
            means[name] = averaged.clone()
        return means

    def evaluate(self, step: int) -> None:
        self.evaluated |= {f"{step}/{name}": value for name, value in self.mean_model().items()}

    def merge_model(self, step: int) -> None:
        """Give every rank the mean model, as `merge_now` does beside moments that are due."""
        means = self.mean_model()
        for net in self.nets:
            net.load_state_dict(means)
        self.merged["x"] = step

    def state(self, rank: int) -> Tensors:
        tensors = dict(self.nets[rank].state_dict()) | self.evaluated
        for name, state in self.moments[rank].items():
            values = {"exp_avg": state["m"], "exp_avg_sq": state["v"], "step": state["t"]}
            if name in self.frozen:
                values["v_hat"], values["v_hat_step"] = self.frozen[name][0], torch.tensor(float(self.frozen[name][1]))
                values["v_hat_ranks"] = torch.tensor(float(len(self.units)))
            tensors |= {f"{name}/{key}": value for key, value in values.items()}
        return tensors


def assert_same(actual: Tensors, expected: Tensors, where: object, *, exact: bool = True) -> None:
    assert actual.keys() == expected.keys(), where
    for name, value in actual.items():
        if exact:
            assert value.numpy().tobytes() == expected[name].numpy().tobytes(), (where, name, value, expected[name])
        else:
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), (where, name, value, expected[name])


def assert_matches_simulation(nodes: Nodes, cases: list[Case]) -> None:
    """Assert that every rank ends with the tensors of `DenseSimulation`: bit for bit if the case is exact."""
    expected = [DenseSimulation(case, nodes).run() for case in cases]
    for rank, results in enumerate(run_ranks(nodes, train, cases)):
        for case, (tensors, _, _), simulated in zip(cases, results, expected, strict=True):
            assert_same(tensors, simulated[rank], (rank, case), exact=case.sync.exact)


# ---- ranks with different second moments


def train_unequal_curvature(groups: Groups, settings: list[DenseSync]) -> list[float]:
    """Minimize the mean over three ranks of 100 x^2 / 2 and, twice, (x - 1)^2 / 2. Returns the final x, by settings."""
    return [_train_unequal_curvature(groups, sync) for sync in settings]


def _train_unequal_curvature(groups: Groups, sync: DenseSync) -> float:
    curvature, centre = ((100.0, 0.0), (1.0, 1.0), (1.0, 1.0))[groups.topology.rank]
    x = torch.nn.Parameter(torch.tensor([0.5]))
    optimizer = FrozenAdam([x], lr=0.01)
    dense = DenseParameters.make([x], optimizer, groups, sync)
    dense.begin()
    for step in range(1, 301):
        x.grad = curvature * (x.detach() - centre)
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
    dense.merge_now()
    return float(x.detach())


def train_sparse_features(groups: Groups, settings: list[DenseSync]) -> list[float]:
    """Train on examples with few of many features each, at a high learning rate. Returns the final losses."""
    return [_train_sparse_features(groups, sync) for sync in settings]


def _train_sparse_features(groups: Groups, sync: DenseSync) -> float:
    signs = torch.where(torch.arange(400) % 2 == 0, 1.0, -1.0)
    x = torch.nn.Parameter(torch.zeros(400))
    optimizer = FrozenAdam([x], lr=0.01)
    dense = DenseParameters.make([x], optimizer, groups, sync)
    dense.begin()
    rng = torch.Generator().manual_seed(groups.topology.rank)

    def loss(examples: int) -> torch.Tensor:
        features = (torch.rand(examples, 400, generator=rng) < 0.01).float()
        logits, score = features @ x, features @ signs
        return torch.nn.functional.soft_margin_loss(logits[score != 0], score[score != 0].sign())

    for step in range(1, 501):
        x.grad = None
        loss(8).backward()
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
    dense.merge_now()
    rng.manual_seed(99)
    with torch.no_grad():
        return float(loss(2000))


CONSTANT_GRADIENTS = ((1.0, 0.0, 0.1), (1.0, 1.0, 10.0))
"""Gradients of two ranks at every step."""


def train_constant_gradients(groups: Groups, sync: DenseSync, steps: int) -> torch.Tensor:
    """Train parameters with `CONSTANT_GRADIENTS`. Returns their final values."""
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = FrozenAdam([x], lr=0.01)
    dense = DenseParameters.make([x], optimizer, groups, sync)
    dense.begin()
    for step in range(1, steps + 1):
        x.grad = torch.tensor(CONSTANT_GRADIENTS[groups.topology.rank])
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
    dense.merge_now()
    return x.detach()


# ---- on `Machines`


def train_steps(groups: Groups, parameter_count: int, steps: int, sync: DenseSync) -> list[str]:
    """Train `parameter_count` parameters on random gradients. Returns hashes of their final values."""
    from helpers.machines import record_step

    parameters = [torch.nn.Parameter(torch.zeros(parameter_count // 2)) for _ in range(2)]
    optimizer = FrozenAdam(parameters)
    dense = DenseParameters.make(parameters, optimizer, groups, sync)
    dense.begin()
    rng = torch.Generator().manual_seed(groups.topology.rank)
    for step in range(1, steps + 1):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
        record_step()
    dense.merge_now()
    return [hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest() for parameter in parameters]


def average_traffic(groups: Groups, length: int, exact: bool) -> tuple[int, int]:
    """Return the bytes that this rank counts for one mean, within and between nodes."""
    allreduce = HierarchicalAllReduce(groups, exact=exact)
    allreduce.average(torch.ones(allreduce.padded_length(length)))
    return allreduce.traffic.within, allreduce.traffic.between
