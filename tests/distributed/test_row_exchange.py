"""What ranks send each other: every row from its owner, every gradient to it, nothing twice between nodes."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rank_training import tree
from helpers.ranks import Nodes, play

from thermocline.arrays import Keys
from thermocline.config.distributed import Wire
from thermocline.distributed.communicator import Groups
from thermocline.distributed.key_sharding import owner_of
from thermocline.distributed.row_exchange import Exchange, Route, Sent
from thermocline.distributed.row_reduce import take_rows
from thermocline.distributed.wire_format import decode, encode, width
from thermocline.embedding.key_hash import hash_keys
from thermocline.embedding.reference_codec import mix64

NODES: list[Nodes] = [((0, 1), (2, 3)), ((0, 1, 2),), ((0,), (1,), (2,))]
DIM = 5


def keys_of(rank: int, batch: int) -> Keys:
    """Unique, many of them on several ranks; none at all in some batches."""
    rng = np.random.default_rng([rank, batch])
    count = 0 if (rank + batch) % 5 == 4 else int(rng.integers(1, 60))
    return rng.permutation(90)[:count].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def row_of(keys: Keys) -> torch.Tensor:
    """Says whose row it is."""
    return torch.from_numpy((hash_keys(keys) >> np.uint64(40)).astype(np.float32))[:, None] * torch.arange(1, DIM + 1)


def gradient_of(rank: int, keys: Keys) -> torch.Tensor:
    """Of sizes so different that the order of sums shows."""
    rng = np.random.default_rng(rank)
    return row_of(keys) * float(10.0 ** rng.integers(-4, 4)) * (1.0 + 1e-3 * rank)


def fetched(exchange: Exchange, groups: Groups, route: Route, sent: Sent) -> torch.Tensor:
    rows = torch.full((len(route.keys), DIM + 2), -1.0)
    give = functools.partial(take_rows, row_of(route.owned).contiguous())
    exchange.rows(groups.train, route, give, rows[:, :DIM], sent, step=3)
    assert bool((rows[:, DIM:] == -1).all())
    return rows[:, :DIM].clone()


def exchange_all(groups: Groups, hops: Any, wire: Wire = "fp32", shared: bool = True) -> Any:
    """`shared`: through the memory that ranks of a node share, or by Gloo like the rest."""
    t = groups.topology
    assert (groups.train.box is None) == (len(t.nodes[t.node]) == 1)
    if not shared:
        for comm in (groups.train, groups.ahead, groups.read):
            comm.box = None
    exchange = Exchange(t, hops=hops, wire=wire)
    batches = [keys_of(t.rank, b) for b in range(3)]
    routes = exchange.plan(groups.ahead, batches, exchange.traffic.keys)
    found = []
    for keys, route in zip(batches, routes, strict=True):
        assert (owner_of(route.owned, t.world) == t.rank).all()
        rows = fetched(exchange, groups, route, exchange.traffic.rows)
        present = torch.from_numpy(keys % np.uint64(7) != 0)  # this rank has no gradient for the others
        sums, has = exchange.gradients(
            groups.train, route, gradient_of(t.rank, keys), present, exchange.traffic.gradients, step=3
        )
        found.append((rows, dict(zip(route.owned[has.numpy()].tolist(), sums[has], strict=True))))
    joined = exchange.joined(routes)
    rows = fetched(exchange, groups, joined, Sent())
    assert torch.equal(rows, row_of(joined.keys)) or wire != "fp32"
    return found, exchange.traffic


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_rows_and_sums(nodes: Nodes) -> None:
    """Against the tree, key by key; two hops and one give the same; every byte is accounted for."""
    world = sum(map(len, nodes))
    node_of = [number for number, node in enumerate(nodes) for _ in node]
    two, flat = (play(nodes, exchange_all, hops) for hops in ("two", "flat"))
    sockets = play(nodes, exchange_all, "two", "fp32", False)
    for b in range(3):
        lists = [keys_of(rank, b) for rank in range(world)]
        for found, _ in (*two, *flat, *sockets):
            assert len(found) == 3
        for results in (two, flat, sockets):
            sums: dict[int, torch.Tensor] = {}
            for rank, (found, _) in enumerate(results):
                assert torch.equal(found[b][0], row_of(lists[rank]))
                assert not sums.keys() & found[b][1].keys()
                sums |= found[b][1]
            having = [
                {k: g for k, g in zip(ks.tolist(), gradient_of(r, ks), strict=True) if k % 7}
                for r, ks in enumerate(lists)
            ]
            assert sums.keys() == set().union(*having)
            for key, total in sums.items():
                assert torch.equal(total, tree(nodes, [own.get(key) for own in having]))
    per_rank = per_node = 0
    for b in range(3):
        for number, node in enumerate(nodes):
            lists = [keys_of(rank, b) for rank in node]
            per_rank += sum(int((np.array(node_of)[owner_of(keys, world)] != number).sum()) for keys in lists)
            unique = np.unique(np.concatenate(lists))
            per_node += int((np.array(node_of)[owner_of(unique, world)] != number).sum())
    for results, expected in ((two, per_node), (flat, per_rank), (sockets, per_node)):
        for kind in ("keys", "rows", "gradients"):
            sent = [getattr(traffic, kind) for _, traffic in results]
            assert sum(one.items_between for one in sent) == expected
        rows = [traffic.rows for _, traffic in results]
        assert sum(one.bytes_between for one in rows) == expected * 4 * DIM
        assert sum(traffic.keys.bytes_between for _, traffic in results) == expected * 8
    assert len(nodes) == 1 or len(nodes[0]) == 1 or per_node < per_rank


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
def test_fewer_bits_between_nodes(wire: Wire) -> None:
    """Rows of other nodes' owners are rounded, those of the own node's are exact; the same run, the same bits."""
    nodes: Nodes = ((0, 1), (2, 3))
    first, again = (play(nodes, exchange_all, "two", wire) for _ in range(2))
    for rank, ((found, traffic), (repeated, _)) in enumerate(zip(first, again, strict=True)):
        for b in range(3):
            keys = keys_of(rank, b)
            rows, true = found[b][0], row_of(keys)
            assert torch.equal(rows, repeated[b][0])
            near = torch.from_numpy(owner_of(keys, 4) // 2 == rank // 2)
            assert torch.equal(rows[near], true[near])
            bound = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127}[wire]
            far = ~near
            if wire == "fp16" and bool((true[far] > 65504).any()):
                continue  # overflows, as that format does
            largest = true[far].abs().amax(1, keepdim=True) if bool(far.any()) else true[far]
            assert bool(((rows[far] - true[far]).abs() <= bound * largest).all())
            assert len(keys) == 0 or not bool(far.any()) or not torch.equal(rows[far], true[far])
        width = {"fp16": 2 * DIM, "bf16": 2 * DIM, "int8": DIM + 4}[wire]
        assert traffic.rows.bytes_between == traffic.rows.items_between * width


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
def test_any_number_of_rows_of_any_length_wherever_they_lie(wire: Wire) -> None:
    """In the middle of a message, where nothing is aligned."""
    for count, dim, before in itertools.product((0, 1, 2, 9), (1, 2, 3, 4, 5, 8), range(5)):
        values = torch.randint(-127, 128, (count, dim)).float()
        values[:, :1] = 127.0  # so that a step of int8 is 1
        coded = encode(values, wire, np.arange(count, dtype=np.uint64), 3, 1)
        assert len(coded) == count * width(wire, dim)
        message = torch.cat([torch.zeros(before, dtype=torch.uint8), coded])
        assert torch.equal(decode(message[before:], wire, dim), values)


def test_chance_is_right_on_average() -> None:
    """Over many steps, without a word of numpy's about overflow; another step, another chance."""
    keys, values = np.arange(4, dtype=np.uint64), torch.tensor([[1.0, -0.3, 0.123]]).repeat(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.stack([decode(encode(values, "int8", keys, step, 2**63 - 1), "int8", 3) for step in range(2000)])
    assert len(found[:, 0].unique(dim=0)) > 1
    assert len(found[5].unique(dim=0)) > 1
    torch.testing.assert_close(found.mean((0, 1)), values[0], rtol=0, atol=4e-4)


def test_owners_are_the_cores() -> None:
    """The hash is the one of the C++ core (reference.py plays it), its low bits choose; all ranks own about as much."""
    keys = np.random.default_rng(0).integers(0, 2**64, 20000, dtype=np.uint64)
    assert hash_keys(keys[:200]).tolist() == [mix64(int(key) ^ 0x9E3779B97F4A7C15) for key in keys[:200]]
    for world in (1, 2, 3, 7, 64):
        owners = owner_of(keys, world)
        assert owners.tolist()[:200] == [
            (mix64(int(k) ^ 0x9E3779B97F4A7C15) & 0xFFFF) * world >> 16 for k in keys[:200]
        ]
        counts = np.bincount(owners, minlength=world)
        assert len(counts) == world
        assert counts.min() > 0.6 * len(keys) / world
