"""Models merged every k steps: as a simulation of all ranks in one process, bit for bit; what a merge sends."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.dense import STEADY, Case, Net, Nodes, assert_same, assert_simulated, rare, steady, train, tug
from helpers.ranks import play

from thermocline.config.dense_sync import DenseSync, Merge
from thermocline.distributed.communicator import Groups
from thermocline.distributed.dense_sync import DenseParameters
from thermocline.distributed.frozen_adam import FrozenAdam
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
def alone() -> Iterator[Groups]:
    groups = Groups.make(Topology.alone())
    yield groups
    groups.close()


def cases_of(seed: int, *, exact: bool) -> list[Case]:
    """Every way, with everything else at random."""
    rng = random.Random(seed)
    out = []
    for k in (1, 2, 3) if exact else (2,):
        for merge in MERGES:
            sync = DenseSync(
                every=k, merge=merge, exact=exact,
                amsgrad=merge == "v_frozen" and rng.random() < 0.5,
                every_v=rng.choice((None, 2, 4)) if merge != "params" else None,
                every_m=rng.choice((None, 2, 3)) if merge == "all" else None,
            )  # fmt: skip
            out.append(
                Case(
                    rng.randrange(10**6), sync, norm=exact and rng.random() < 0.5, idle=rng.random() < 0.5,
                    merge_at=tuple(rng.sample(range(1, 7), rng.randrange(3))), decay=rng.choice((0.0, 0.01)),
                )
            )  # fmt: skip
    return out


@pytest.mark.parametrize("world", WORLDS)
def test_merging_is_the_simulation(world: str) -> None:
    """Bit for bit if `exact`; torch's own reductions have an order of their own."""
    assert_simulated(
        WORLDS[world], [case for exact in (True, False) for case in cases_of(sum(map(ord, world)), exact=exact)]
    )


def test_a_checkpoint_between_merges_resumes_bit_for_bit() -> None:
    """Whoever saves merges, so the run that never stopped merges there too."""
    ways = [DenseSync(every=3, merge=merge, exact=True) for merge in MERGES]
    stopped = [Case(at, sync, steps=9, norm=True, save_at=at) for at in (1, 4, 6) for sync in ways]
    never = [dataclasses.replace(case, save_at=0, merge_at=(case.save_at,)) for case in stopped]
    for rank, results in enumerate(play(WORLDS["2 nodes"], train, stopped + never)):
        for n, case in enumerate(stopped):
            assert_same(results[n][0], results[n + len(stopped)][0], (rank, case))


def test_what_merges_leave_to_each_rank() -> None:
    """After "all", nothing; otherwise its moments."""
    cases = [Case(3, DenseSync(every=1, merge=merge, exact=True)) for merge in MERGES]
    one, two = play(WORLDS["2 nodes"], train, cases)
    for case, (mine, *_), (theirs, *_) in zip(cases, one, two, strict=True):
        differ = {name.split("/")[1] for name, value in mine.items() if not torch.equal(value, theirs[name])}
        assert differ == (set() if case.sync.merge == "all" else {"exp_avg", "exp_avg_sq"})


def test_bytes_between_nodes_are_the_merged_tensors_over_k() -> None:
    steps, nodes = 12, WORLDS["2 x 2"]
    ways: list[dict[str, Any]] = [{}, {"every": 4, "merge": "params"}, {"every": 4, "merge": "all"}, {"every": 4}]
    cases = [Case(7, DenseSync(exact=exact, **way), steps) for exact in (True, False) for way in ways]
    parameters = list(Net(cases[0]).parameters())
    numbers = sum(parameter.numel() for parameter in parameters)

    def padded(count: int) -> int:
        return -(-count // 4) * 4 * 4

    # v_frozen: after steps 1 and 2, then every 4.
    merged = 2 * [(numbers + len(parameters), steps), (numbers, 3), (3 * numbers, 3), (2 * numbers, 2 + 3)]
    for results in play(nodes, train, cases):
        for (_, within, between), (count, times) in zip(results, merged, strict=True):
            # Half of the buffer to the other rank of the node and back; a half of a half to the other node and back.
            assert within == padded(count) * times, (count, times)
            assert between == padded(count) // 2 * times, (count, times)


@pytest.mark.parametrize("k", [2, 5, 50])
def test_a_frozen_denominator_that_has_seen_nothing_does_not_diverge(k: int) -> None:
    """Most features are in no example of the first steps: their merged v is 0, and eps is no denominator."""
    one, two = play(WORLDS["2 nodes"], rare, [DenseSync(every=k, merge=merge) for merge in MERGES])
    assert one == two
    assert max(one) < 0.4  # 0.69 at the start; with v_hat alone nan


def test_a_merged_denominator_that_is_up_to_date_is_taken_as_it_is() -> None:
    """The bound is for what a merge could not know. It has no part in a steady v, whatever shares of it ranks have."""
    gradients = torch.tensor(STEADY)
    found, _ = play(WORLDS["2 nodes"], steady, DenseSync(every=5), 50)
    first, later = gradients.sign().mean(0), gradients.mean(0) / gradients.square().mean(0).sqrt()
    torch.testing.assert_close(found, 1 - 0.01 * (first + 49 * later), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("every", "every_v"), [(1, None), (2, None), (3, None), (8, None), (50, None), (6, 20), (20, 3)]
)
def test_when_models_are_merged(alone: Groups, every: int, every_v: int | None) -> None:
    """More often in the first k steps, by as many merges as k can be halved."""
    x = torch.nn.Parameter(torch.ones(3))
    for merge in MERGES:
        optimizer = FrozenAdam([x])
        sync = DenseSync(every=every, merge=merge, every_v=None if merge == "params" else every_v)
        dense = DenseParameters.make([x], optimizer, alone, sync)
        found = set()
        for step in range(1, 201):
            dense.after_backward()
            optimizer.step()
            if dense.after_step(step):
                found.add(step)
        expected = set()
        for k in {every, sync.every_v or every}:
            expected |= set(range(k, 201, k))
            if merge == "v_frozen":
                expected |= {step for step in (1, 2, 4, 8, 16, 32) if step < k}
        assert found == expected


def test_ranks_with_second_moments_of_their_own_go_the_wrong_way() -> None:
    """One rank's gradient is a hundred times the others': divided by a v of its own, it is one vote of three.

    The minimum of the mean is at 2 / 102. The start is 0.5, where the loss is a quarter of that at 1."""
    one, *others = play(((0, 1, 2),), tug, [DenseSync(every=5, merge=merge) for merge in MERGES])
    assert others == [one, one]
    frozen, everything, astray = one
    assert abs(frozen - 2 / 102) < 0.1
    assert abs(everything - 2 / 102) < 0.1
    assert astray > 0.8


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"every": 0}, "dense_sync.every is 0"),
        ({"merge": "some"}, "dense_sync.merge is 'some'"),
        ({"every_m": 2}, "dense_sync.every_m is 2"),
        ({"every": 2, "every_v": 0}, "dense_sync.every_v is 0"),
        ({"merge": "params", "every_v": 2}, "dense_sync.every_v is 2"),
        ({"merge": "all", "amsgrad": True}, "dense_sync.amsgrad is True"),
        ({"bucket": 0}, "dense_sync.bucket"),
    ],
)
def test_settings_name_what_is_wrong(bad: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DenseSync(**bad)  # type: ignore[arg-type]
