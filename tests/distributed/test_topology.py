"""Topology from the facts of all ranks, a file and the driver; relayed all-to-all; NUMA binding."""

from __future__ import annotations

import itertools
import json
import os
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks

import thermocline as tc
from thermocline.distributed.communicator import Groups
from thermocline.distributed.launch import bind_to_numa, choose_numa, decide_job, pci_bus_id
from thermocline.distributed.link_relay import relayed_all_to_all
from thermocline.distributed.topology import Topology, parse_nvlink_matrix
from thermocline.utils.cpu_affinity import numa_nodes, pci_numa_node

TWO_BY_TWO = ((0, 1), (2, 3))


def facts(*machines: int, gpus: int = 0) -> list[Any]:
    """Return the facts of all ranks of machines with the given numbers of ranks."""
    return [
        {"local_rank": rank, "local_world": size, "gpus": gpus, "gpu_links": None}
        for size in machines
        for rank in range(size)
    ]


def test_rank_0_decides_on_the_nodes() -> None:
    """Machines may have different numbers of ranks; ranks without torchrun's local numbers are one machine."""
    decision = decide_job(facts(3, 3), None)
    assert decision == {"nodes": ((0, 1, 2), (3, 4, 5)), "links": None, "numa": None, "gpu": False}
    topology = Topology.from_json(json.loads(json.dumps(decision)), 4)
    assert topology == Topology(6, 4, ((0, 1, 2), (3, 4, 5)))
    assert (topology.node, topology.local_rank, topology.peers, topology.is_uniform) == (1, 1, (1, 4), True)
    assert topology.node_of == (0, 0, 0, 1, 1, 1)
    assert decide_job(facts(3, 4, 1), None)["nodes"] == ((0, 1, 2), (3, 4, 5, 6), (7,))
    alone = [{"local_rank": None, "local_world": None, "gpus": 0, "gpu_links": None}] * 3
    assert decide_job(alone, None)["nodes"] == ((0, 1, 2),)


def test_inconsistent_facts_are_one_error() -> None:
    wrong = facts(2, 2)
    wrong[3]["local_world"] = 3
    message = "rank 3 has LOCAL_RANK 1 and LOCAL_WORLD_SIZE 3, but rank 2 is the first of 2 ranks of a machine: number"
    assert decide_job(wrong, None)["error"].startswith(message)
    assert "rank 2 is the first of 3 ranks" in decide_job(facts(2, 3)[:-1], None)["error"]
    assert decide_job([*facts(2), {"error": "LOCAL_RANK is 'x'"}], None) == {"error": "rank 2: LOCAL_RANK is 'x'"}


def test_nccl_is_used_by_all_ranks_or_by_none() -> None:
    assert decide_job(facts(2, 2, gpus=2), None)["gpu"] is True
    mixed = [*facts(2, gpus=2), *facts(2, gpus=1)]
    with pytest.warns(RuntimeWarning, match=r"ranks \[2, 3\] have no GPU of their own: all ranks exchange rows"):
        assert decide_job(mixed, None)["gpu"] is False
    assert decide_job(facts(2, 2), None)["gpu"] is False


def test_links_of_all_machines_are_known_to_all_ranks() -> None:
    """A machine whose driver does not report links counts as fully linked."""
    observed = facts(3, 2, 3, gpus=4)
    assert decide_job(observed, None)["links"] is None
    observed[0]["gpu_links"] = [(0, 1), (1, 2)]
    links = [(0, 1), (1, 2), (3, 4), (5, 6), (5, 7), (6, 7)]
    decision = decide_job(observed, None)
    assert decision["links"] == links
    assert Topology.from_json(decision, 7).relaying_nodes == {0}


def test_rank_0_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text("nodes = [[0, 1], [2]]\nlinks = [[0, 1]]")
    assert decide_job(facts(3), str(path)) == {"nodes": ((0, 1), (2,)), "links": [(0, 1)], "numa": None, "gpu": False}
    assert "has 3 ranks, but WORLD_SIZE is 4: start 3 ranks" in decide_job(facts(4), str(path))["error"]
    assert "cannot read the topology" in decide_job(facts(3), str(tmp_path / "none.toml"))["error"]


def join_with_environment(groups: Groups, environments: list[dict[str, str]]) -> Any:
    """Join as torchrun would start this rank. Returns the topology and the mean over ranks, or the error."""
    rank = groups.topology.rank
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(groups.topology.world), **environments[rank]}
    start = time.monotonic()
    try:
        with tc.join_ranks(tc.Dist(timeout=30.0, bind=False)) as joined:
            for hops in ("flat", "two"):
                table = tc.ShardedTable(4, tc.SGD(lr=0.1), groups=joined, mem="1MB", threads=1, hops=hops, name=hops)
                table.close()
        return joined.topology.nodes
    except tc.ConfigError as error:
        return str(error), time.monotonic() - start < 25


def test_unequal_machines_are_refused_on_every_rank_by_two_hops_only() -> None:
    """All ranks have the same topology; "flat" works, "two" is one error on each rank, long before the timeout."""
    sizes = [(0, 2), (1, 2), (0, 1)]
    environments = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)} for rank, size in sizes]
    outcomes = run_ranks(((0, 1), (2,)), join_with_environment, environments)
    message = 'dist.hops is "two", but the nodes have [2, 1] ranks: start the same number on each, or set "flat"'
    assert outcomes == [(message, True)] * 3


def test_an_environment_error_of_one_rank_is_raised_by_all() -> None:
    environments = [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"} for rank in ("0", "one")]
    outcomes = run_ranks(((0, 1),), join_with_environment, environments)
    message = "rank 1: LOCAL_RANK is 'one' in the environment: it must be a number, as torchrun sets it"
    assert outcomes == [(message, True)] * 2


def test_from_file(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "t.toml", tmp_path / "t.json"
    toml.write_text("nodes = [[0, 1], [2, 3]]\nlinks = [[1, 0]]\nnuma = [0, 1, 0, 1]\n")
    as_json.write_text(json.dumps({"nodes": TWO_BY_TWO, "links": [[0, 1]], "numa": [0, 1, 0, 1]}))
    expected = Topology(4, 2, TWO_BY_TWO, frozenset({(0, 1)}), (0, 1, 0, 1))
    assert Topology.from_file(toml, 2) == Topology.from_file(as_json, 2) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"requires nodes ="),
        ("nodes = [[0, 2], [1]]", "in order"),
        ("nodes = [[0], []]", "no node may be empty"),
        ("nodes = [[0, 1]]\nlinks = [[0, 2]]", "must join two different ranks of one node"),
        ("nodes = [[0], [1]]\nlinks = [[0, 1]]", "must join two different ranks of one node"),
        ("nodes = [[0, 1]]\nnuma = [0]", "numa has 1 entries"),
        ("nodes = 3", "must be lists of numbers"),
        ("nodes = [[0]]\nspeed = 1", "the only optional keys are links and numa"),
        ("nodes = ", "cannot read the topology"),
    ],
)
def test_invalid_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(tc.ConfigError, match=message) as error:
        Topology.from_file(path, 0)
    assert str(path) in str(error.value)


# ---- links

RING = frozenset({(0, 1), (1, 2), (2, 3), (0, 3)})
"""Four GPUs in a ring: 0-2 and 1-3 have no link."""


def test_next_hop() -> None:
    ring = Topology(4, 0, ((0, 1, 2, 3),), RING)
    for a, b in itertools.product(range(4), repeat=2):
        relay = ring.next_hop(a, b)
        assert ring.is_linked(a, relay)
        assert ring.is_linked(relay, b)
        assert (relay == b) == ring.is_linked(a, b)
    assert ring.next_hop(0, 2) != ring.next_hop(1, 3)  # pairs are spread over the relays
    assert ring.relaying_nodes == {0}
    assert Topology(
        6, 0, ((0, 1), (2, 3, 4, 5)), frozenset({(0, 1), (2, 3), (3, 4), (4, 5), (2, 5)})
    ).relaying_nodes == {1}
    assert not Topology(4, 0, ((0, 1, 2, 3),)).relaying_nodes
    unlinked = Topology(3, 0, ((0, 1, 2),), frozenset({(0, 1)}))
    assert unlinked.next_hop(0, 2) == 2  # no rank is linked with both


@pytest.mark.parametrize("links", [RING, frozenset({(0, 1), (1, 2), (1, 3)}), None, frozenset()], ids=str)
def test_relayed_all_to_all(links: Any) -> None:
    """All ranks of a node in one process: every message arrives as if sent directly, and no slow pair carries any."""
    size = 4
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 4, (size, size)).tolist()
    data = [torch.tensor([100 * a + 10 * b + i for b in range(size) for i in range(sizes[a][b])]) for a in range(size)]
    topologies = [Topology(size, a, (tuple(range(size)),), links) for a in range(size)]
    rounds: list[dict[int, Any]] = [{}, {}]

    def run(last: int) -> list[Any]:
        """Run every rank up to round `last`, with the messages of earlier rounds from previous calls."""
        results: list[Any] = []
        for a in range(size):
            numbers = iter(range(2))

            def exchange(values: torch.Tensor, sends: list[int], receives: list[int], a: int = a) -> torch.Tensor:
                number = next(numbers)  # noqa: B023
                rounds[number][a] = list(torch.split(values, sends))
                if number >= last:
                    raise StopIteration
                received = [rounds[number][other][a] for other in range(size)]
                assert [len(part) for part in received] == receives
                return torch.cat(received)

            try:
                results.append(relayed_all_to_all(topologies[a], data[a], sizes, exchange))
            except StopIteration:
                results.append(None)
        return results

    run(0)
    run(1)
    for b, (values, _) in enumerate(run(2)):
        assert values.tolist() == [100 * a + 10 * b + i for a in range(size) for i in range(sizes[a][b])]
    for sent, (a, b) in itertools.product(rounds, itertools.product(range(size), repeat=2)):
        t = topologies[a]
        no_relay = t.next_hop(a, b) == b and not t.is_linked(a, b)
        assert t.is_linked(a, b) or no_relay or len(sent[a][b]) == 0


def test_parse_nvlink_matrix() -> None:
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV12\tSYS\tNV4\tPIX\t0-31\t0\t\tN/A\n"
        "GPU1\tNV12\t X \tNV4\tSYS\tSYS\t0-31\t0\t\tN/A\n"
        "GPU2\tSYS\tNV4\t X \tNV12\tNODE\t32-63\t1\t\tN/A\n"
        "GPU3\tNV4\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\tNODE\tSYS\t X \n\nLegend:\n\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )
    assert parse_nvlink_matrix(matrix, (4, 5, 6, 7)) == {(4, 5), (5, 6), (6, 7), (4, 7)}
    assert parse_nvlink_matrix(matrix, (0, 1)) == {(0, 1)}
    assert parse_nvlink_matrix(matrix.replace("NV12", "PHB").replace("NV4", "PHB"), (0, 1, 2, 3)) is None
    assert parse_nvlink_matrix("", (0,)) is None


# ---- NUMA


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a /sys with two NUMA nodes with cores and one without, and GPUs on node 1, an unknown node and node 7."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for number, cores in enumerate(["0-1,8", "2-3", ""]):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for bus, node in (("3b", 1), ("5e", -1), ("86", 7)):
        folder = tmp_path / f"bus/pci/devices/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_numa(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = numa_nodes(sysfs)
    assert nodes == {0: {0, 1, 8}, 1: {2, 3}}
    ranks = [Topology(8, rank, ((0, 1, 2, 3), (4, 5, 6, 7))) for rank in range(8)]
    assert [choose_numa(t, nodes) for t in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [choose_numa(Topology(2, rank, ((0, 1),), numa=(1, None)), nodes, 0) for rank in range(2)] == [1, None]
    assert choose_numa(ranks[0], {0: {0}}) is None
    bound: list[Any] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: bound.append(cores))
    assert bind_to_numa(ranks[3], None, sysfs) == {2}
    assert bind_to_numa(Topology.single(), None, sysfs) == {0, 1}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5})
    assert bind_to_numa(ranks[3], None, sysfs) is None
    assert bound == [{2}, {0, 1}]


def test_a_rank_is_bound_to_the_numa_node_of_its_gpu(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's GPU is on node 1. If the system does not state the node, or has no such node, ranks are in blocks."""
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert pci_bus_id(properties) == "0000:3b:00.0"
    gpus = ["0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0", "0000:ff:00.0"]
    assert [pci_numa_node(gpu, sysfs) for gpu in gpus] == [1, None, 7, None]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: None)
    first = Topology(4, 0, ((0, 1, 2, 3),))
    assert [bind_to_numa(first, gpu, sysfs) for gpu in gpus] == [{2, 3}, {0, 1, 8}, {0, 1, 8}, {0, 1, 8}]
