"""Random dense models, trained by several ranks, and the same played in one process, plainly."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from helpers.ranks import play
from thermocline.checkpoint import state_tree
from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.frozen_adam import FrozenAdam
from thermocline.distributed.hierarchical_allreduce import Mean

Tensors = dict[str, torch.Tensor]
Nodes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A training of `steps`, made of a seed."""

    seed: int
    sync: DenseSync
    steps: int = 6
    norm: bool = False
    idle: bool = False
    """Some ranks do not use some parameters in some steps."""
    save_at: int = 0
    """There everything goes through bytes into new objects."""
    merge_at: tuple[int, ...] = ()
    decay: float = 0.0


class Net(torch.nn.Module):
    """A few layers, a scalar, and a part that a batch may not use."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        wide, inner = (int(n) for n in torch.randint(1, 9, (2,)))
        self.wide = wide
        self.first = torch.nn.Linear(wide, inner)
        self.norm = torch.nn.BatchNorm1d(inner) if case.norm else torch.nn.Identity()
        self.last = torch.nn.Linear(inner, 1)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.aside = torch.nn.Linear(wide, 1)
        self.never = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        y = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale
        return (y + self.aside(x) if aside else y).squeeze(1)


def backward(case: Case, net: Net, rank: int, step: int) -> None:
    """The gradients of one rank's batch of one step."""
    rng = torch.Generator().manual_seed(case.seed * 1_000_003 + step * 101 + rank)
    x = torch.randn(5, net.wide, generator=rng) * (1 + rank)
    y = (torch.rand(5, generator=rng) < 0.5).float()
    aside = not case.idle or (case.seed + rank + step) % 3 != 0
    torch.nn.functional.binary_cross_entropy_with_logits(net(x, aside), y).backward()


def optimizer_of(case: Case, net: Net) -> torch.optim.Optimizer:
    return FrozenAdam(net.parameters(), lr=0.05, betas=(0.8, 0.95), weight_decay=case.decay)


def state_of(net: Net, optimizer: torch.optim.Optimizer) -> Tensors:
    """Everything that training changes, by name."""
    tensors = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return tensors


# ---- as ranks


def train(groups: Groups, cases: list[Case]) -> list[tuple[Tensors, int, int]]:
    """What this rank ends with: its tensors, and the bytes it sent within and between nodes."""
    return [_train(groups, case) for case in cases]


def _train(groups: Groups, case: Case) -> tuple[Tensors, int, int]:
    net, optimizer, sync = _made(groups, case)
    with torch.no_grad():  # only rank 0's start counts
        for parameter in net.parameters():
            parameter += groups.topology.rank
    sync.begin()
    for step in range(1, case.steps + 1):
        backward(case, net, groups.topology.rank, step)
        sync.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        sync.after_step(step)
        if step in case.merge_at or step == case.save_at:
            sync.merge_now()
            assert not sync.merge_now()  # a second time there is nothing to merge
        if step == case.save_at:
            tensors: Tensors = {}
            tree = (net.state_dict(), optimizer.state_dict(), sync.state_dict())
            packed = state_tree.pack(tree, tensors, "")
            saved = state_tree.unpack(packed, state_tree.decode(state_tree.encode(tensors)))
            net, optimizer, sync = _made(groups, case)
            for there, state in zip((net, optimizer, sync), saved, strict=True):
                there.load_state_dict(state)
            assert not sync.merge_now()
    sync.merge_now()
    return state_of(net, optimizer), sync.sent.within, sync.sent.between


def _made(groups: Groups, case: Case) -> tuple[Net, torch.optim.Optimizer, DenseParameters]:
    net = Net(case)
    optimizer = optimizer_of(case, net)
    sync = DenseParameters.make(net.parameters(), optimizer, groups, case.sync, buffers=net.buffers())
    return net, optimizer, sync


def average(groups: Groups, length: int, exact: bool) -> torch.Tensor:
    """The mean over all ranks of `noise`."""
    averaged = Mean(groups, exact=exact)
    buffer = torch.zeros(averaged.padded(length))
    buffer[:length] = noise(groups.topology.rank, length)
    averaged(buffer)
    return buffer[:length]


def noise(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


# ---- in one process


def mean(values: list[torch.Tensor | None], nodes: Nodes) -> torch.Tensor | None:
    """Ranks of a node left to right, then nodes; those without a value are skipped; one multiplication."""
    total = None
    for node in nodes:
        partial = None
        for value in (values[rank] for rank in node):
            if value is not None:
                partial = value if partial is None else partial + value
        if partial is not None:
            total = partial if total is None else total + partial
    return None if total is None else total * (1 / len(values))


def merges(sync: DenseSync, period: int, steps: int) -> set[int]:
    """After which of so many steps there are merges of what has a period."""
    early = {2**n for n in range(20) if 2**n < period} if sync.mode == "v_frozen" else set()
    return {step for step in range(1, steps + 1) if step in early or step % period == 0}


class Played:
    """All ranks' models and moments, as plain tensors; Adam written out."""

    def __init__(self, case: Case, nodes: Nodes) -> None:
        self.case, self.nodes = case, nodes
        self.nets = [Net(case) for node in nodes for _ in node]
        self.moments: list[dict[str, Tensors]] = [{} for _ in self.nets]
        self.hats: dict[str, tuple[torch.Tensor, int]] = {}
        self.merged = {"x": 0, "m": 0, "v": 0}
        self.normed = 0

    def run(self) -> list[Tensors]:
        """What every rank ends with. On one torch thread, as ranks are."""
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
                self.average_gradients()
            for rank in range(len(self.nets)):
                self.adam(rank, step)
            now = step in case.merge_at or step in (case.save_at, case.steps)
            if sync.mode != "gradients":
                for kind, period in zip("xmv", sync.periods(), strict=True):
                    if period is not None and (now or step in merges(sync, period, case.steps)):
                        self.merge(kind, step)
            elif now:
                self.merge_buffers()
        return [self.state(rank) for rank in range(len(self.nets))]

    def named(self) -> Iterator[tuple[str, list[Any]]]:
        names = [dict(net.named_parameters()) for net in self.nets]
        for name in names[0]:
            yield name, [own[name] for own in names]

    def average_gradients(self) -> None:
        for _, parameters in self.named():
            averaged = mean([parameter.grad for parameter in parameters], self.nodes)
            for parameter in parameters:
                parameter.grad = None if averaged is None else averaged.clone()

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
            if name in self.hats:
                merged, at = self.hats[name]
                least = state["v"] / ((1 - 0.95**t) * len(self.nets))
                below = torch.maximum(merged / (1 - 0.95**at), least).sqrt() + 1e-8
            else:
                below = state["v"].sqrt() / (1 - 0.95**t) ** 0.5 + 1e-8
            parameter.copy_(torch.addcdiv(parameter, state["m"], below, value=-(0.05 / (1 - 0.8**t))))

    @torch.no_grad()
    def merge(self, kind: str, step: int) -> None:
        if self.merged[kind] == step:
            return
        self.merged[kind] = step
        if kind == "x":
            self.merge_buffers()
        for name, parameters in self.named():
            if kind == "x":
                merged = mean([p.detach().clone() for p in parameters], self.nodes)
                for parameter in parameters:
                    parameter.copy_(merged)
                continue
            merged = mean([own[name][kind] for own in self.moments], self.nodes)
            assert merged is not None
            if self.case.sync.mode == "v_frozen":
                old = self.hats.get(name)
                if self.case.sync.amsgrad and old is not None:
                    merged = torch.maximum(old[0], merged)
                self.hats[name] = (merged, step)
            else:
                for own in self.moments:
                    own[name][kind] = merged

    @torch.no_grad()
    def merge_buffers(self) -> None:
        for buffers in zip(*(net.buffers() for net in self.nets), strict=True):
            if buffers[0].is_floating_point():
                merged = mean([buffer.clone() for buffer in buffers], self.nodes)
                for buffer in buffers:
                    buffer.copy_(merged)

    def state(self, rank: int) -> Tensors:
        tensors = dict(self.nets[rank].state_dict())
        for name, state in self.moments[rank].items():
            own = {"exp_avg": state["m"], "exp_avg_sq": state["v"], "step": state["t"]}
            if name in self.hats:
                own["v_hat"], own["v_hat_step"] = self.hats[name][0], torch.tensor(float(self.hats[name][1]))
                own["v_hat_ranks"] = torch.tensor(float(len(self.nets)))
            tensors |= {f"{name}/{key}": value for key, value in own.items()}
        return tensors


def assert_same(got: Tensors, expected: Tensors, where: object, *, exact: bool = True) -> None:
    assert got.keys() == expected.keys(), where
    for name, value in got.items():
        if exact:
            assert value.numpy().tobytes() == expected[name].numpy().tobytes(), (where, name, value, expected[name])
        else:
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-6), (where, name, value, expected[name])


# ---- second moments of ranks that differ


def assert_simulated(nodes: Nodes, cases: list[Case]) -> None:
    """Every rank ends as the simulation of all of them in one process says."""
    expected = [Played(case, nodes).run() for case in cases]
    for rank, results in enumerate(play(nodes, train, cases)):
        for case, (tensors, _, _), played in zip(cases, results, expected, strict=True):
            assert_same(tensors, played[rank], (rank, case), exact=case.sync.exact)


def tug(groups: Groups, ways: list[DenseSync]) -> list[float]:
    return [_tug(groups, sync) for sync in ways]


def _tug(groups: Groups, sync: DenseSync) -> float:
    """Where training ends that should find the minimum of the mean of 100 x^2 / 2 and, twice, (x - 1)^2 / 2."""
    steep, centre = ((100.0, 0.0), (1.0, 1.0), (1.0, 1.0))[groups.topology.rank]
    x = torch.nn.Parameter(torch.tensor([0.5]))
    optimizer = FrozenAdam([x], lr=0.01)
    dense = DenseParameters.make([x], optimizer, groups, sync)
    for step in range(1, 301):
        x.grad = steep * (x.detach() - centre)
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
    dense.merge_now()
    return float(x.detach())


def rare(groups: Groups, ways: list[DenseSync]) -> list[float]:
    """The loss after training on examples of a few of many features each, at a high rate."""
    return [_rare(groups, sync) for sync in ways]


def _rare(groups: Groups, sync: DenseSync) -> float:
    signs = torch.where(torch.arange(400) % 2 == 0, 1.0, -1.0)
    x = torch.nn.Parameter(torch.zeros(400))
    optimizer = FrozenAdam([x], lr=0.01)
    dense = DenseParameters.make([x], optimizer, groups, sync)
    rng = torch.Generator().manual_seed(groups.topology.rank)

    def loss(examples: int) -> torch.Tensor:
        found = (torch.rand(examples, 400, generator=rng) < 0.01).float()
        logits, score = found @ x, found @ signs
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


STEADY = ((1.0, 0.0, 0.1), (1.0, 1.0, 10.0))
"""The gradients of two ranks, at every step."""


def steady(groups: Groups, sync: DenseSync, steps: int) -> torch.Tensor:
    """Where parameters end whose gradients never change."""
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = FrozenAdam([x], lr=0.01)
    dense = DenseParameters.make([x], optimizer, groups, sync)
    for step in range(1, steps + 1):
        x.grad = torch.tensor(STEADY[groups.topology.rank])
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
    dense.merge_now()
    return x.detach()


# ---- on machines


def on_and_on(groups: Groups, numbers: int, steps: int, sync: DenseSync) -> list[str]:
    """Steps over a model of so many parameters; what they are afterwards, hashed."""
    from helpers.machines import stepped

    parameters = [torch.nn.Parameter(torch.zeros(numbers // 2)) for _ in range(2)]
    optimizer = FrozenAdam(parameters)
    dense = DenseParameters.make(parameters, optimizer, groups, sync)
    rng = torch.Generator().manual_seed(groups.topology.rank)
    for step in range(1, steps + 1):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        dense.after_backward()
        optimizer.step()
        dense.after_step(step)
        stepped()
    dense.merge_now()
    return [hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest() for parameter in parameters]


def sent_for(groups: Groups, length: int, exact: bool) -> tuple[int, int]:
    """Bytes this rank counts for one mean."""
    averaged = Mean(groups, exact=exact)
    averaged(torch.ones(averaged.padded(length)))
    return averaged.sent.within, averaged.sent.between
