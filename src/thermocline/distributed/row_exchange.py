"""`RowExchange`: sends keys to their owner ranks, rows back, and gradients to the owners, in one hop or two.

Two hops ("two"): a key is sent to the rank of its node that has the owner's local rank. That rank removes duplicates of
the node's keys and sends them on to the owner, its peer on another node. So each unique key of a node crosses between
nodes once, its row returns once, and its gradient crosses once, summed. One hop ("flat"): every rank sends every key to
its owner directly.

Gradients are added in one order for both: the ranks of a node in order, then the nodes in order, left to right in
float32; ranks without the key are skipped. So both give the same bits.

A `Route` is planned ahead of training from keys alone. Rows and gradients follow it later; keys are not sent again.

Thread     `plan` on the exchange thread (ahead) or, for evaluation, the pull thread (read); `fetch_rows` and
           `reduce_gradients` on the training thread (train) or, for evaluation, the pull thread (read); `split_route`
           and the `fetch_rows` of its first part on the thread of `EarlyRows` (early)
Blocks     until all ranks have made the same call, at most `dist.timeout` seconds
Raises     `RankError`
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
from thermocline.distributed.communicator import Communicator, GroupName
from thermocline.distributed.key_sharding import owner_of
from thermocline.distributed.row_reduce import RowSum, put_rows, take_rows
from thermocline.distributed.topology import Topology
from thermocline.distributed.wire_format import decode, encode, flag_bytes, pack_flags, unpack_flags, wire_bytes
from thermocline.errors import ConfigError

Ints = npt.NDArray[np.int64]
ReadRows = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes the rows with the given int64 indices into float32[indices, n]."""


@dataclasses.dataclass(slots=True)
class TrafficCounter:
    """Items and bytes of one kind of message that this rank has sent to other ranks."""

    items_between: int = 0
    """Keys, rows or gradients sent to other nodes."""
    items_within: int = 0
    """Keys, rows or gradients sent within the node."""
    bytes_between: int = 0
    bytes_within: int = 0


@dataclasses.dataclass(slots=True)
class TableTraffic:
    """Traffic of one table on this rank. Each counter is written by one thread."""

    keys: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    rows: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    early_rows: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    """Rows sent while the network computes (`EarlyRows`)."""
    gradients: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    read_keys: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    """Traffic of evaluation."""
    read_rows: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    statistics: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    """Occurrences of keys, for statistics of rows."""
    admission: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    """Keys, occurrences and decisions of admission."""
    read_admission: TrafficCounter = dataclasses.field(default_factory=TrafficCounter)
    """Those of evaluation."""


@dataclasses.dataclass(slots=True, eq=False)
class Hop:
    """One all-to-all of a batch's keys, and the deduplication of the received keys."""

    group: GroupName
    """Group of any communicator: the planning thread and the training thread use different ones."""
    ranks: tuple[int, ...]
    """Ranks of the group."""
    order: torch.Tensor
    """int64: indices of this rank's keys, grouped by destination."""
    sent: Keys
    """This rank's keys in that order."""
    send: list[int]
    """Number of keys to each rank."""
    received: Keys
    """Keys from all ranks of the group, concatenated."""
    receive: list[int]
    """Number of keys from each rank."""
    unique: Keys
    """`received` without duplicates."""
    inverse: torch.Tensor
    """int64: the index in `unique` of each received key."""

    def move(self, device: torch.device) -> None:
        """Move the index tensors to the rows' device."""
        self.order, self.inverse = self.order.to(device), self.inverse.to(device)

    def part(self, requested: torch.Tensor, awaited: torch.Tensor) -> Hop:
        """Return the hop of some keys, for `fetch_rows`. Indices refer to the same keys as before.

        requested   bool: which of `received`
        awaited     bool: which of `order`
        """
        return dataclasses.replace(
            self,
            order=self.order[awaited],
            sent=self.sent[awaited.cpu().numpy()],
            send=[int(piece.sum()) for piece in _pieces(awaited, self.send)],
            received=self.received[requested.cpu().numpy()],
            receive=[int(piece.sum()) for piece in _pieces(requested, self.receive)],
            inverse=self.inverse[requested],
        )


@dataclasses.dataclass(slots=True, eq=False)
class Route:
    """The hops of one batch, from this rank's keys to the keys that it owns."""

    keys: Keys
    hops: list[Hop]

    def move(self, device: torch.device) -> None:
        """Move the index tensors to the rows' device."""
        for hop in self.hops:
            hop.move(device)

    @property
    def owned(self) -> Keys:
        """Unique keys that any rank requests from this one."""
        return self.hops[-1].unique


class RowExchange:
    """The messages of one table between all ranks."""

    def __init__(
        self, topology: Topology, *, hops: Hops = "two", wire: Wire = "fp32", salt: int = 0, threads: int | None = None
    ) -> None:
        """
        wire   format of rows and gradients between nodes; within a node it is always fp32
        salt   seed of int8's stochastic rounding, different for each table
        """
        if hops == "two" and not topology.is_uniform:
            sizes = [len(node) for node in topology.nodes]
            raise ConfigError(
                f'dist.hops is "two", but the nodes have {sizes} ranks: start the same number on each, or set "flat"'
            )
        self.topology = topology
        self.hops = hops
        self.wire = wire
        self.traffic = TableTraffic()
        self._salt = salt
        self._threads = threads
        self._node_of = topology.node_of

    # ---- plans

    def plan(self, comm: Communicator, batches: Sequence[Keys], counter: TrafficCounter) -> list[Route]:
        """Return the routes of several batches, given this rank's unique keys of each.

        All ranks call it with the same number of batches.
        """
        t = self.topology
        owners = [owner_of(keys, t.world) for keys in batches]
        if self.hops == "flat" or len(t.nodes) == 1:
            group: GroupName = "node" if len(t.nodes) == 1 else "world"
            direct = self._plan_hop(comm, group, tuple(range(t.world)), batches, owners, counter)
            return [Route(keys, [hop]) for keys, hop in zip(batches, direct, strict=True)]
        per_node = len(t.nodes[0])
        local_ranks = [owner % per_node for owner in owners]
        within = self._plan_hop(comm, "node", t.nodes[t.node], batches, local_ranks, counter)
        gathered = [hop.unique for hop in within]
        nodes = [owner_of(keys, t.world) // per_node for keys in gathered]
        between = self._plan_hop(comm, "peers", t.peers, gathered, nodes, counter)
        return [Route(keys, [*hops]) for keys, *hops in zip(batches, within, between, strict=True)]

    def _plan_hop(
        self,
        comm: Communicator,
        group: GroupName,
        ranks: tuple[int, ...],
        batches: Sequence[Keys],
        destinations: Sequence[Ints],
        counter: TrafficCounter,
    ) -> list[Hop]:
        """Exchange the keys of all batches in one all-to-all. `destinations` are positions in `ranks`."""
        size, count = len(ranks), len(batches)
        orders = [np.argsort(to.astype(np.uint16), kind="stable") for to in destinations]  # radix sort
        sends = np.stack([np.bincount(to, minlength=size) for to in destinations], 1).astype(np.int64)
        sorted_keys = [keys[order] for keys, order in zip(batches, orders, strict=True)]
        bytes_to = (8 * (count + sends.sum(1))).tolist()
        message = comm.send_buffer(group, sum(bytes_to), torch.device("cpu"))
        _write_keys(message.numpy().view(np.uint64), sorted_keys, sends)
        pieces = comm.all_to_all(group, message, bytes_to, None, "exchanging keys")
        self._count(counter, ranks, sends.sum(1).tolist(), (8 * sends.sum(1)).tolist())
        words = [piece.numpy().view(np.uint64) for piece in pieces]
        counts = np.stack([piece[:count] for piece in words]).astype(np.int64)
        by_rank = [_split(piece[count:], sizes) for piece, sizes in zip(words, counts, strict=True)]
        hops = []
        for i, parts in enumerate(zip(*by_rank, strict=True)):
            received = np.concatenate(parts)
            unique = WorkingSet.of(received, threads=self._threads)
            hops.append(
                Hop(
                    group,
                    ranks,
                    order=torch.from_numpy(orders[i]),
                    sent=sorted_keys[i],
                    send=sends[:, i].tolist(),
                    received=received,
                    receive=counts[:, i].tolist(),
                    unique=unique.keys,
                    inverse=_index_tensor(unique.inverse),
                )
            )
        return hops

    def merge_routes(self, routes: Sequence[Route]) -> Route:
        """Return one route for the keys of several planned batches. Sends nothing.

        Every rank derives the merged key lists of all ranks: each key at its first occurrence.
        """
        if len(routes) == 1:
            return routes[0]
        keys = self._unique([route.keys for route in routes])
        previous, hops = keys, []
        for level, first in enumerate(routes[0].hops):
            parts = [route.hops[level] for route in routes]
            sent = [self._unique(lists) for lists in zip(*(_split(p.sent, p.send) for p in parts), strict=True)]
            received = [
                self._unique(lists) for lists in zip(*(_split(p.received, p.receive) for p in parts), strict=True)
            ]
            unique = self._unique([p.unique for p in parts])
            assert len(sent) == len(received) == len(first.ranks)
            hops.append(
                Hop(
                    first.group,
                    first.ranks,
                    order=self._indices(previous, np.concatenate(sent)),
                    sent=np.concatenate(sent),
                    send=[len(part) for part in sent],
                    received=np.concatenate(received),
                    receive=[len(part) for part in received],
                    unique=unique,
                    inverse=self._indices(unique, np.concatenate(received)),
                )
            )
            previous = unique
        return Route(keys, hops)

    def _unique(self, lists: Sequence[Keys]) -> Keys:
        return WorkingSet.of(np.concatenate(lists), threads=self._threads).keys

    def _indices(self, unique: Keys, keys: Keys) -> torch.Tensor:
        """Return the index in `unique` of each of `keys`; `unique` contains all of them."""
        both = WorkingSet.of(np.concatenate([unique, keys]), threads=self._threads)
        assert len(both) == len(unique)
        return _index_tensor(both.inverse[len(unique) :])

    # ---- rows

    def split_route(
        self, comm: Communicator, route: Route, chosen: torch.Tensor, counter: TrafficCounter
    ) -> tuple[Route, Route]:
        """Return the route of the owned keys with chosen[i], and that of all others, for `fetch_rows`.

        Every owner chooses for its own keys and tells the ranks that request them. All ranks call it.
        """
        parts: list[tuple[Hop, Hop]] = []
        for hop in reversed(route.hops):
            requested = chosen[hop.inverse]
            sizes_to, sizes_from = ([flag_bytes(n) for n in counts] for counts in (hop.receive, hop.send))
            message = comm.send_buffer(hop.group, sum(sizes_to), requested.device)
            for target, flags in zip(_pieces(message, sizes_to), _pieces(requested, hop.receive), strict=True):
                target.copy_(pack_flags(flags, len(flags)))
            pieces = comm.all_to_all(hop.group, message, sizes_to, sizes_from, "choosing rows to exchange early")
            self._count(counter, hop.ranks, [0] * len(hop.ranks), sizes_to)
            awaited = torch.cat([unpack_flags(piece, n) for piece, n in zip(pieces, hop.send, strict=True)])
            parts.insert(0, (hop.part(requested, awaited), hop.part(~requested, ~awaited)))
            chosen = torch.empty_like(awaited)
            chosen[hop.order] = awaited
        first, second = ([hops[side] for hops in parts] for side in (0, 1))
        return Route(route.keys, first), Route(route.keys, second)

    def fetch_rows(
        self, comm: Communicator, route: Route, read_owned: ReadRows, out: torch.Tensor, counter: TrafficCounter,
        step: int = 0,
    ) -> None:  # fmt: skip
        """Fill `out` with the rows of the route's keys from their owners; of a part of a route, those of its hops.

        All ranks call it.

        read_owned   reads rows of `route.owned`, by index
        out          float32[keys, n]
        """
        floats, device, read = out.shape[1], out.device, read_owned
        for level, hop in reversed(list(enumerate(route.hops))):
            wires = self._wires(hop.ranks)
            sizes_to = [n * wire_bytes(wire, floats) for n, wire in zip(hop.receive, wires, strict=True)]
            sizes_from = [n * wire_bytes(wire, floats) for n, wire in zip(hop.send, wires, strict=True)]
            message = comm.send_buffer(hop.group, sum(sizes_to), device)
            if set(wires) == {"fp32"}:
                read(hop.inverse, _as_rows(message, floats))
            else:
                plain = torch.empty(sum(hop.receive), floats, device=device)
                read(hop.inverse, plain)
                parts = zip(
                    _pieces(message, sizes_to), _pieces(plain, hop.receive), _split(hop.received, hop.receive), wires,
                    strict=True,
                )  # fmt: skip
                for target, rows, keys, wire in parts:
                    target.copy_(encode(rows, wire, keys, step, self._salt))
            pieces = comm.all_to_all(hop.group, message, sizes_to, sizes_from, "exchanging rows")
            self._count(counter, hop.ranks, hop.receive, sizes_to)
            keys_below = len(route.hops[level - 1].unique)
            values = out if level == 0 else torch.empty(keys_below, floats, device=device)
            for piece, index, wire in zip(pieces, _pieces(hop.order.to(device), hop.send), wires, strict=True):
                put_rows(values, index, decode(piece, wire, floats))
            read = functools.partial(take_rows, values)

    # ---- gradients

    def reduce_gradients(
        self, comm: Communicator, route: Route, values: torch.Tensor, present: torch.Tensor | None,
        counter: TrafficCounter, step: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return float32[owned, dim], the sums over all ranks for the owned keys, and a bool mask of keys with any.

        values    one gradient per key of the route
        present   bool: whether this rank has a gradient for the key; None: for all keys
        """
        for hop in route.hops:
            total = self._reduce_hop(comm, hop, values, present, counter, step)
            values, present = total.values, total.present
        assert present is not None
        return values, present

    def _reduce_hop(
        self, comm: Communicator, hop: Hop, values: torch.Tensor, present: torch.Tensor | None,
        counter: TrafficCounter, step: int,
    ) -> RowSum:  # fmt: skip
        dim, wires, device = values.shape[1], self._wires(hop.ranks), values.device
        sizes_to = [flag_bytes(n) + n * wire_bytes(wire, dim) for n, wire in zip(hop.send, wires, strict=True)]
        sizes_from = [flag_bytes(n) + n * wire_bytes(wire, dim) for n, wire in zip(hop.receive, wires, strict=True)]
        message = comm.send_buffer(hop.group, sum(sizes_to), device)
        parts = zip(
            _pieces(message, sizes_to), _pieces(hop.order.to(device), hop.send), _split(hop.sent, hop.send), wires,
            strict=True,
        )  # fmt: skip
        plain = set(wires) == {"fp32"}
        for target, index, keys, wire in parts:
            flags_end = flag_bytes(len(index))
            target[:flags_end].copy_(pack_flags(None if present is None else present[index], len(index)))
            if plain:
                take_rows(values, index, _as_rows(target[flags_end:], dim))
            else:
                target[flags_end:].copy_(encode(values.index_select(0, index), wire, keys, step, self._salt + 1))
        pieces = comm.all_to_all(hop.group, message, sizes_to, sizes_from, "exchanging gradients")
        self._count(counter, hop.ranks, hop.send, sizes_to)
        received = list(zip(pieces, hop.receive, _pieces(hop.inverse.to(device), hop.receive), wires, strict=True))
        total: RowSum | None = None
        for senders in self._senders_by_node(hop):
            node_sum = RowSum(len(hop.unique), dim, device)
            for sender in senders:
                piece, count, index, wire = received[sender]
                flags_end = flag_bytes(count)
                node_sum.add(index, decode(piece[flags_end:], wire, dim), unpack_flags(piece[:flags_end], count))
            total = node_sum if total is None else total.plus(node_sum)
        assert total is not None
        return total

    def _senders_by_node(self, hop: Hop) -> list[list[int]]:
        """Group the hop's senders, as positions in the group, by the sum they are added to first.

        With "flat" these are the nodes; with two hops each hop is one sum.
        """
        if self.hops != "flat":
            return [list(range(len(hop.ranks)))]
        nodes = [self._node_of[rank] for rank in hop.ranks]
        return [[i for i, node in enumerate(nodes) if node == number] for number in dict.fromkeys(nodes)]

    # ---- wire formats and counters

    def _wires(self, ranks: tuple[int, ...]) -> list[Wire]:
        node = self._node_of[self.topology.rank]
        return ["fp32" if self._node_of[rank] == node else self.wire for rank in ranks]

    def _count(self, counter: TrafficCounter, ranks: tuple[int, ...], items: list[int], sizes: list[int]) -> None:
        me = self.topology.rank
        for rank, count, size in zip(ranks, items, sizes, strict=True):
            if rank == me:
                continue
            if self._node_of[rank] == self._node_of[me]:
                counter.items_within += count
                counter.bytes_within += size
            else:
                counter.items_between += count
                counter.bytes_between += size


def _as_rows(message: torch.Tensor, floats: int) -> torch.Tensor:
    return message.view(torch.float32).view(-1, floats)


def _index_tensor(indices: Any) -> torch.Tensor:
    return torch.from_numpy(indices.astype(np.int64))


def _pieces(values: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = torch.split(values, sizes)
    return pieces


def _split(values: Any, sizes: Any) -> list[Any]:
    return np.split(values, np.cumsum(sizes)[:-1])


def _write_keys(message: Keys, sorted_keys: Sequence[Keys], sends: Ints) -> None:
    """Write for each rank the number of keys of each batch, then the keys. `sends` is [rank, batch]."""
    pieces = [_split(keys, sends[:, i]) for i, keys in enumerate(sorted_keys)]
    end = 0
    for rank, counts in enumerate(sends):
        parts = [counts.view(np.uint64), *(piece[rank] for piece in pieces)]
        begin, end = end, end + sum(map(len, parts))
        np.concatenate(parts, out=message[begin:end])
