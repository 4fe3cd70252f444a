"""Batches of a table over several ranks: keys travel ahead, rows when the batch is trained, gradients in its step.

plan     the keys of a window's batches go to their owners            (thread "pull", in window order, everywhere)
pin      the owner pins what any rank asks of it
prepare  places and gradient plans per bag, as for a table of one rank
fetch    row values, after the owner has applied the preceding step   (the caller's thread, from here on)
sums     gradients back; each owner has the sum over all ranks of its keys
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thermocline.batch import WorkingSet
from thermocline.distributed.communicator import Communicator, Groups
from thermocline.distributed.row_exchange import Route, RowExchange
from thermocline.distributed.row_reduce import RowSum, take_rows
from thermocline.embedding.batch_plan import Remote
from thermocline.tiers.dram_backend import DramBackend

if TYPE_CHECKING:
    from thermocline.distributed.sharded_table import ShardedTable

_NO_KEYS = np.empty(0, np.uint64)

Collected = tuple[dict[Any, Any], WorkingSet]


@dataclasses.dataclass(slots=True, eq=False)
class Planned:
    """A window's batches of one table, between the ranks."""

    collected: Sequence[Collected]
    routes: list[Route]
    tier: Any = None
    pins: Any = None
    slots: list[Any] = dataclasses.field(default_factory=list)
    """Per batch: of the keys that this rank owns."""

    def release(self) -> None:
        """Unpins, if nobody else holds the pins."""
        if self.pins is not None:
            pins, self.pins = self.pins, None
            pins.release()


class Ranks:
    """The other ranks, as one table sees them."""

    def __init__(self, table: ShardedTable, groups: Groups, exchange: RowExchange) -> None:
        self._table = table
        self.groups = groups
        self.exchange = exchange
        self.traffic = exchange.traffic

    # ---- ahead of training

    def plan(self, collected: Sequence[Collected], comm: Communicator | None = None) -> Planned:
        """All ranks call it, window by window, with as many batches."""
        keys = [working_set.keys for _, working_set in collected]
        return Planned(collected, self.exchange.plan(comm or self.groups.ahead, keys, self.traffic.keys))

    def plan_nothing(self, batches: int) -> None:
        """Takes part in a window's plan, asking for nothing."""
        self.exchange.plan(self.groups.ahead, [_NO_KEYS] * batches, self.traffic.keys)

    def read_nothing(self) -> None:
        """Takes part in what others read of one batch, for evaluation."""
        self.read(_NO_KEYS, torch.empty(0, self._table.dim))

    def pin(self, planned: Planned) -> None:
        """What any rank asks of this one. Raises `BudgetError` when it cannot all be in memory at once."""
        table, owned = self._table, [route.owned for route in planned.routes]
        tier = table.dram
        if table.hbm is not None:
            planned.pins = table.hbm.pin(table.hbm.stage(owned))
            planned.slots = list(planned.pins.slots.split([len(keys) for keys in owned]))
        else:
            union = WorkingSet.of(np.concatenate(owned))
            planned.pins = tier.pin(union.keys)
            slots = planned.pins.slots()[union.inverse]
            planned.slots = np.split(slots, np.cumsum([len(keys) for keys in owned])[:-1])
        planned.tier = tier

    def load(self, planned: Planned) -> None:
        """Brings the rows to the GPU, if that is where they are trained."""
        if self._table.hbm is not None:
            self._table.hbm.load(planned.pins)
            for route in planned.routes:
                route.move(self._table.hbm.device)

    def prepare(self, planned: Planned) -> list[Any]:
        """Ready but for the rows' values."""
        gpu = self._table.gpu
        if gpu is not None:
            inverse = np.concatenate([working_set.inverse for _, working_set in planned.collected])
            batches: list[Any] = list(gpu.prepare([parts for parts, _ in planned.collected], planned.pins, inverse))
        else:
            batches = [
                DramBackend.prepare(planned.tier, parts, ws, np.arange(len(ws), dtype=np.uint32), planned.pins)
                for parts, ws in planned.collected
            ]
        for batch, route, slots in zip(batches, planned.routes, planned.slots, strict=True):
            batch.remote = Remote(route, slots)
        return batches

    # ---- training

    def fetch(self, prepared: Any) -> None:
        """The rows of a batch, as they are now: all ranks call it, batch by batch."""
        table = self._table
        count, step = len(prepared.remote.route.keys), table.step_count
        if table.gpu is not None:
            prepared.use()
        rows, out = table.empty_rows(count)
        owned = functools.partial(self._give, prepared.remote.slots)
        self.exchange.fetch_rows(self.groups.train, prepared.remote.route, owned, out, self.traffic.rows, step)
        prepared.rows, prepared.remote.step = rows, step

    def _give(self, slots: Any, places: torch.Tensor, out: torch.Tensor) -> None:
        """The weights of rows that this rank owns, as they are now."""
        if self._table.gpu is None:
            self._table.training.weights(slots[places.numpy()], out.numpy())
            return
        if slots.is_cuda:  # made on the planner's stream
            slots.record_stream(torch.cuda.current_stream(slots.device))
        out.copy_(self._table.training.weights(slots[places.to(slots.device)]))

    def sums(self, batches: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Keys, slots and summed gradients of the keys that this rank owns: all ranks call it, step by step.

        batches     fetched since the last step, as many on every rank
        gradients   what backward has left of them here, in the order of the forward passes
        """
        table = self._table
        route = self.exchange.merge_routes([batch.remote.route for batch in batches])
        device = torch.device("cpu") if table.hbm is None else table.hbm.device
        values, present = self._mine(batches, gradients, len(route.keys), device)
        total, has = self.exchange.reduce_gradients(
            self.groups.train, route, values, present, self.traffic.gradients, table.step_count
        )
        slots = self._slots(batches, device)
        if bool(has.all()):
            return route.owned, slots, total
        return route.owned[has.cpu().numpy()], slots[has], total[has]

    def _mine(
        self, batches: Sequence[Any], gradients: Sequence[Any], count: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's own sums, a row per key of the route, and which of them it has; none: all."""
        if not gradients:
            nothing = RowSum(count, self._table.dim, device)
            return nothing.values, nothing.present
        if len(batches) > 1:
            gradients = self._renumbered(batches, gradients)
        places, sums = (_tensor(found) for found in self._table.training.sums(gradients))
        if len(places) == count and torch.equal(places, torch.arange(count, dtype=places.dtype, device=device)):
            return sums, None  # the usual case: they are in the route's order
        mine = RowSum(count, self._table.dim, device)
        mine.add(places.long(), sums)
        return mine.values, mine.present

    def _renumbered(self, batches: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The same gradients with places among the keys of all batches, in the joined route's order."""
        keys = [batch.remote.route.keys for batch in batches]
        joined = WorkingSet.of(np.concatenate(keys))
        places = np.split(joined.inverse, np.cumsum([len(own) for own in keys])[:-1])
        of_batch = {id(batch): own for batch, own in zip(batches, places, strict=True)}
        changed = []
        for gradient in gradients:
            own, part = of_batch[id(gradient.prepared)], gradient.part
            if self._table.gpu is None:
                part = dataclasses.replace(part, id_slots=own[part.id_slots])
            else:
                index = torch.from_numpy(own.view(np.int32)).to(part.slots.device)
                part = dataclasses.replace(part, slots=index[part.slots.long()])
            changed.append(dataclasses.replace(gradient, part=part))
        return changed

    @staticmethod
    def _slots(batches: Sequence[Any], device: torch.device) -> torch.Tensor:
        """Of the joined route's owned keys."""
        slots = torch.cat([_tensor(batch.remote.slots).to(device) for batch in batches])
        if len(batches) == 1:
            return slots
        found = WorkingSet.of(np.concatenate([batch.remote.route.owned for batch in batches]))
        first = found.order[found.starts[:-1]].astype(np.int64)
        return slots[torch.from_numpy(first).to(device)]

    # ---- evaluation

    def read(self, keys: Any, out: torch.Tensor) -> None:
        """Fills the first numbers of each key's row, as many as `out` has, from their owners; inserts nothing.

        All ranks call it.
        """
        comm = self.groups.read
        comm.require_free()
        (route,) = self.exchange.plan(comm, [keys], self.traffic.read_keys)
        owned = torch.from_numpy(np.ascontiguousarray(self._table.read_here(route.owned)[:, : out.shape[1]]))
        give = functools.partial(take_rows, owned)
        self.exchange.fetch_rows(comm, route, give, out, self.traffic.read_rows, self._table.step_count)


def _tensor(array: Any) -> torch.Tensor:
    """uint32 slots become int32: torch can do nothing with the former."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array)
