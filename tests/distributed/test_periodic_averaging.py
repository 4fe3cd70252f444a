"""Periodic averaging equals a simulation in one process bit for bit; merge steps, traffic, convergence."""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.dense import (
    CONSTANT_GRADIENTS,
    Case,
    Net,
    assert_matches_simulation,
    assert_same,
    train,
    train_constant_gradients,
    train_sparse_features,
    train_unequal_curvature,
)
from helpers.ranks import Nodes, run_ranks

import thermocline as tc
from thermocline.config.dense_sync import DenseSync, Merge
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters, PeriodicAveraging
from thermocline.distributed.frozen_adam import FrozenAdam
from thermocline.distributed.hierarchical_allreduce import HierarchicalAllReduce
from thermocline.distributed.topology import Topology

MERGES: tuple[Merge, ...] = ("v_frozen", "all", "params")
WORLDS: dict[str, Nodes] = {
    "1": ((0,),),
    "2 in one node": ((0, 1),),
    "2 nodes": ((0,), (1,)),
    "2 x 2": ((0, 1), (2, 3)),
    "2 and 1": ((0, 1), (2,)),
}


@pytest.fixture
def single_rank() -> Iterator[Groups]:
    groups = Groups.make(Topology.single())
    yield groups
    groups.close()


def random_cases(seed: int, *, exact: bool) -> list[Case]:
    """Return a case for every merge mode and several k, with all other settings at random."""
    rng = random.Random(seed)
    cases = []
    for k in (1, 2, 3) if exact else (2,):
        for merge in MERGES:
            sync = DenseSync(
                every=k, merge=merge, exact=exact,
                amsgrad=merge == "v_frozen" and rng.random() < 0.5,
                every_v=rng.choice((None, 2, 4)) if merge != "params" else None,
                every_m=rng.choice((None, 2, 3)) if merge == "all" else None,
            )  # fmt: skip
            cases.append(
                Case(
                    rng.randrange(10**6), sync, batch_norm=exact and rng.random() < 0.5, unused=rng.random() < 0.5,
                    merge_at=tuple(rng.sample(range(1, 7), rng.randrange(3))), decay=rng.choice((0.0, 0.01)),
                    evaluate_at=tuple(rng.sample(range(1, 7), rng.randrange(3))), save_at=rng.randrange(4),
                )
            )  # fmt: skip
    return cases


@pytest.mark.parametrize("world", WORLDS)
def test_periodic_averaging_equals_the_simulation(world: str) -> None:
    """Bit for bit if `exact`; torch's reductions add in another order."""
    assert_matches_simulation(
        WORLDS[world], [case for exact in (True, False) for case in random_cases(sum(map(ord, world)), exact=exact)]
    )


@pytest.mark.parametrize("nodes", [((0,), (1,), (2,)), ((0, 1, 2), (3, 4, 5))], ids=str)
def test_averaging_between_nodes_equals_the_simulation(nodes: Nodes) -> None:
    """Gradients averaged within the node every step, models merged between nodes; saved, loaded and evaluated."""
    cases = random_cases(len(nodes), exact=True)[:6]
    assert_matches_simulation(
        nodes, [dataclasses.replace(case, sync=dataclasses.replace(case.sync, scope="nodes")) for case in cases]
    )


def test_a_checkpoint_between_merges_resumes_bit_for_bit() -> None:
    """A rank that saves, loads and evaluates has the tensors of one that does not."""
    settings = [DenseSync(every=3, merge=merge, exact=True) for merge in MERGES]
    stopped = [
        Case(at, sync, steps=9, batch_norm=True, save_at=at, evaluate_at=(at - 1, at, 5)) for at in (1, 4, 6)
        for sync in settings
    ]  # fmt: skip
    uninterrupted = [dataclasses.replace(case, save_at=0, evaluate_at=()) for case in stopped]
    for rank, results in enumerate(run_ranks(WORLDS["2 nodes"], train, stopped + uninterrupted)):
        for n, case in enumerate(stopped):
            expected = results[n + len(stopped)][0]
            assert_same({name: results[n][0][name] for name in expected}, expected, (rank, case))


def test_state_that_differs_between_ranks_after_a_merge() -> None:
    """Nothing with merge "all"; the moments otherwise."""
    cases = [Case(3, DenseSync(every=1, merge=merge, exact=True)) for merge in MERGES]
    one, two = run_ranks(WORLDS["2 nodes"], train, cases)
    for case, (first, *_), (second, *_) in zip(cases, one, two, strict=True):
        differ = {name.split("/")[1] for name, value in first.items() if not torch.equal(value, second[name])}
        assert differ == (set() if case.sync.merge == "all" else {"exp_avg", "exp_avg_sq"})


def test_bytes_between_nodes_are_the_merged_tensors_over_k() -> None:
    steps, nodes = 12, WORLDS["2 x 2"]
    settings: list[dict[str, Any]] = [
        {}, {"every": 4, "merge": "params"}, {"every": 4, "merge": "all"}, {"every": 4}, {"every": 4, "scope": "nodes"},
    ]  # fmt: skip
    cases = [Case(7, DenseSync(exact=exact, **chosen), steps) for exact in (True, False) for chosen in settings]
    parameters = list(Net(cases[0]).parameters())
    total = sum(parameter.numel() for parameter in parameters)

    def padded(count: int) -> int:
        return -(-count // 4) * 4 * 4

    # v_frozen merges after steps 1 and 2, then every 4 steps.
    gradients = (total + len(parameters), steps)
    merged = 2 * [gradients, (total, 3), (3 * total, 3), (2 * total, 2 + 3), (2 * total, 2 + 3)]
    for results in run_ranks(nodes, train, cases):
        for case, (_, within, between), (count, times) in zip(cases, results, merged, strict=True):
            if case.sync.scope == "nodes":
                # Gradients as with k = 1, but within the node only; merged slices are only gathered within the node.
                assert within == padded(gradients[0]) * steps + padded(count) // 2 * times
                assert between == padded(count) // 2 * times
                continue
            # Half of the buffer to the other rank of the node and back; a quarter to the other node and back.
            assert within == padded(count) * times, (count, times)
            assert between == padded(count) // 2 * times, (count, times)


def test_features_absent_from_the_merged_steps_do_not_diverge() -> None:
    """Most features are in no example of the first steps: their merged v is 0, so v_hat alone would divide by eps."""
    settings = [DenseSync(every=k, merge=merge) for k in (2, 5, 50) for merge in MERGES]
    one, two = run_ranks(WORLDS["2 nodes"], train_sparse_features, settings)
    assert one == two
    for sync, loss in zip(settings, one, strict=True):
        assert loss < 0.4, sync  # 0.69 at the start; nan with v_hat alone


def test_the_lower_bound_does_not_change_a_current_denominator() -> None:
    """With constant gradients v_hat is current, so the bound v / n never applies, whatever the ranks' shares of v."""
    gradients = torch.tensor(CONSTANT_GRADIENTS)
    x, _ = run_ranks(WORLDS["2 nodes"], train_constant_gradients, DenseSync(every=5), 50)
    first, later = gradients.sign().mean(0), gradients.mean(0) / gradients.square().mean(0).sqrt()
    torch.testing.assert_close(x, 1 - 0.01 * (first + 49 * later), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("every", "every_v"), [(1, None), (2, None), (3, None), (8, None), (50, None), (6, 20), (20, 3)]
)
def test_merge_steps(single_rank: Groups, every: int, every_v: int | None) -> None:
    """v_frozen also merges after steps 1, 2, 4, ... below k. A second run of the same object begins again."""
    x = torch.nn.Parameter(torch.ones(3))
    for merge in MERGES:
        optimizer = FrozenAdam([x])
        sync = DenseSync(every=every, merge=merge, every_v=None if merge == "params" else every_v)
        dense = DenseParameters.make([x], optimizer, single_rank, sync)
        runs = []
        for _ in range(2):
            dense.begin()
            merged = set()
            for step in range(1, 201):
                dense.after_backward()
                optimizer.step()
                if dense.after_step(step):
                    merged.add(step)
            runs.append(merged)
        expected = set()
        for k in {every, sync.every_v or every}:
            expected |= set(range(k, 201, k))
            if merge == "v_frozen":
                expected |= {step for step in (1, 2, 4, 8, 16, 32) if step < k}
        assert runs == [expected, expected]


def test_merge_params_with_different_second_moments_diverges_from_the_minimum() -> None:
    """One rank's gradient is a hundred times the others': divided by its own v, it counts as one of three.

    The minimum of the mean is at 2 / 102. The start is 0.5, where the loss is a quarter of that at 1.
    """
    one, *others = run_ranks(
        ((0, 1, 2),), train_unequal_curvature, [DenseSync(every=5, merge=merge) for merge in MERGES]
    )
    assert others == [one, one]
    v_frozen, everything, params = one
    assert abs(v_frozen - 2 / 102) < 0.1
    assert abs(everything - 2 / 102) < 0.1
    assert params > 0.8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "dense_sync.every is 0"),
        ({"merge": "some"}, "dense_sync.merge is 'some'"),
        ({"every_m": 2}, "dense_sync.every_m is 2"),
        ({"every": 2, "every_v": 0}, "dense_sync.every_v is 0"),
        ({"merge": "params", "every_v": 2}, "dense_sync.every_v is 2"),
        ({"merge": "all", "amsgrad": True}, "dense_sync.amsgrad is True"),
        (
            {"scope": "nodes"},
            'dense_sync.scope is .nodes.: it must be "ranks", unless every is above 1 or merge is set',
        ),
        ({"bucket": 0}, "dense_sync.bucket"),
    ],
)
def test_invalid_settings_name_the_key(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DenseSync(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (((0, 1),), "but all 2 ranks are on one node"),
        (((0, 1), (2,)), "but the nodes have 2, 1 ranks: start the same number"),
    ],
)
def test_scope_nodes_needs_several_equal_nodes(nodes: Nodes, message: str) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    groups: Any = types.SimpleNamespace(topology=Topology(sum(map(len, nodes)), 0, nodes), train=None)
    with pytest.raises(tc.ConfigError, match=f'dist.dense_sync.scope is "nodes", {message}'):
        PeriodicAveraging([x], [], groups, DenseSync(every=2, scope="nodes"), HierarchicalAllReduce, [FrozenAdam([x])])
