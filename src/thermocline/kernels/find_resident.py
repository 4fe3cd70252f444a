"""find_resident: the slots of a batch whose keys are expected to be resident. One pass; inserts nothing.

`find_or_insert` gives the same slots and the same `last_use` if all keys are resident. If some are not, the caller
calls it afterwards for the same batch: to update `last_use` twice for one batch is the same as once.
"""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels.evict import VISITS, used_again
from thermocline.kernels.find import LANES, find_reference
from thermocline.kernels.index import Index, search
from thermocline.kernels.insert import Residents
from thermocline.kernels.launch import blocks, kernel, stored_int


@kernel(do_not_specialize=["count", "now"])
def _find_resident_kernel(
    keys, count, words, halves, blocks, strides, last_use, now, slots, missing,
    STORED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    now = stored_int(now, STORED)
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    slot = search(words, halves, tl.load(keys + i, mask=active, other=0), active, blocks, strides)
    hit = active & (slot >= 0)
    tl.store(slots + i, tl.maximum(slot, -1), mask=active)
    use = tl.load(last_use + slot, mask=hit, other=0)
    tl.store(last_use + slot, used_again(use, now), mask=hit & (use >> VISITS != now))  # frequent keys: written once
    number = tl.sum((active & (slot < 0)).to(tl.int64), 0)
    if number > 0:
        tl.atomic_add(missing, number, sem="relaxed")


def find_resident(
    index: Index,
    residents: Residents,
    keys: torch.Tensor,
    slots: torch.Tensor,
    missing: torch.Tensor,
    *,
    now: int | torch.Tensor,
) -> None:
    """Write the slot of each int64 key to `slots`, int32[keys], and pin it until batch `now` is completed.

    missing   int64[1] in device memory: the number of ids whose key has no slot is added to it; their slot is -1
    now       number of the batch, or int64[1] in device memory. Counts visits, as find_or_insert(count_visits=True)
    """
    grid = (blocks(len(keys), LANES),)
    _find_resident_kernel[grid](
        keys, len(keys), *index.arguments, residents.last_use, now, slots, missing,
        STORED=not isinstance(now, int), LANES=LANES, num_warps=1,
    )  # fmt: skip


def find_resident_reference(residents: Residents, keys: torch.Tensor, *, used: int, now: int) -> torch.Tensor:
    """`find_resident` in plain torch, without an index: int32[keys] slots. Changes `residents`."""
    slots = find_reference(residents.keys[:used], keys)
    hit = slots[slots >= 0].unique().long()
    use, most = residents.last_use[hit], (1 << VISITS.value) - 1
    again = (now << VISITS.value) | ((use & most) + 1).clamp(max=most)
    residents.last_use[hit] = torch.where(use >> VISITS.value == now, use, again)
    return slots
