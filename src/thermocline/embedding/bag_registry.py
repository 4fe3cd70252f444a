"""`BagRegistry`: the bags of a table, so that batches can be planned before their forward passes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from thermocline.embedding.batch_plan import BagSpec


class BagRegistry:
    """The bags of one table, referenced weakly, and which of them are trained. Thread-safe."""

    def __init__(self) -> None:
        self._specs: weakref.WeakKeyDictionary[Any, tuple[BagSpec, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # bags may be made while a pipeline collects
        self.table_frozen = False
        """Whether all bags are frozen, also those that are not frozen themselves."""

    def add(self, bag: Any, specs: tuple[BagSpec, ...]) -> None:
        """Register what a bag reads."""
        with self._lock:
            self._specs[bag] = specs

    def trains(self, bag: Any) -> bool:
        """Return whether neither the table nor the bag is frozen."""
        return not self.table_frozen and bag.requires_grad

    @property
    def frozen(self) -> bool:
        """Whether the table is frozen, or each of its bags is."""
        bags = self.bags
        return self.table_frozen or (bool(bags) and not any(bag.requires_grad for bag in bags))

    @property
    def bags(self) -> list[Any]:
        """All bags, in the order in which they were made."""
        with self._lock:
            return list(self._specs)

    def specs(self, *, trained: bool | None = None) -> list[BagSpec]:
        """Return the specs of all bags, or of those that are trained or frozen, each once.

        The order does not depend on memory addresses.
        """
        with self._lock:
            bags = [bag for bag in self._specs if trained is None or self.trains(bag) == trained]
            specs = {spec for bag in bags for spec in self._specs[bag]}
        return sorted(specs, key=lambda spec: (isinstance(spec.fields[0], str), spec.fields, spec.pooling))
