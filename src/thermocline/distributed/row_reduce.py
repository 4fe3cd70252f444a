"""Gather, scatter and ordered sum of rows, for `row_exchange`.

`RowSum` adds rows of several senders in a given order, so that sums have the bits of one process.

Called on the thread of the row exchange. Nothing here blocks. C++ on the CPU, torch on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch

from thermocline.core import _core


def take_rows(values: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = values[index[i]]"""
    if values.is_cpu:
        _core.take_rows(out.numpy(), values.contiguous().numpy(), index.numpy())
    else:
        torch.index_select(values, 0, index, out=out)


def put_rows(out: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """out[index[i]] = values[i]"""
    if values.is_cpu:
        _core.put_rows(out.numpy(), values.contiguous().numpy(), index.numpy())
    else:
        out.index_copy_(0, index, values)


LIMBS = 4
"""Floats per integer of `to_limbs`."""


def to_limbs(integers: torch.Tensor) -> torch.Tensor:
    """Convert int64[n, k] to float32[n, k * LIMBS], whose sums over up to 256 rows are exact."""
    shifts = torch.arange(0, 64, 16, device=integers.device)
    return ((integers[:, :, None] >> shifts) & 0xFFFF).to(torch.float32).flatten(1)


def from_limbs(limbs: torch.Tensor) -> torch.Tensor:
    """Convert sums of `to_limbs` to int64[n, k], modulo 2**64."""
    shifts = torch.arange(0, 64, 16, device=limbs.device)
    return (limbs.reshape(len(limbs), limbs.shape[1] // LIMBS, LIMBS).to(torch.int64) << shifts).sum(2)


class RowSum:
    """Sums of rows by index, in the order of the calls to `add`. The first row of an index is copied."""

    def __init__(self, count: int, dim: int, device: torch.device) -> None:
        self.values = torch.zeros(count, dim, device=device)
        self.present = torch.zeros(count, dtype=torch.bool, device=device)
        """Which indices have any row."""

    def add(self, index: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add values[i] to row index[i] where mask[i] is set; without a mask, everywhere. Indices must be unique."""
        if self.values.is_cpu:
            flags = None if mask is None else mask.numpy().view(np.uint8)
            present = self.present.numpy().view(np.uint8)
            _core.add_rows(self.values.numpy(), present, index.numpy(), values.contiguous().numpy(), flags)
            return
        if mask is not None:
            index, values = index[mask], values[mask]
        before = self.present[index]
        self.values[index] = torch.where(before[:, None], self.values[index] + values, values)
        self.present[index] = True

    def plus(self, other: RowSum) -> RowSum:
        """Add all rows of `other` to this sum, in place, and return it."""
        both = torch.where((self.present & other.present)[:, None], self.values + other.values, other.values)
        self.values = torch.where(other.present[:, None], both, self.values)
        self.present = self.present | other.present
        return self
