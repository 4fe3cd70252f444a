"""`BagRegistry`: the bags of a table, so that batches can be planned before their forward passes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from thermocline.batch import Batch
from thermocline.embedding.batch_plan import BagSpec


class BagRegistry:
    """The bags of one table, referenced weakly, and which of them are trained. Thread-safe."""

    def __init__(self) -> None:
        self._refs: tuple[weakref.ref[Any], ...] = ()
        self._bag_specs: weakref.WeakKeyDictionary[Any, tuple[BagSpec, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # bags may be made while a pipeline collects
        self._known: dict[tuple[bool | None, ...], list[BagSpec]] = {}
        """Results of `specs`, by its arguments. Until a bag is added, a number of bags stands for the bags themselves,
        because they only become fewer."""
        self.table_frozen = False
        """Whether all bags are frozen, also those that are not frozen themselves."""

    def add(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """Register what a bag reads."""
        with self._lock:
            self._bag_specs[bag] = specs
            refs = [ref for ref in self._refs if (known := ref()) is not None and known is not bag]
            self._refs = (*refs, weakref.ref(bag))
            self._known = {}

    def trains(self, bag: Any) -> bool:
        """Return whether neither the table nor the bag is frozen."""
        return not self.table_frozen and bag.requires_grad

    @property
    def frozen(self) -> bool:
        """Whether the table is frozen, or each of its bags is."""
        if self.table_frozen:
            return True
        bags = self.bags
        return bool(bags) and not any(bag.requires_grad for bag in bags)

    @property
    def bags(self) -> list[Any]:
        """All bags, in the order in which they were made."""
        return [bag for ref in self._refs if (bag := ref()) is not None]

    def specs(self, *, trained: bool | None = None, batch: Batch | None = None) -> list[BagSpec]:
        """Return the specs of all bags, or of those that are trained or frozen, each once.

        The order does not depend on memory addresses. The result is shared: do not change it. `batch`: see
        `MergedBags`.
        """
        known, bags = self._known, self.bags
        key = (trained, self.table_frozen, *[bag.requires_grad for bag in bags])
        specs = known.get(key)
        if specs is None:
            chosen = [bag for bag in bags if trained is None or self.trains(bag) == trained]
            with self._lock:
                unique = {spec for bag in chosen for spec in self._bag_specs[bag]}
            specs = sorted_specs(unique)
            known[key] = specs  # not in `self._known`, which `add` may have replaced
        return specs


def sorted_specs(specs: Iterable[BagSpec]) -> list[BagSpec]:
    """Return specs in an order that depends on nothing else."""
    return sorted(specs, key=lambda spec: (isinstance(spec.fields[0], str), spec.fields, spec.pooling, spec.salts))
