"""Rows between ranks: taken to be sent, put where they belong, or added.

`RowSum` adds rows of several sources in a given order, which is what makes a sum's bits those of one process.
"""

from __future__ import annotations

import numpy as np
import torch

from thermocline.core import _core


def take_rows(values: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = values[places[i]]"""
    if values.is_cpu:
        _core.take_rows(out.numpy(), values.contiguous().numpy(), places.numpy())
    else:
        torch.index_select(values, 0, places, out=out)


def put_rows(out: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """out[places[i]] = values[i]"""
    if values.is_cpu:
        _core.put_rows(out.numpy(), values.contiguous().numpy(), places.numpy())
    else:
        out.index_copy_(0, places, values)


class RowSum:
    """Rows by place, added in the order they come; a place's first is taken as it is."""

    def __init__(self, places: int, dim: int, device: torch.device) -> None:
        self.values = torch.zeros(places, dim, device=device)
        self.present = torch.zeros(places, dtype=torch.bool, device=device)
        """Which places have any."""

    def add(self, places: torch.Tensor, values: torch.Tensor, given: torch.Tensor | None = None) -> None:
        """`given`: bool per row, whether to add it; none: all. No place repeats."""
        if self.values.is_cpu:
            flags = None if given is None else given.numpy().view(np.uint8)
            present = self.present.numpy().view(np.uint8)
            _core.add_rows(self.values.numpy(), present, places.numpy(), values.contiguous().numpy(), flags)
            return
        if given is not None:
            places, values = places[given], values[given]
        before = self.present[places]
        self.values[places] = torch.where(before[:, None], self.values[places] + values, values)
        self.present[places] = True

    def plus(self, other: RowSum) -> RowSum:
        """This one and then the other, as one."""
        both = torch.where((self.present & other.present)[:, None], self.values + other.values, other.values)
        self.values = torch.where(other.present[:, None], both, self.values)
        self.present = self.present | other.present
        return self
