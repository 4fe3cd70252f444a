"""Row exchange: rows from their owners, gradients to them, each key between nodes once; wire formats; key owners."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rank_training import tree_sum
from helpers.ranks import Nodes, groups_without_shm, run_ranks

from thermocline.arrays import Keys
from thermocline.config.distributed import Hops, Wire
from thermocline.distributed.communicator import Groups
from thermocline.distributed.key_sharding import owner_of
from thermocline.distributed.row_exchange import Route, RowExchange, TrafficCounter
from thermocline.distributed.row_reduce import take_rows
from thermocline.distributed.wire_format import decode, encode, wire_bytes
from thermocline.embedding.key_hash import hash_keys
from thermocline.embedding.reference_codec import mix64

WIRES: tuple[Wire, ...] = ("fp16", "bf16", "int8")
NODES: list[Nodes] = [((0, 1), (2, 3)), ((0, 1, 2),), ((0,), (1,), (2,))]
DIM = 5


def keys_of(rank: int, batch: int) -> Keys:
    """Return unique keys, many of them on several ranks; some batches have none."""
    rng = np.random.default_rng([rank, batch])
    count = 0 if (rank + batch) % 5 == 4 else int(rng.integers(1, 60))
    return rng.permutation(90)[:count].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def row_of(keys: Keys) -> torch.Tensor:
    """Return rows that identify their keys."""
    return torch.from_numpy((hash_keys(keys) >> np.uint64(40)).astype(np.float32))[:, None] * torch.arange(1, DIM + 1)


def gradient_of(rank: int, keys: Keys) -> torch.Tensor:
    """Return gradients of such different sizes that the order of additions changes their sum."""
    rng = np.random.default_rng(rank)
    return row_of(keys) * float(10.0 ** rng.integers(-4, 4)) * (1.0 + 1e-3 * rank)


def fetch(exchange: RowExchange, groups: Groups, route: Route, counter: TrafficCounter) -> torch.Tensor:
    rows = torch.full((len(route.keys), DIM + 2), -1.0)
    read_owned = functools.partial(take_rows, row_of(route.owned).contiguous())
    exchange.fetch_rows(groups.train, route, read_owned, rows[:, :DIM], counter, step=3)
    assert bool((rows[:, DIM:] == -1).all())
    return rows[:, :DIM].clone()


def exchange_batches(groups: Groups, hops: Hops, wire: Wire = "fp32") -> Any:
    """Exchange three batches. Returns rows and gradient sums of each batch, and the traffic."""
    t = groups.topology
    exchange = RowExchange(t, hops=hops, wire=wire)
    batches = [keys_of(t.rank, b) for b in range(3)]
    routes = exchange.plan(groups.ahead, batches, exchange.traffic.keys)
    results = []
    for keys, route in zip(batches, routes, strict=True):
        assert (owner_of(route.owned, t.world) == t.rank).all()
        rows = fetch(exchange, groups, route, exchange.traffic.rows)
        present = torch.from_numpy(keys % np.uint64(7) != 0)  # this rank has no gradient for multiples of 7
        sums, has = exchange.reduce_gradients(
            groups.train, route, gradient_of(t.rank, keys), present, exchange.traffic.gradients, step=3
        )
        results.append((rows, dict(zip(route.owned[has.numpy()].tolist(), sums[has], strict=True))))
    merged = exchange.merge_routes(routes)
    rows = fetch(exchange, groups, merged, TrafficCounter())
    assert torch.equal(rows, row_of(merged.keys)) or wire != "fp32"
    return results, exchange.traffic


def exchange_all_transports(groups: Groups) -> Any:
    """Exchange with two hops, with one hop, and with two hops through Gloo instead of shared memory."""
    t = groups.topology
    assert (groups.train.shm is None) == (len(t.nodes[t.node]) == 1)
    results = [exchange_batches(groups, "two"), exchange_batches(groups, "flat")]
    over_gloo, _ = groups_without_shm(groups)
    assert over_gloo.train.shm is None
    results.append(exchange_batches(over_gloo, "two"))
    over_gloo.close()
    return results


def exchange_all_wires(groups: Groups) -> Any:
    return {wire: exchange_batches(groups, "two", wire) for wire in WIRES}


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_rows_and_sums(nodes: Nodes) -> None:
    """Rows equal their owners', sums equal `tree_sum` key by key with one hop and two, and all traffic is counted."""
    world = sum(map(len, nodes))
    node_of = [number for number, node in enumerate(nodes) for _ in node]
    two, flat, gloo = zip(*run_ranks(nodes, exchange_all_transports), strict=True)
    for b in range(3):
        lists = [keys_of(rank, b) for rank in range(world)]
        for batches, _ in (*two, *flat, *gloo):
            assert len(batches) == 3
        for results in (two, flat, gloo):
            sums: dict[int, torch.Tensor] = {}
            for rank, (batches, _) in enumerate(results):
                assert torch.equal(batches[b][0], row_of(lists[rank]))
                assert not sums.keys() & batches[b][1].keys()
                sums |= batches[b][1]
            gradients = [
                {k: g for k, g in zip(ks.tolist(), gradient_of(r, ks), strict=True) if k % 7}
                for r, ks in enumerate(lists)
            ]
            assert sums.keys() == set().union(*gradients)
            for key, total in sums.items():
                assert torch.equal(total, tree_sum(nodes, [by_key.get(key) for by_key in gradients]))
    per_rank = per_node = 0
    for b in range(3):
        for number, node in enumerate(nodes):
            lists = [keys_of(rank, b) for rank in node]
            per_rank += sum(int((np.array(node_of)[owner_of(keys, world)] != number).sum()) for keys in lists)
            unique = np.unique(np.concatenate(lists))
            per_node += int((np.array(node_of)[owner_of(unique, world)] != number).sum())
    for results, expected in ((two, per_node), (flat, per_rank), (gloo, per_node)):
        for kind in ("keys", "rows", "gradients"):
            counters = [getattr(traffic, kind) for _, traffic in results]
            assert sum(counter.items_between for counter in counters) == expected
        assert sum(traffic.rows.bytes_between for _, traffic in results) == expected * 4 * DIM
        assert sum(traffic.keys.bytes_between for _, traffic in results) == expected * 8
    assert len(nodes) == 1 or len(nodes[0]) == 1 or per_node < per_rank


@pytest.fixture(scope="module")
def wire_results() -> list[list[Any]]:
    """Two runs of `exchange_all_wires`."""
    return [run_ranks(((0, 1), (2, 3)), exchange_all_wires) for _ in range(2)]


@pytest.mark.parametrize("wire", WIRES)
def test_wire_formats_between_nodes(wire: Wire, wire_results: list[list[Any]]) -> None:
    """Rows of other nodes are rounded, rows of the same node are exact, and a second run has the same bits."""
    first, second = ([result[wire] for result in run] for run in wire_results)
    for rank, ((batches, traffic), (repeated, _)) in enumerate(zip(first, second, strict=True)):
        for b in range(3):
            keys = keys_of(rank, b)
            rows, true = batches[b][0], row_of(keys)
            assert torch.equal(rows, repeated[b][0])
            near = torch.from_numpy(owner_of(keys, 4) // 2 == rank // 2)
            assert torch.equal(rows[near], true[near])
            bound = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 127}[wire]
            far = ~near
            if wire == "fp16" and bool((true[far] > 65504).any()):
                continue  # float16 overflows
            largest = true[far].abs().amax(1, keepdim=True) if bool(far.any()) else true[far]
            assert bool(((rows[far] - true[far]).abs() <= bound * largest).all())
            assert len(keys) == 0 or not bool(far.any()) or not torch.equal(rows[far], true[far])
        width = {"fp16": 2 * DIM, "bf16": 2 * DIM, "int8": DIM + 4}[wire]
        assert traffic.rows.bytes_between == traffic.rows.items_between * width


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8"])
def test_encode_decode_at_any_offset(wire: Wire) -> None:
    """Any number of rows of any length, at any alignment in a message."""
    for count, dim, before in itertools.product((0, 1, 2, 9), (1, 2, 3, 4, 5, 8), range(5)):
        values = torch.randint(-127, 128, (count, dim)).float()
        values[:, :1] = 127.0  # the scale of int8 is 1
        encoded = encode(values, wire, np.arange(count, dtype=np.uint64), 3, 1)
        assert len(encoded) == count * wire_bytes(wire, dim)
        message = torch.cat([torch.zeros(before, dtype=torch.uint8), encoded])
        assert torch.equal(decode(message[before:], wire, dim), values)


def test_stochastic_rounding_is_unbiased() -> None:
    """Over many steps, which round differently, and without numpy's overflow warnings."""
    keys, values = np.arange(4, dtype=np.uint64), torch.tensor([[1.0, -0.3, 0.123]]).repeat(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = torch.stack(
            [decode(encode(values, "int8", keys, step, 2**63 - 1), "int8", 3) for step in range(2000)]
        )
    assert len(decoded[:, 0].unique(dim=0)) > 1
    assert len(decoded[5].unique(dim=0)) > 1
    torch.testing.assert_close(decoded.mean((0, 1)), values[0], rtol=0, atol=4e-4)


def test_owner_of_uses_the_low_bits_of_the_core_hash() -> None:
    """The hash equals the C++ core's (`reference_codec`), and keys are spread evenly over ranks."""
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
