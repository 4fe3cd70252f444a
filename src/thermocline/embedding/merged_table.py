"""`MergedTable`: the rows of several tables of `tc.Tiers`, stored as one table.

Keys are salted ids (`member_keys.py`), bags are joined (`merged_bags.py`): a batch has one plan, one pull, one pooling
and one update for all tables, whatever their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from thermocline.arrays import Floats, Keys
from thermocline.batch import Batch
from thermocline.embedding.batch_plan import BagSpec, BatchPlan
from thermocline.embedding.expiry import Expiry
from thermocline.embedding.member_keys import Member
from thermocline.embedding.merged_bags import MergedBags, PooledParts
from thermocline.embedding.table import Table
from thermocline.embedding.table_spec import TableSpec
from thermocline.errors import ThermoclineError
from thermocline.tiers.local_backend import make_local_backend

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from thermocline.embedding.backend import RowBackend


class MergedTable(Table):
    """The rows of several tables, by salted key. Rows are read and loaded through the `MemberTable`s."""

    def __init__(self, members: Sequence[Member], bags: MergedBags, **arguments: Any) -> None:
        """
        members     the tables
        bags        their bags, made before the table was opened
        arguments   of `tc.Table`
        """

        def make_backend(spec: TableSpec, device: str, epoch: int | None) -> RowBackend:
            self.spec = dataclasses.replace(spec, members=tuple(members))
            return make_local_backend(self.spec, device, epoch)

        self._merged_bags = bags
        self._pooled_parts = self.pooled = PooledParts()
        super().__init__(make_backend=make_backend, **arguments)
        self.use_bags(bags)

    # ---- bags

    def joined(self, spec: BagSpec) -> BagSpec | None:
        return self._merged_bags.joined(spec)

    def covering(self, plan: BatchPlan, spec: BagSpec) -> BagSpec | None:
        if spec in plan.bags:
            return spec
        whole = self.joined(spec)
        if whole is not None and whole in plan.bags:
            return whole
        return _covering(plan.bags, spec)

    def _with_others(self, batch: Batch, specs: Sequence[BagSpec] | None, *, trained: bool) -> Sequence[BagSpec]:
        # A batch of a module of `tc.nn`. Another one of one named field has a plan for each bag.
        if specs and batch.fields == 1 and batch.names is not None:
            return specs
        planned = self._bags.specs(trained=trained or None, batch=batch)
        wanted = dict.fromkeys(_covering(planned, spec) or spec for spec in specs or ())
        return [*wanted, *(spec for spec in planned if trained and spec not in wanted)]

    def add_partial_gradients(
        self,
        order: int,
        batch: Batch,
        whole: BagSpec,
        weights: torch.Tensor | None,
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """Keep the gradients of some parts of a joined spec until the step. The others are not joined any more.

        A plan of its own has the rows of these parts only: zeros as gradients would change the others.
        """
        import torch

        used = {spec: grad for spec, grad in zip(whole.parts, grads, strict=True) if grad is not None}
        self._merged_bags.keep_apart([spec for spec in whole.parts if spec not in used])
        plan = self.prepare(batch, list(used))
        pins = plan.pins
        assert pins is not None
        try:
            for spec, grad in used.items():
                bag = plan.bags[spec]
                if weights is not None:
                    positions = batch.positions(spec.fields)
                    chosen = weights if positions is None else weights[torch.from_numpy(positions).to(weights.device)]
                    bag = self.backend.with_weights(plan, bag, chosen.to(torch.float32, copy=True).contiguous())
                values = grad.detach().to(torch.float32, copy=True).contiguous().view(-1, self.dim)
                self.add_gradient(order, batch, plan, bag, values, lambda: True, spec)
        finally:
            pins.release()

    # ---- rows change: vectors that were pooled before are not used any more

    def discard_gradients(self) -> None:
        self._pooled_parts.clear()
        super().discard_gradients()

    def expire(self, expiry: Expiry) -> int:
        self._pooled_parts.clear()
        return super().expire(expiry)

    def expire_member(self, member: Member, expiry: Expiry) -> int:
        """Delete rows of one of the tables: see `Table.expire`."""
        if expiry.decay != 1 and len(self.spec.members) > 1:
            others = [other.name for other in self.spec.members if other != member]
            raise ThermoclineError(
                f"table {member.name!r}: Expiry.decay is {expiry.decay}: it changes show and click of all rows, also "
                f"those of tables {others}, which are stored with it: leave decay out, or declare the table by "
                "tiers.table(..., expiry=...): it then has a storage of its own"
            )
        self._pooled_parts.clear()
        return self._expire_now(expiry, member)

    # ---- rows by key: only through the members, which know their ids

    def write_member(self, keys: Keys, rows: Any, state: Any) -> None:
        """Load rows by salted key."""
        self._pooled_parts.clear()
        super().load_rows(keys, rows, state)

    def load_rows(self, keys: Any, rows: Any, state: Any = None) -> None:
        self._refuse("load_rows")

    def read(self, keys: Any) -> Floats:
        self._refuse("read")

    def read_rows(self, keys: Any) -> tuple[Floats, Floats]:
        self._refuse("read_rows")

    def read_statistics(self, keys: Any) -> dict[str, npt.NDArray[Any]]:
        self._refuse("read_statistics")

    def rows(self, batch_rows: int = 65536) -> Iterator[tuple[Keys, Floats]]:
        self._refuse("rows")

    def _refuse(self, method: str) -> NoReturn:
        names = [member.name for member in self.spec.members]
        raise ThermoclineError(
            f"{self.name!r} stores the rows of tables {names}, whose ids may be equal: use tiers[{names[0]!r}].{method}"
        )


def _covering(specs: Any, spec: BagSpec) -> BagSpec | None:
    """Return the one of `specs` that is `spec` or to which it was joined; None: there is none."""
    return next((whole for whole in specs if whole == spec or spec in whole.parts), None)
