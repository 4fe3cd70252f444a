"""Keys to their owners, rows back, gradients to the owners again: one hop over all ranks, or two.

Two hops: a key goes to the rank of its own node whose number within the node is the owner's; there the node's keys are
deduplicated, and go on to the owner, whose number is the same. So each unique key of a node crosses between nodes once,
its row comes back once, its gradient crosses once, summed. With one hop ("flat") every rank asks every owner itself.

A gradient's sum is one tree for both: the ranks of a node in order, then the nodes in order, left to right in float32;
ranks without the key are skipped. So both give the same bits.

A `Route` is planned ahead, from keys alone; rows and gradients follow it later without another word about keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thermocline.arrays import Keys
from thermocline.batch import WorkingSet
from thermocline.config.distributed import Hops, Wire
from thermocline.distributed.communicator import Communicator, Over
from thermocline.distributed.key_sharding import owner_of
from thermocline.distributed.row_reduce import RowSum, put_rows, take_rows
from thermocline.distributed.topology import Topology
from thermocline.distributed.wire_format import decode, encode, flag_bytes, pack_flags, unpack_flags, width
from thermocline.errors import ConfigError

Ints = npt.NDArray[np.int64]
Giver = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes the rows of int64 places among some keys into a float32[places, n]."""


@dataclasses.dataclass(slots=True)
class Sent:
    """What one kind of message came to, counted where it is sent; to the rank itself counts as nothing."""

    items_between: int = 0
    """Keys, rows or gradients to other nodes."""
    items_within: int = 0
    bytes_between: int = 0
    bytes_within: int = 0


@dataclasses.dataclass(slots=True)
class Traffic:
    """What a rank has sent. Each is counted by one thread."""

    keys: Sent = dataclasses.field(default_factory=Sent)
    rows: Sent = dataclasses.field(default_factory=Sent)
    gradients: Sent = dataclasses.field(default_factory=Sent)
    read_keys: Sent = dataclasses.field(default_factory=Sent)
    """For evaluation."""
    read_rows: Sent = dataclasses.field(default_factory=Sent)


@dataclasses.dataclass(slots=True, eq=False)
class Hop:
    """One all-to-all of a batch's keys: who asks whom for how many, and which of those that arrive are the same."""

    over: Over
    """Which group of a comm: the thread that plans it and the one that follows it have a comm each."""
    ranks: tuple[int, ...]
    """Of the group."""
    order: torch.Tensor
    """int64: the places of this rank's keys, grouped by whom they are asked of."""
    sent: Keys
    """Those keys."""
    send: list[int]
    """How many to each."""
    received: Keys
    """What the ranks of the group ask of this one, one after the other."""
    receive: list[int]
    unique: Keys
    """Of `received`."""
    places: torch.Tensor
    """int64 per key of `received`: its place in `unique`."""

    def move(self, device: torch.device) -> None:
        """Its lists go where the rows are."""
        self.order, self.places = self.order.to(device), self.places.to(device)


@dataclasses.dataclass(slots=True, eq=False)
class Route:
    """One batch's way: this rank's keys at its beginning, those it owns at its end."""

    keys: Keys
    hops: list[Hop]

    def move(self, device: torch.device) -> None:
        """Its lists go where the rows are."""
        for hop in self.hops:
            hop.move(device)

    @property
    def owned(self) -> Keys:
        """The unique keys that any rank asks of this one."""
        return self.hops[-1].unique


class Exchange:
    """What the ranks of a job send each other for one table."""

    def __init__(
        self, topology: Topology, *, hops: Hops = "two", wire: Wire = "fp32", salt: int = 0, threads: int | None = None
    ) -> None:
        """
        wire   of rows and gradients between nodes; within a node they travel as they are
        salt   of int8's chance: tells tables apart
        """
        if hops == "two" and not topology.even:
            sizes = [len(node) for node in topology.nodes]
            raise ConfigError(f'dist.hops is "two", but the nodes have {sizes} ranks: give all as many, or use "flat"')
        self.topology = topology
        self.hops = hops
        self.wire = wire
        self.traffic = Traffic()
        self._salt = salt
        self._threads = threads
        self._node_of = topology.node_of

    # ---- plans

    def plan(self, comm: Communicator, batches: Sequence[Keys], sent: Sent) -> list[Route]:
        """The routes of several batches' unique keys, each rank's own. All ranks call it, with as many batches."""
        t = self.topology
        owners = [owner_of(keys, t.world) for keys in batches]
        if self.hops == "flat" or len(t.nodes) == 1:
            over: Over = "node" if len(t.nodes) == 1 else "world"
            found = self._hop(comm, over, tuple(range(t.world)), batches, owners, sent)
            return [Route(keys, [hop]) for keys, hop in zip(batches, found, strict=True)]
        per_node = len(t.nodes[0])
        inside = self._hop(comm, "node", t.nodes[t.node], batches, [owner % per_node for owner in owners], sent)
        gathered = [hop.unique for hop in inside]
        nodes = [owner_of(keys, t.world) // per_node for keys in gathered]
        across = self._hop(comm, "peers", t.peers, gathered, nodes, sent)
        return [Route(keys, [*hops]) for keys, *hops in zip(batches, inside, across, strict=True)]

    def _hop(
        self,
        comm: Communicator,
        over: Over,
        ranks: tuple[int, ...],
        batches: Sequence[Keys],
        destinations: Sequence[Ints],
        sent: Sent,
    ) -> list[Hop]:
        """All batches in one exchange: the messages to one rank are those of the batches, one after the other."""
        size, count = len(ranks), len(batches)
        orders = [np.argsort(to.astype(np.uint16), kind="stable") for to in destinations]  # a radix sort
        sends = np.stack([np.bincount(to, minlength=size) for to in destinations], 1).astype(np.int64)
        lists = [keys[order] for keys, order in zip(batches, orders, strict=True)]
        bytes_to = (8 * (count + sends.sum(1))).tolist()
        message = comm.send_buffer(over, sum(bytes_to), torch.device("cpu"))
        _write_keys(message.numpy().view(np.uint64), lists, sends)
        found = comm.all_to_all(over, message, bytes_to, None, "exchanged keys")
        self._count(sent, ranks, sends.sum(1).tolist(), (8 * sends.sum(1)).tolist())
        words = [piece.numpy().view(np.uint64) for piece in found]
        head = np.stack([piece[:count] for piece in words]).astype(np.int64)
        arrived = _transposed([_cut(piece[count:], own) for piece, own in zip(words, head, strict=True)])
        hops = []
        for i, mine in enumerate(arrived):
            unique = WorkingSet.of(mine, threads=self._threads)
            hops.append(
                Hop(
                    over,
                    ranks,
                    torch.from_numpy(orders[i]),
                    lists[i],
                    sends[:, i].tolist(),
                    mine,
                    head[:, i].tolist(),
                    unique.keys,
                    _index(unique.inverse),
                )
            )
        return hops

    def joined(self, routes: Sequence[Route]) -> Route:
        """One route for the keys of several batches, which all ranks have planned: nothing is sent.

        Every rank can tell what the others' lists are, joined: each key where it first occurs.
        """
        if len(routes) == 1:
            return routes[0]
        keys = self._unique([route.keys for route in routes])
        begin, hops = keys, []
        for level, one in enumerate(routes[0].hops):
            parts = [route.hops[level] for route in routes]
            size = len(one.ranks)
            sent = [self._unique(lists) for lists in zip(*(_cut(p.sent, p.send) for p in parts), strict=True)]
            received = [
                self._unique(lists) for lists in zip(*(_cut(p.received, p.receive) for p in parts), strict=True)
            ]
            unique = self._unique([p.unique for p in parts])
            assert len(sent) == len(received) == size
            order = self._places(begin, np.concatenate(sent))
            places = self._places(unique, np.concatenate(received))
            hops.append(
                Hop(
                    one.over,
                    one.ranks,
                    order,
                    np.concatenate(sent),
                    [len(part) for part in sent],
                    np.concatenate(received),
                    [len(part) for part in received],
                    unique,
                    places,
                )
            )
            begin = unique
        return Route(keys, hops)

    def _unique(self, lists: Sequence[Keys]) -> Keys:
        return WorkingSet.of(np.concatenate(lists), threads=self._threads).keys

    def _places(self, unique: Keys, keys: Keys) -> torch.Tensor:
        """Where each of `keys` stands in `unique`, which has them all."""
        found = WorkingSet.of(np.concatenate([unique, keys]), threads=self._threads)
        assert len(found) == len(unique)
        return _index(found.inverse[len(unique) :])

    # ---- rows

    def rows(
        self, comm: Communicator, route: Route, owned: Giver, out: torch.Tensor, sent: Sent, step: int = 0
    ) -> None:
        """The rows of the route's keys from their owners.

        owned   gives rows of the keys that this rank owns
        out     float32[keys, n], which is filled
        """
        floats, device, give = out.shape[1], out.device, owned
        for hop in reversed(route.hops):
            count, wires = sum(hop.receive), self._wires(hop.ranks)
            sizes_to = [n * width(wire, floats) for n, wire in zip(hop.receive, wires, strict=True)]
            sizes_from = [n * width(wire, floats) for n, wire in zip(hop.send, wires, strict=True)]
            message = comm.send_buffer(hop.over, sum(sizes_to), device)
            if set(wires) == {"fp32"}:
                give(hop.places, _as_rows(message, floats))
            else:
                plain = torch.empty(count, floats, device=device)
                give(hop.places, plain)
                lists = zip(
                    _pieces(message, sizes_to), _pieces(plain, hop.receive), _cut(hop.received, hop.receive), wires,
                    strict=True,
                )  # fmt: skip
                for room, part, keys, wire in lists:
                    room.copy_(encode(part, wire, keys, step, self._salt))
            found = comm.all_to_all(hop.over, message, sizes_to, sizes_from, "exchanged rows")
            self._count(sent, hop.ranks, hop.receive, sizes_to)
            values = out if hop is route.hops[0] else torch.empty(len(hop.order), floats, device=device)
            for piece, places, wire in zip(found, _pieces(hop.order.to(device), hop.send), wires, strict=True):
                put_rows(values, places, decode(piece, wire, floats))
            give = functools.partial(take_rows, values)

    # ---- gradients

    def gradients(
        self,
        comm: Communicator,
        route: Route,
        values: torch.Tensor,
        present: torch.Tensor | None,
        sent: Sent,
        step: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[owned, dim], and which of them any rank has: the sums over all ranks of the keys this one owns.

        values    one row per key of the route
        present   bool: whether this rank has a gradient for the key; none: for all
        """
        for hop in route.hops:
            total = self._summed(comm, hop, values, present, sent, step)
            values, present = total.values, total.present
        assert present is not None
        return values, present

    def _summed(
        self, comm: Communicator, hop: Hop, values: torch.Tensor, present: torch.Tensor | None, sent: Sent, step: int
    ) -> RowSum:
        dim, wires, device = values.shape[1], self._wires(hop.ranks), values.device
        sizes_to = [flag_bytes(n) + n * width(wire, dim) for n, wire in zip(hop.send, wires, strict=True)]
        sizes_from = [flag_bytes(n) + n * width(wire, dim) for n, wire in zip(hop.receive, wires, strict=True)]
        message = comm.send_buffer(hop.over, sum(sizes_to), device)
        lists = zip(
            _pieces(message, sizes_to), _pieces(hop.order.to(device), hop.send), _cut(hop.sent, hop.send), wires,
            strict=True,
        )  # fmt: skip
        plain = set(wires) == {"fp32"}
        for room, places, keys, wire in lists:
            cut = flag_bytes(len(places))
            room[:cut].copy_(pack_flags(None if present is None else present[places], len(places)))
            if plain:
                take_rows(values, places, _as_rows(room[cut:], dim))
            else:
                room[cut:].copy_(encode(values.index_select(0, places), wire, keys, step, self._salt + 1))
        found = comm.all_to_all(hop.over, message, sizes_to, sizes_from, "exchanged gradients")
        self._count(sent, hop.ranks, hop.send, sizes_to)
        total: RowSum | None = None
        arrived = list(zip(found, hop.receive, _pieces(hop.places.to(device), hop.receive), wires, strict=True))
        for sources in self._by_node(hop):
            part_sum = RowSum(len(hop.unique), dim, device)
            for source in sources:
                piece, count, places, wire = arrived[source]
                cut = flag_bytes(count)
                part_sum.add(places, decode(piece[cut:], wire, dim), unpack_flags(piece[:cut], count))
            total = part_sum if total is None else total.plus(part_sum)
        assert total is not None
        return total

    def _by_node(self, hop: Hop) -> list[list[int]]:
        """The hop's sources, those whose sums are added first together: of a node, if all ranks send to all."""
        if self.hops != "flat":
            return [list(range(len(hop.ranks)))]
        nodes = [self._node_of[rank] for rank in hop.ranks]
        return [[i for i, node in enumerate(nodes) if node == number] for number in dict.fromkeys(nodes)]

    # ---- books

    def _wires(self, ranks: tuple[int, ...]) -> list[Wire]:
        here = self._node_of[self.topology.rank]
        return ["fp32" if self._node_of[rank] == here else self.wire for rank in ranks]

    def _count(self, sent: Sent, ranks: tuple[int, ...], items: list[int], sizes: list[int]) -> None:
        me = self.topology.rank
        for rank, count, size in zip(ranks, items, sizes, strict=True):
            if rank == me:
                continue
            if self._node_of[rank] == self._node_of[me]:
                sent.items_within += count
                sent.bytes_within += size
            else:
                sent.items_between += count
                sent.bytes_between += size


def _as_rows(message: torch.Tensor, floats: int) -> torch.Tensor:
    return message.view(torch.float32).view(-1, floats)


def _index(places: Any) -> torch.Tensor:
    return torch.from_numpy(places.astype(np.int64))


def _pieces(values: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = torch.split(values, sizes)
    return pieces


def _cut(values: Any, sizes: Any) -> list[Any]:
    return np.split(values, np.cumsum(sizes)[:-1])


def _write_keys(message: Keys, lists: Sequence[Keys], sends: Ints) -> None:
    """For each rank: how many keys of each batch, then the keys."""
    pieces = [_cut(keys, sends[:, i]) for i, keys in enumerate(lists)]
    end = 0
    for rank, counts in enumerate(sends):
        parts = [counts.view(np.uint64), *(piece[rank] for piece in pieces)]
        begin, end = end, end + sum(map(len, parts))
        np.concatenate(parts, out=message[begin:end])


def _transposed(messages: Sequence[Sequence[Keys]]) -> list[Keys]:
    """Of every batch the keys of all ranks, given those of every rank by batch."""
    return [np.concatenate(batch) for batch in zip(*messages, strict=True)]
