"""`DramSlots`: the DRAM slot of every row in HBM, noted at its load, so that its push needs no lookup."""

from __future__ import annotations

import numpy as np
import torch

from thermocline.tiers.dram import DramTier, KnownSlots

UNKNOWN = -1
"""2**32 - 1 in the DRAM tier."""


class DramSlots:
    """One word per slot of the arena, in device memory; none if the DRAM tier moves rows, because it has a store.

    Reads and writes are in the order of the rows' own copies: `note` runs on the stream that fills slots, `known` on
    the stream that empties them.
    """

    def __init__(self, dram: DramTier, capacity: int, device: torch.device) -> None:
        size = capacity if dram.keeps_slots else 0
        self.memory = torch.full((size,), UNKNOWN, dtype=torch.int32, device=device)
        self._version = dram.slots_version
        """The version of all loads since `reset`: if rows were erased since, the DRAM tier compares their keys."""

    def buffer(self, rows: int) -> torch.Tensor | None:
        """Return page-locked memory for the DRAM slots of rows that are read; None: they are not kept."""
        if len(self.memory) == 0:
            return None
        return torch.empty(rows, dtype=torch.int32, pin_memory=self.memory.is_cuda)

    def note(self, slots: torch.Tensor, buffer: torch.Tensor | None) -> None:
        """Set the DRAM slots of rows that are loaded into `slots`, int32. On the current stream."""
        if buffer is not None:
            self.memory[slots.long()] = buffer.to(self.memory.device, non_blocking=True)

    def known(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return the DRAM slots of the rows in `slots`, int64, on the device. On the current stream."""
        return None if len(self.memory) == 0 else self.memory[slots]

    def for_push(self, known: torch.Tensor | None) -> KnownSlots | None:
        """Return what the DRAM tier needs for a push, given the result of `known` on the host."""
        return None if known is None else KnownSlots(known.numpy().view(np.uint32), self._version)

    def reset(self, dram: DramTier) -> None:
        """Forget all slots: they are those of another tier."""
        self.memory.fill_(UNKNOWN)
        self._version = dram.slots_version
