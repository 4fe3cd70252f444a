"""Gradient averaging equals a simulation in one process bit for bit; `FrozenAdam`; resharded optimizer states."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.dense import Case, Net, assert_matches_simulation, average, backward, mean, noise
from helpers.ranks import Nodes, groups_without_shm, run_ranks

from thermocline.checkpoint import state_tree
from thermocline.config.dense_sync import DenseSync
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.frozen_adam import FROZEN_STATE, FrozenAdam, without_frozen_state
from thermocline.distributed.model_mean import TensorMean
from thermocline.distributed.topology import Topology

WORLDS: dict[str, Nodes] = {
    "1": ((0,),),
    "2": ((0, 1),),
    "1 x 3": ((0,), (1,), (2,)),
    "2 x 2": ((0, 1), (2, 3)),
    "3 and 1": ((0, 1, 2), (3,)),
}


@pytest.fixture
def single_rank() -> Iterator[Groups]:
    groups = Groups.make(Topology.single())
    yield groups
    groups.close()


def random_cases(seed: int, *, exact: bool) -> list[Case]:
    rng = random.Random(seed)
    return [
        Case(
            rng.randrange(10**6), DenseSync(exact=exact, bucket=rng.choice((1, 100, "1MB"))),
            batch_norm=exact and rng.random() < 0.5, unused=rng.random() < 0.5, save_at=rng.randrange(4),
            evaluate_at=tuple(rng.sample(range(1, 7), rng.randrange(3))), decay=rng.choice((0.0, 0.01)),
        )
        for _ in range(5 if exact else 2)
    ]  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_gradient_averaging_equals_the_simulation(world: str) -> None:
    """Bit for bit if `exact`; torch's reductions add in another order."""
    assert_matches_simulation(
        WORLDS[world], [case for exact in (True, False) for case in random_cases(sum(map(ord, world)), exact=exact)]
    )


@pytest.mark.parametrize("nodes", [((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3), (4, 5)), ((0, 1, 2), (3, 4))], ids=str)
def test_sums_add_ranks_then_nodes(nodes: Nodes) -> None:
    """At least three ranks or nodes, since two have the same sum in any order; another tree gives other bits."""
    ranks = [noise(rank, 1001) for node in nodes for rank in node]
    expected, other = mean(ranks, nodes), mean(ranks[::-1], nodes)
    assert expected is not None
    assert other is not None
    assert not torch.equal(expected, other)
    for result in run_ranks(nodes, average, 1001, True):
        assert torch.equal(result, expected)


def average_by_default(groups: Groups) -> torch.Tensor:
    return average(groups, 1001, DenseSync().exact)


def test_sums_are_exact_by_default_on_three_nodes() -> None:
    """Gloo's all-reduce of three ranks adds in another order, which the ranks check first."""
    nodes = ((0,), (1,), (2,))
    expected = mean([noise(rank, 1001) for rank in range(3)], nodes)
    assert expected is not None
    assert not torch.equal(run_ranks(nodes, average, 1001, False)[0], expected)
    for result in run_ranks(nodes, average_by_default):
        assert torch.equal(result, expected)


def average_over_transports(groups: Groups) -> tuple[list[bytes], list[bytes], list[str]]:
    """Return means with and without `exact`, through shared memory and through Gloo, and the warnings of the latter."""
    assert groups.train.shm is not None
    over_gloo, messages = groups_without_shm(groups)
    assert over_gloo.train.shm is None
    means = [[average(g, 1001, exact).numpy().tobytes() for exact in (True, False)] for g in (groups, over_gloo)]
    over_gloo.close()
    return means[0], means[1], messages


@pytest.mark.parametrize("nodes", [((0, 1, 2),), ((0, 1, 2, 3),), ((0, 1), (2, 3))], ids=str)
def test_sums_do_not_depend_on_the_transport(nodes: Nodes) -> None:
    """Where descriptors have run out, ranks of a node use Gloo: the same bits, and one warning per node."""
    expected = mean([noise(rank, 1001) for node in nodes for rank in node], nodes)
    assert expected is not None
    for rank, (shared, gloo, messages) in enumerate(run_ranks(nodes, average_over_transports)):
        assert shared == gloo
        assert shared[0] == expected.numpy().tobytes()
        first = [node[0] for node in nodes]
        assert len(messages) == (rank in first)
        if messages:
            number = first.index(rank)
            assert messages[0].startswith(f"node {number} has no shared memory between its ranks (rank {rank} cannot")
            assert "Too many open files" in messages[0]


# ---- FrozenAdam


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_unfrozen_adam_equals_torch_adam(kind: str, decoupled: bool, maximize: bool) -> None:
    settings: dict[str, Any] = {"foreach": kind == "foreach", "fused": kind == "fused"}
    settings |= {"weight_decay": 0.02, "decoupled_weight_decay": decoupled, "maximize": maximize, "lr": 0.01}
    case = Case(11, DenseSync(), unused=True)
    nets = [Net(case), Net(case)]
    optimizers = [torch.optim.Adam(nets[0].parameters(), **settings), FrozenAdam(nets[1].parameters(), **settings)]
    for step, (net, optimizer) in itertools.product(range(6), zip(nets, optimizers, strict=True)):
        net.zero_grad()
        backward(case, net, 0, step)
        optimizer.step()
    for theirs, ours in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(theirs, ours)
        assert optimizers[0].state[theirs].keys() == optimizers[1].state[ours].keys()
        for name, value in optimizers[0].state[theirs].items():
            assert torch.equal(value, optimizers[1].state[ours][name])


@pytest.mark.parametrize("decoupled", [False, True])
def test_frozen_denominator_keeps_the_bias_correction_of_its_step(decoupled: bool) -> None:
    """In float64 against the formula: v of step 3 is divided by 1 - beta2^3 at all later steps."""
    lr, (beta1, beta2), eps, decay = 0.01, (0.9, 0.99), 1e-3, 0.1
    rng = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.randn(20, generator=rng, dtype=torch.float64))
    optimizer = FrozenAdam([x], lr, (beta1, beta2), eps, decay, decoupled_weight_decay=decoupled)
    y, m, v = x.detach().clone(), torch.zeros(20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    frozen, at, bound = None, 0, 0
    for t in range(1, 10):
        x.grad = torch.randn(20, generator=rng, dtype=torch.float64)
        g = x.grad + (0 if decoupled else decay * y)
        y = y * (1 - lr * decay) if decoupled else y
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        v_hat = v / (1 - beta2**t)
        if frozen is not None:  # the mean over four ranks is at least a quarter of each
            bound += int((v_hat / 4 > frozen / (1 - beta2**at)).sum())
            v_hat = torch.maximum(frozen / (1 - beta2**at), v_hat / 4)
        y = y - lr * (m / (1 - beta1**t)) / (v_hat.sqrt() + eps)
        optimizer.step()
        torch.testing.assert_close(x.detach(), y, rtol=1e-12, atol=1e-12)
        if t in (3, 6):
            moment = torch.rand(20, generator=rng, dtype=torch.float64) * 0.02
            optimizer.freeze(x, moment, 4, monotonic=frozen is not None)
            frozen, at = torch.maximum(frozen, moment) if frozen is not None else moment, t
        torch.testing.assert_close(optimizer.state[x]["exp_avg_sq"], v, rtol=1e-12, atol=1e-12)
    assert 10 < bound < 110  # of 120


def test_a_parameter_with_its_first_step_is_not_frozen_with_the_others() -> None:
    early, late, separate = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    ours, theirs = FrozenAdam([early, late]), torch.optim.Adam([separate])
    early.grad = torch.ones(3)
    ours.step()
    with pytest.raises(ValueError, match="has no second moment yet"):
        ours.freeze(late, torch.ones(3), 2)
    ours.freeze(early, torch.full((3,), 100.0), 2)
    calls: list[int] = []
    ours.register_step_post_hook(lambda *_: calls.append(1))
    late.grad, separate.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
    before = early.detach().clone()
    ours.step()
    theirs.step()
    assert torch.equal(late, separate)
    assert len(calls) == 1
    assert (before - early).abs().max() < 1e-4 < (1 - late.detach()).abs().min()


def test_v_frozen_requires_frozen_adam_and_all_parameters(single_rank: Groups) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"requires thermocline.FrozenAdam, not Adam"):
        DenseParameters.make([x], torch.optim.Adam([x]), single_rank, DenseSync(every=2))
    y = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="1 of 2 parameters are in no optimizer"):
        DenseParameters.make([x, y], FrozenAdam([x]), single_rank, DenseSync(every=2))


def test_periodic_averaging_accepts_any_optimizer(single_rank: Groups) -> None:
    """With one rank a merge changes nothing."""
    case = Case(2, DenseSync(every=2, merge="all"))
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop):
        nets = [Net(case), Net(case)]
        first, second = (kind(net.parameters(), lr=0.1) for net in nets)  # type: ignore[operator]
        sync = DenseParameters.make(nets[0].parameters(), first, single_rank, dataclasses.replace(case).sync)
        for step in range(1, 6):
            for net in nets:
                net.zero_grad(set_to_none=False)
                backward(case, net, 0, step)
            nets[1].never.grad = torch.zeros(3)
            sync.after_backward()
            first.step()
            second.step()
            assert sync.after_step(step) == (step % 2 == 0)
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_pending_merge_survives_saving_and_loading(single_rank: Groups) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = FrozenAdam([x])
    syncs = [DenseParameters.make([x], optimizer, single_rank, DenseSync(every=2)) for _ in range(3)]
    for step in range(1, 4):
        syncs[0].after_backward()
        optimizer.step()
        assert syncs[0].after_step(step) == (step in (1, 2))
    syncs[1].load_state_dict(syncs[0].state_dict())
    assert [sync.merge_now() for sync in syncs] == [True, True, False]
    syncs[2].load_state_dict(syncs[1].state_dict())
    assert not syncs[2].merge_now()


@pytest.mark.parametrize("every", [1, 2])
def test_a_model_without_dense_parameters_averages_nothing(single_rank: Groups, every: int) -> None:
    sync = DenseParameters.make([], [], single_rank, DenseSync(every=every))
    sync.begin()
    for step in range(1, 5):
        sync.after_backward()
        assert not sync.after_step(step)
    assert not sync.merge_now()


def test_another_number_of_ranks_starts_with_the_mean_moments() -> None:
    """Three ranks saved, with equal models and denominators: the mean of their models moves as it would have."""
    rng = torch.Generator().manual_seed(1)
    start, merged = torch.randn(30, generator=rng), torch.rand(30, generator=rng) + 50
    ranks = [torch.nn.Parameter(start.clone()) for _ in range(4)]
    optimizers = [FrozenAdam([x], lr=0.01) for x in ranks]
    mean = TensorMean()
    for x, optimizer in zip(ranks[:3], optimizers[:3], strict=True):
        for _ in range(4):
            x.grad = torch.randn(30, generator=rng)
            optimizer.step()
        optimizer.freeze(x, merged, 3)
        with torch.no_grad():
            x.copy_(start)
        saved: dict[str, torch.Tensor] = {}
        tree = state_tree.pack(copy.deepcopy(optimizer.state_dict()), saved, "adam")
        mean.add(0, saved)
    loaded = state_tree.unpack(tree, mean.result())
    one = without_frozen_state({"kind": "FrozenAdam", "state": loaded})["state"]
    assert loaded["state"][0].keys() - one["state"][0].keys() == set(FROZEN_STATE)
    assert torch.equal(loaded["state"][0]["v_hat"], merged)
    saved_v = torch.stack(
        [optimizer.state[x]["exp_avg_sq"] for x, optimizer in zip(ranks[:3], optimizers[:3], strict=True)]
    )
    torch.testing.assert_close(loaded["state"][0]["exp_avg_sq"], saved_v.mean(0), rtol=1e-6, atol=0)
    optimizers[3].load_state_dict(loaded)
    gradients = [torch.randn(30, generator=rng) for _ in range(3)]
    for x, gradient, optimizer in zip(ranks, [*gradients, sum(gradients) / 3], optimizers, strict=True):
        x.grad = gradient
        optimizer.step()
        assert (x.detach() - start).abs().max() > 1e-5
    mean_model = torch.stack([x.detach() for x in ranks[:3]]).mean(0)
    torch.testing.assert_close(ranks[3].detach(), mean_model, rtol=0, atol=1e-6)


def test_mean_of_saved_tensors() -> None:
    """Ranks of a node are added first, then nodes; equal tensors stay unchanged; integers are those of rank 0."""
    nodes = ((0, 1, 2), (3, 4))
    ranks = [
        {"x": noise(rank, 99), "half": noise(rank, 9).bfloat16(), "same": noise(7, 9), "steps": torch.tensor(rank)}
        for rank in range(5)
    ]
    total = TensorMean()
    for node, members in enumerate(nodes):
        for rank in members:
            total.add(node, {**ranks[rank]})
    result, expected = total.result(), mean([rank["x"] for rank in ranks], nodes)
    halves = mean([rank["half"].float() for rank in ranks], nodes)
    assert expected is not None
    assert halves is not None
    assert torch.equal(result["x"], expected)
    assert torch.equal(result["half"], halves.bfloat16())
    assert torch.equal(result["same"], ranks[0]["same"])
    assert int(result["steps"]) == 0
    with pytest.raises(ValueError, match="extra has shape"):
        total.add(1, {**ranks[0], "extra": torch.zeros(1)})


def average_without_begin(groups: Groups) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(groups.topology.rank)))
    sync = DenseParameters.make([parameter], [], groups, DenseSync())
    with pytest.raises(RuntimeError, match=r"different dense parameters: call begin\(\)"):
        sync.after_backward()
    sync.begin()
    parameter.grad = torch.ones(3)
    sync.after_backward()
    assert parameter.tolist() == [0.0] * 3


def test_gradients_of_different_models_are_not_averaged() -> None:
    """Without `begin` every rank would train its own model on the mean gradient."""
    run_ranks(((0, 1),), average_without_begin)
