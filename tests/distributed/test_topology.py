"""Topology from torchrun, a file and the driver; relayed all-to-all; NUMA binding."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thermocline as tc
from thermocline.distributed.launch import bind_to_numa, choose_numa, numa_nodes
from thermocline.distributed.link_relay import relayed_all_to_all
from thermocline.distributed.topology import Topology, parse_nvlink_matrix

TWO_BY_TWO = ((0, 1), (2, 3))


def test_from_env() -> None:
    env = {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_WORLD_SIZE": "3"}
    topology = Topology.from_env(env)
    assert topology == Topology(6, 4, ((0, 1, 2), (3, 4, 5)))
    assert (topology.node, topology.local_rank, topology.peers, topology.is_uniform) == (1, 1, (1, 4), True)
    assert topology.node_of == (0, 0, 0, 1, 1, 1)
    assert Topology.from_env({}) == Topology.single()
    with pytest.raises(tc.ConfigError, match="7 ranks cannot be divided into nodes of 3"):
        Topology.from_env({**env, "WORLD_SIZE": "7"})
    with pytest.raises(tc.ConfigError, match="RANK is None"):
        Topology.from_env({"WORLD_SIZE": "2"})


def test_from_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    toml, as_json = tmp_path / "t.toml", tmp_path / "t.json"
    toml.write_text("nodes = [[0, 1], [2, 3]]\nlinks = [[1, 0]]\nnuma = [0, 1, 0, 1]\n")
    as_json.write_text(json.dumps({"nodes": TWO_BY_TWO, "links": [[0, 1]], "numa": [0, 1, 0, 1]}))
    expected = Topology(4, 2, TWO_BY_TWO, frozenset({(0, 1)}), (0, 1, 0, 1))
    assert Topology.from_file(toml, 2) == Topology.from_file(as_json, 2) == expected
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(tc.ConfigError, match=r"has 4 ranks, but WORLD_SIZE is 3"):
        Topology.from_file(toml, 2)


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
def test_invalid_files(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
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


def test_numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for number, cores in enumerate(["0-1,8", "2-3", ""]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    nodes = numa_nodes(tmp_path)
    assert nodes == {0: {0, 1, 8}, 1: {2, 3}}
    ranks = [Topology.uniform(8, rank, 4) for rank in range(8)]
    assert [choose_numa(t, nodes) for t in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [choose_numa(Topology(2, rank, ((0, 1),), numa=(1, None)), nodes) for rank in range(2)] == [1, None]
    assert choose_numa(ranks[0], {0: {0}}) is None
    bound: list[Any] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: bound.append(cores))
    assert bind_to_numa(ranks[3], tmp_path) == {2}
    assert bind_to_numa(Topology.single(), tmp_path) == {0, 1}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5})
    assert bind_to_numa(ranks[3], tmp_path) is None
    assert bound == [{2}, {0, 1}]
