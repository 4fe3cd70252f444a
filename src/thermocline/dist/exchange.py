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
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thermocline.batch import WorkingSet
from thermocline.dist.config import Hops, Wire
from thermocline.dist.groups import Lane, Over
from thermocline.dist.owners import owner_of
from thermocline.dist.row_sum import RowSum
from thermocline.dist.topology import Topology
from thermocline.dist.wire import decode, encode, flag_bytes, pack_flags, unpack_flags, width
from thermocline.errors import ConfigError
from thermocline.tables.arrays import Keys

Ints = npt.NDArray[np.int64]


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
    """Which group of a lane: the thread that plans it and the one that follows it have a lane each."""
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
    back: torch.Tensor = dataclasses.field(init=False)
    """The inverse of `order`: where the answer to each of this rank's keys stands."""

    def __post_init__(self) -> None:
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(self.order), device=self.order.device)

    def move(self, device: torch.device) -> None:
        """Its lists go where the rows are."""
        self.order, self.places, self.back = self.order.to(device), self.places.to(device), self.back.to(device)


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

    def plan(self, lane: Lane, batches: Sequence[Keys], sent: Sent) -> list[Route]:
        """The routes of several batches' unique keys, each rank's own. All ranks call it, with as many batches."""
        t = self.topology
        owners = [owner_of(keys, t.world) for keys in batches]
        if self.hops == "flat" or len(t.nodes) == 1:
            over: Over = "node" if len(t.nodes) == 1 else "world"
            found = self._hop(lane, over, tuple(range(t.world)), batches, owners, sent)
            return [Route(keys, [hop]) for keys, hop in zip(batches, found, strict=True)]
        per_node = len(t.nodes[0])
        inside = self._hop(lane, "node", t.nodes[t.node], batches, [owner % per_node for owner in owners], sent)
        gathered = [hop.unique for hop in inside]
        nodes = [owner_of(keys, t.world) // per_node for keys in gathered]
        across = self._hop(lane, "peers", t.peers, gathered, nodes, sent)
        return [Route(keys, [*hops]) for keys, *hops in zip(batches, inside, across, strict=True)]

    def _hop(
        self,
        lane: Lane,
        over: Over,
        ranks: tuple[int, ...],
        batches: Sequence[Keys],
        destinations: Sequence[Ints],
        sent: Sent,
    ) -> list[Hop]:
        """All batches in one exchange: the messages to one rank are those of the batches, one after the other."""
        size, count = len(ranks), len(batches)
        orders = [np.argsort(to, kind="stable") for to in destinations]
        sends = np.stack([np.bincount(to, minlength=size) for to in destinations], 1).astype(np.int64)
        lists = [keys[order] for keys, order in zip(batches, orders, strict=True)]
        message = _transposed(lists, sends)
        doing = "exchanged keys"
        head = lane.all_to_all(over, torch.from_numpy(sends), [1] * size, [1] * size, doing).numpy()
        found = lane.all_to_all(
            over, torch.from_numpy(message.view(np.int64)), sends.sum(1).tolist(), head.sum(1).tolist(), doing
        )
        self._count(sent, ranks, sends.sum(1).tolist(), [8 * n for n in sends.sum(1).tolist()])
        arrived = _transposed(_cut(found.numpy().view(np.uint64), head.sum(1)), head.T)
        hops = []
        for i, mine in enumerate(_cut(arrived, head.sum(0))):
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
        assert len(hops) == count
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

    def rows(self, lane: Lane, route: Route, owned: torch.Tensor, sent: Sent, step: int = 0) -> torch.Tensor:
        """float32[keys, n] from their owners, given the rows of the keys that this rank owns."""
        values = owned
        for hop in reversed(route.hops):
            out = values.index_select(0, hop.places.to(values.device))
            wires = self._wires(hop.ranks)
            if set(wires) == {"fp32"}:
                data = lane.all_to_all(hop.over, out, hop.receive, hop.send, "exchanged rows")
                self._count(sent, hop.ranks, hop.receive, [4 * out.shape[1] * n for n in hop.receive])
            else:
                data = self._coded(lane, hop, out, hop.receive, hop.send, wires, sent, step)
            values = data.index_select(0, hop.back.to(data.device))
        return values

    def _coded(
        self, lane: Lane, hop: Hop, out: torch.Tensor, send: list[int], receive: list[int],
        wires: list[Wire], sent: Sent, step: int,
    ) -> torch.Tensor:  # fmt: skip
        dim = out.shape[1]
        parts = [
            encode(part, wire, own, step, self._salt)
            for part, own, wire in zip(_pieces(out, send), _cut(hop.received, send), wires, strict=True)
        ]
        sizes = [n * width(wire, dim) for n, wire in zip(receive, wires, strict=True)]
        sends = [len(part) for part in parts]
        data = lane.all_to_all(hop.over, torch.cat(parts), sends, sizes, "exchanged rows")
        self._count(sent, hop.ranks, send, sends)
        return torch.cat([decode(part, wire, dim) for part, wire in zip(_pieces(data, sizes), wires, strict=True)])

    # ---- gradients

    def gradients(
        self, lane: Lane, route: Route, values: torch.Tensor, present: torch.Tensor, sent: Sent, step: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[owned, dim], and which of them any rank has: the sums over all ranks of the keys this one owns.

        values    one row per key of the route
        present   bool: whether this rank has a gradient for the key
        """
        for hop in route.hops:
            order = hop.order.to(values.device)
            values, present = self._summed(
                lane, hop, values.index_select(0, order), present.index_select(0, order), sent, step
            )
        return values, present

    def _summed(
        self, lane: Lane, hop: Hop, values: torch.Tensor, present: torch.Tensor, sent: Sent, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dim, wires = values.shape[1], self._wires(hop.ranks)
        parts: list[torch.Tensor] = []
        lists = zip(_pieces(values, hop.send), _pieces(present, hop.send), _cut(hop.sent, hop.send), wires, strict=True)
        for part, flags, keys, wire in lists:
            parts += [pack_flags(flags), encode(part, wire, keys, step, self._salt + 1)]
        sends = [flag_bytes(n) + n * width(wire, dim) for n, wire in zip(hop.send, wires, strict=True)]
        sizes = [flag_bytes(n) + n * width(wire, dim) for n, wire in zip(hop.receive, wires, strict=True)]
        data = lane.all_to_all(hop.over, torch.cat(parts), sends, sizes, "exchanged gradients")
        self._count(sent, hop.ranks, hop.send, sends)
        total: RowSum | None = None
        arrived = list(
            zip(_pieces(data, sizes), hop.receive, _pieces(hop.places.to(data.device), hop.receive), wires, strict=True)
        )
        for sources in self._by_node(hop):
            part_sum = RowSum(len(hop.unique), dim, data.device)
            for source in sources:
                message, count, places, wire = arrived[source]
                cut = flag_bytes(count)
                part_sum.add(places, decode(message[cut:], wire, dim), unpack_flags(message[:cut], count))
            total = part_sum if total is None else total.plus(part_sum)
        assert total is not None
        return total.values, total.present

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


def _index(places: Any) -> torch.Tensor:
    return torch.from_numpy(places.astype(np.int64))


def _pieces(values: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = torch.split(values, sizes)
    return pieces


def _cut(values: Any, sizes: Any) -> list[Any]:
    return np.split(values, np.cumsum(sizes)[:-1])


def _transposed(lists: Sequence[Keys], sizes: Ints) -> Keys:
    """Lists of pieces, sizes[piece, list], as one array: all first pieces, then all second ones."""
    if len(lists) == 1:
        return lists[0]
    pieces = [_cut(values, sizes[:, i]) for i, values in enumerate(lists)]
    return np.concatenate([piece for group in zip(*pieces, strict=True) for piece in group])
