"""Layout of a batch plan in device memory: all its lists in one allocation, so that one copy moves a plan.

A plan that is copied into fixed buffers (training/graph_step.py) must have their sizes, although the number of ids
varies from batch to batch: lists are as long as their capacity, which is a little more than the ids, and kernels read
the counts from device memory. A bag with one vector per id has no spare capacity: its number of vectors is its shape.
"""

from __future__ import annotations

import dataclasses
import functools
import threading

import torch

from thermocline.kernels.segments import segment_words

_MOST_LAYOUTS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class BagLayout:
    """Sizes of one bag."""

    ids: int
    """Capacity."""
    bags: int | None
    """Number of pooled vectors; None: one per id."""
    weighted: bool
    mean: bool

    @property
    def vectors(self) -> int:
        """Number of vectors, and of rows of its gradient."""
        return self.ids if self.bags is None else self.bags


@dataclasses.dataclass(frozen=True)
class PlanLayout:
    """Sizes of all bags of a plan. `Capacities` makes one object for equal layouts, which computes its sizes once."""

    bags: tuple[BagLayout, ...]

    @functools.cached_property
    def ids(self) -> int:
        """Capacity."""
        return sum(bag.ids for bag in self.bags)

    @property
    def lists_rows(self) -> bool:
        """Whether the gradient of an occurrence is in another row than its position."""
        return len(self.bags) > 1 or any(bag.bags is not None for bag in self.bags)

    @property
    def lists_coefs(self) -> bool:
        """Whether gradients have coefficients other than 1."""
        return any(bag.weighted or bag.mean for bag in self.bags)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        sizes = []
        for bag in self.bags:
            sizes += [bag.ids, 0 if bag.bags is None else 2 * (bag.bags + 1), bag.ids * bag.weighted]
        sizes += [segment_words(self.ids), self.ids * self.lists_rows, self.ids * self.lists_coefs]
        return [-(-size // 4) * 4 for size in sizes]  # aligned to 16 bytes, for which kernels are compiled

    @functools.cached_property
    def words(self) -> int:
        """Size of the allocation, in 32-bit words."""
        return sum(self._sizes)

    def split(self, memory: torch.Tensor) -> PlanMemory:
        """Cut int32[words] into the lists."""
        *bags, segments, rows, coefs = torch.split(memory, self._sizes)
        return PlanMemory(
            slots=[part[: bag.ids] for bag, part in zip(self.bags, bags[::3], strict=True)],
            offsets=[
                None if bag.bags is None else part.view(torch.int64)[: bag.bags + 1]
                for bag, part in zip(self.bags, bags[1::3], strict=True)
            ],
            weights=[
                part.view(torch.float32)[: bag.ids] if bag.weighted else None
                for bag, part in zip(self.bags, bags[2::3], strict=True)
            ],
            segments=segments,
            rows=rows[: self.ids] if self.lists_rows else None,
            coefs=coefs.view(torch.float32)[: self.ids] if self.lists_coefs else None,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlanMemory:
    """The lists of one plan, each as long as its capacity."""

    slots: list[torch.Tensor]
    """Per bag: int32."""
    offsets: list[torch.Tensor | None]
    """Per bag: int64[bags + 1]."""
    weights: list[torch.Tensor | None]
    """Per bag: float32."""
    segments: torch.Tensor
    """int32[segment_words(ids)], for `find_segments`."""
    rows: torch.Tensor | None
    """int32: per occurrence in segment order, the row of its gradient among those of all bags; None: its position."""
    coefs: torch.Tensor | None
    """float32: per occurrence in segment order, the factor of its gradient; None: all are 1."""


class Capacities:
    """Capacities of layouts: they only grow, so that plans of batches that differ only in ids have one layout.

    Thread safety: any thread; the stages of a pipeline lay out different batches at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.version = 0
        """Changes when a capacity grows: later layouts may differ."""
        self._largest: dict[tuple[tuple[int | None, bool, bool], ...], list[int]] = {}
        self._layouts: dict[tuple[BagLayout, ...], PlanLayout] = {}

    def layout(self, bags: list[BagLayout]) -> PlanLayout:
        """Return the layout for bags with these numbers of ids."""
        key = tuple((bag.bags, bag.weighted, bag.mean) for bag in bags)
        with self._lock:
            before = self._largest.get(key, [0] * len(bags))
            pairs = zip(bags, before, strict=True)
            sizes = [bag.ids if bag.bags is None else max(size, _rounded_up(bag.ids)) for bag, size in pairs]
            if sizes != before:
                self._largest[key] = sizes
                self.version += 1
            shape = tuple(dataclasses.replace(bag, ids=size) for bag, size in zip(bags, sizes, strict=True))
            if (layout := self._layouts.get(shape)) is None:
                if len(self._layouts) == _MOST_LAYOUTS:
                    self._layouts.clear()
                layout = self._layouts[shape] = PlanLayout(shape)
            return layout


def _rounded_up(ids: int) -> int:
    """Round up to a multiple of an eighth of its power of two."""
    step = 1 << max(4, ids.bit_length() - 4)
    return -(-ids // step) * step
