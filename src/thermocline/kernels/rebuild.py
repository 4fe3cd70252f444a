"""rebuild: the index constructed again from the residents, without the entries of removed keys."""

from __future__ import annotations

import torch
import triton.language as tl

from thermocline.kernels import INTERPRETED
from thermocline.kernels.find import LANES
from thermocline.kernels.index import EMPTY_KEY, ENTRIES, Index, claim, slot_offset
from thermocline.kernels.insert import Residents
from thermocline.kernels.launch import blocks, kernel


@kernel(do_not_specialize=["used"])
def _rebuild_kernel(slot_keys, used, words, halves, blocks, strides, parked, LANES: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = slot < used
    key = tl.load(slot_keys + slot, mask=active, other=0)
    block, entry, _ = claim(words, parked + slot, key, active, blocks, strides)
    tl.store(halves + slot_offset(block, entry), slot.to(tl.int32), mask=active & (block >= 0))


def rebuild(index: Index, residents: Residents, used: int) -> None:
    """Clear `index`, then insert the keys of the first `used` slots."""
    index.clear()
    if used:
        grid = (blocks(used, LANES),)
        parked = torch.empty(grid[0] * LANES if INTERPRETED else 0, dtype=torch.int64, device=index.words.device)
        _rebuild_kernel[grid](residents.keys, used, *index.arguments, parked, LANES=LANES, num_warps=1)


def entries_reference(index: Index) -> tuple[torch.Tensor, torch.Tensor]:
    """Read an index in plain torch: int64 keys that have a slot, and their int32 slots, in unspecified order."""
    keys = index.words.view(-1, 8)[:, :ENTRIES].clone()
    slots = index.halves.view(-1, 16)[:, 2 * ENTRIES : 3 * ENTRIES]
    keys[-1][keys[-1] == EMPTY_KEY ^ 1] = EMPTY_KEY  # the last block stores EMPTY_KEY under its alias
    resident = slots >= 0
    return keys[resident], slots[resident]
