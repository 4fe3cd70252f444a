"""Who runs where: from torchrun, from a file, from the driver; and whom a message goes through."""

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
from thermocline.distributed.relay import parse_links, relayed
from thermocline.distributed.topology import Topology

FOUR = ((0, 1), (2, 3))


def test_of_env() -> None:
    env = {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_WORLD_SIZE": "3"}
    found = Topology.of_env(env)
    assert found == Topology(6, 4, ((0, 1, 2), (3, 4, 5)))
    assert (found.node, found.local, found.peers, found.even) == (1, 1, (1, 4), True)
    assert found.node_of == (0, 0, 0, 1, 1, 1)
    assert Topology.of_env({}) == Topology.alone()
    with pytest.raises(tc.ConfigError, match="7 ranks cannot be nodes of 3"):
        Topology.of_env({**env, "WORLD_SIZE": "7"})
    with pytest.raises(tc.ConfigError, match="RANK is None"):
        Topology.of_env({"WORLD_SIZE": "2"})


def test_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    toml, as_json = tmp_path / "t.toml", tmp_path / "t.json"
    toml.write_text("nodes = [[0, 1], [2, 3]]\nlinks = [[1, 0]]\nnuma = [0, 1, 0, 1]\n")
    as_json.write_text(json.dumps({"nodes": FOUR, "links": [[0, 1]], "numa": [0, 1, 0, 1]}))
    expected = Topology(4, 2, FOUR, frozenset({(0, 1)}), (0, 1, 0, 1))
    assert Topology.of_file(toml, 2) == Topology.of_file(as_json, 2) == expected
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(tc.ConfigError, match=r"has 4 ranks, but WORLD_SIZE is 3"):
        Topology.of_file(toml, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needed is nodes"),
        ("nodes = [[0, 2], [1]]", "in order"),
        ("nodes = [[0], []]", "every node at least one"),
        ("nodes = [[0, 1]]\nlinks = [[0, 2]]", "two different ranks of one node"),
        ("nodes = [[0], [1]]\nlinks = [[0, 1]]", "two different ranks of one node"),
        ("nodes = [[0, 1]]\nnuma = [0]", "numa names 1 ranks"),
        ("nodes = 3", "lists of numbers"),
        ("nodes = [[0]]\nspeed = 1", "allowed beside it are links and numa"),
        ("nodes = ", "cannot be read"),
    ],
)
def test_files_that_are_wrong(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(tc.ConfigError, match=says) as error:
        Topology.of_file(path, 0)
    assert str(path) in str(error.value)


# ---- links

CUBE = frozenset({(0, 1), (1, 2), (2, 3), (0, 3)})
"""Four GPUs in a ring: 0-2 and 1-3 have no link."""


def test_relays() -> None:
    ring = Topology(4, 0, ((0, 1, 2, 3),), CUBE)
    for a, b in itertools.product(range(4), repeat=2):
        third = ring.relay(a, b)
        assert ring.linked(a, third)
        assert ring.linked(third, b)
        assert (third == b) == ring.linked(a, b)
    assert {ring.relay(0, 2), ring.relay(1, 3)} != {ring.relay(0, 2)}  # they take turns
    assert ring.relays
    assert not Topology(4, 0, ((0, 1, 2, 3),)).relays
    lonely = Topology(3, 0, ((0, 1, 2),), frozenset({(0, 1)}))
    assert lonely.relay(0, 2) == 2  # nobody has both links


@pytest.mark.parametrize("links", [CUBE, frozenset({(0, 1), (1, 2), (1, 3)}), None, frozenset()], ids=str)
def test_relayed_all_to_all(links: Any) -> None:
    """All ranks of a node played in one process: everything arrives as if sent directly, slow pairs carry nothing."""
    size = 4
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 4, (size, size)).tolist()
    data = [torch.tensor([100 * a + 10 * b + i for b in range(size) for i in range(sizes[a][b])]) for a in range(size)]
    topologies = [Topology(size, a, (tuple(range(size)),), links) for a in range(size)]
    rounds: list[dict[int, Any]] = [{}, {}]

    def play(upto: int) -> list[Any]:
        """Every rank as far as round `upto`; the messages of earlier rounds are known from before."""
        results: list[Any] = []
        for a in range(size):
            step = iter(range(2))

            def exchange(values: torch.Tensor, sends: list[int], receives: list[int], a: int = a) -> torch.Tensor:
                number = next(step)  # noqa: B023
                rounds[number][a] = list(torch.split(values, sends))
                if number >= upto:
                    raise StopIteration
                came = [rounds[number][other][a] for other in range(size)]
                assert [len(part) for part in came] == receives
                return torch.cat(came)

            try:
                results.append(relayed(topologies[a], data[a], sizes, exchange))
            except StopIteration:
                results.append(None)
        return results

    play(0)
    play(1)
    for b, (found, _) in enumerate(play(2)):
        assert found.tolist() == [100 * a + 10 * b + i for a in range(size) for i in range(sizes[a][b])]
    for sent, (a, b) in itertools.product(rounds, itertools.product(range(size), repeat=2)):
        t = topologies[a]
        helpless = t.relay(a, b) == b and not t.linked(a, b)
        assert t.linked(a, b) or helpless or len(sent[a][b]) == 0


def test_links_of_the_driver() -> None:
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV12\tSYS\tNV4\tPIX\t0-31\t0\t\tN/A\n"
        "GPU1\tNV12\t X \tNV4\tSYS\tSYS\t0-31\t0\t\tN/A\n"
        "GPU2\tSYS\tNV4\t X \tNV12\tNODE\t32-63\t1\t\tN/A\n"
        "GPU3\tNV4\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\tNODE\tSYS\t X \n\nLegend:\n\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    )
    assert parse_links(matrix, (4, 5, 6, 7)) == {(4, 5), (5, 6), (6, 7), (4, 7)}
    assert parse_links(matrix, (0, 1)) == {(0, 1)}
    assert parse_links(matrix.replace("NV12", "PHB").replace("NV4", "PHB"), (0, 1, 2, 3)) is None
    assert parse_links("", (0,)) is None


# ---- NUMA


def test_numa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for number, cores in enumerate(["0-1,8", "2-3", ""]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    nodes = numa_nodes(tmp_path)
    assert nodes == {0: {0, 1, 8}, 1: {2, 3}}
    ranks = [Topology.even_nodes(8, rank, 4) for rank in range(8)]
    assert [choose_numa(t, nodes) for t in ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [choose_numa(Topology(2, rank, ((0, 1),), numa=(1, None)), nodes) for rank in range(2)] == [1, None]
    assert choose_numa(ranks[0], {0: {0}}) is None
    bound: list[Any] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: bound.append(cores))
    assert bind_to_numa(ranks[3], tmp_path) == {2}
    assert bind_to_numa(Topology.alone(), tmp_path) == {0, 1}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5})
    assert bind_to_numa(ranks[3], tmp_path) is None
    assert bound == [{2}, {0, 1}]
