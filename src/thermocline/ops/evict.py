"""Who leaves: the slots used least recently, never one that a batch in flight needs; and their keys out of the index.

`last_use[slot]` is the number of the newest batch that needs the slot: it is pinned while that batch is not completed.
The oldest leave first, of equally old ones the lowest slots, so the choice does not depend on the order of threads. Two
passes over four bytes per slot, on the GPU: a histogram of ages, then the slots beyond the age that yields enough.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.ops import INTERPRETED
from thermocline.ops.find import LANES
from thermocline.ops.index import ABSENT, EMPTY, WIDTH, Index, home, look, next_block, slot_of
from thermocline.ops.launch import blocks

# What a plan counts, in device memory.
NEW = tl.constexpr(0)
EVICTED = tl.constexpr(1)
SHORT = tl.constexpr(2)
CLAIMED = tl.constexpr(3)
LOST = tl.constexpr(4)
EMPTIED = tl.constexpr(5)
_AGE = tl.constexpr(6)
_TAKE = tl.constexpr(7)
COUNTS = 8

_AGES = 1024
_TILE = 4096
_SPREAD = 4 if INTERPRETED else 1056


@triton.jit(do_not_specialize=["programs", "room"])
def _need_kernel(ends, programs, room, counts):
    """How many slots new keys need beyond the free ones; `ends`: running sums of new keys."""
    new = tl.load(ends + programs - 1).to(tl.int64)
    tl.store(counts + NEW, new)
    tl.store(counts + EVICTED, tl.maximum(new - room, 0))


@triton.jit(do_not_specialize=["now", "completed"])
def _ages_kernel(last_use, capacity, now, completed, counts, ages, TILE: tl.constexpr, AGES: tl.constexpr):
    if tl.load(counts + EVICTED) > 0:
        total = tl.zeros([AGES], tl.int32)
        for tile in range(tl.program_id(0), tl.cdiv(capacity, TILE), tl.num_programs(0)):
            slot = tile * TILE + tl.arange(0, TILE).to(tl.int64)
            use = tl.load(last_use + slot, mask=slot < capacity, other=0)
            may = (slot < capacity) & (use <= completed)
            total += tl.histogram(tl.minimum(now - use, AGES - 1), AGES, mask=may)
        age = tl.arange(0, AGES)
        tl.atomic_add(ages + age, total, mask=total > 0, sem="relaxed")


@triton.jit
def _age_kernel(ages, counts, AGES: tl.constexpr):
    """Beyond which age all leave, and how many of that age: or, if that is not enough, nobody."""
    need = tl.load(counts + EVICTED)
    if need > 0:
        age = tl.arange(0, AGES)
        number = tl.load(ages + age).to(tl.int64)
        all_of_them = tl.sum(number, 0)
        as_old = all_of_them - tl.cumsum(number, 0) + number  # of this age and older
        bound = tl.sum((as_old >= need).to(tl.int64), 0) - 1
        older = tl.sum(tl.where(age > bound, number, 0), 0)
        short = tl.maximum(need - all_of_them, 0)
        tl.store(counts + SHORT, short)
        tl.store(counts + EVICTED, tl.where(short > 0, 0, need))
        tl.store(counts + _AGE, tl.where(short > 0, AGES, bound))
        tl.store(counts + _TAKE, tl.where(short > 0, 0, need - older))


@triton.jit
def _tile_ages(last_use, capacity, now, completed, counts, TILE: tl.constexpr, AGES: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    use = tl.load(last_use + slot, mask=slot < capacity, other=0)
    may = (slot < capacity) & (use <= completed)
    age = tl.minimum(now - use, AGES - 1)
    bound = tl.load(counts + _AGE)
    return slot, may & (age > bound), may & (age == bound)


@triton.jit(do_not_specialize=["now", "completed"])
def _tally_kernel(last_use, capacity, now, completed, counts, tallies, TILE: tl.constexpr, AGES: tl.constexpr):
    """Per tile of slots, in one word: how many are beyond the age, and how many of that age."""
    tally = tl.zeros([], tl.int64)
    if tl.load(counts + EVICTED) > 0:
        _, older, equal = _tile_ages(last_use, capacity, now, completed, counts, TILE, AGES)
        tally = (tl.sum(older.to(tl.int64), 0) << 32) + tl.sum(equal.to(tl.int64), 0)
    tl.store(tallies + tl.program_id(0), tally)


@triton.jit(do_not_specialize=["now", "completed"])
def _choose_kernel(last_use, capacity, now, completed, counts, sums, victims, TILE: tl.constexpr, AGES: tl.constexpr):
    if tl.load(counts + EVICTED) > 0:
        slot, older, equal = _tile_ages(last_use, capacity, now, completed, counts, TILE, AGES)
        older, equal = older.to(tl.int64), equal.to(tl.int64)
        end = tl.load(sums + tl.program_id(0))
        take = tl.load(counts + _TAKE)
        rank = (end >> 32) - tl.sum(older, 0) + tl.cumsum(older, 0) - older
        rank_equal = (end & 0xFFFFFFFF) - tl.sum(equal, 0) + tl.cumsum(equal, 0) - equal
        leaves = (older > 0) | ((equal > 0) & (rank_equal < take))
        tl.store(victims + rank + tl.minimum(rank_equal, take), slot.to(tl.int32), mask=leaves)


@triton.jit
def _remove_kernel(victims, counts, words, halves, blocks, strides, slot_keys, keys, LANES: tl.constexpr):
    count = tl.load(counts + EVICTED)
    first = tl.program_id(0).to(tl.int64) * LANES
    if first < count:
        i = first + tl.arange(0, LANES)
        active = i < count
        slot = tl.load(victims + i, mask=active, other=0)
        key = tl.load(slot_keys + slot, mask=active, other=0)
        tl.store(keys + i, key, mask=active)
        name, block, stride = home(key, blocks, strides)
        emptied = tl.zeros(key.shape, tl.int64)
        left = blocks + 1
        while (tl.max(active.to(tl.int32), 0) > 0) & (left > 0):
            at, vacant = look(words, block, name, active, True)
            hit = active & (at < WIDTH)
            tl.store(halves + slot_of(block, at), tl.full(key.shape, ABSENT, tl.int32), mask=hit)
            # Searches end at a block with an empty entry: only there may another one become empty.
            tl.store(words + block * 8 + at, tl.full(key.shape, EMPTY, tl.int64), mask=hit & (vacant < WIDTH))
            emptied += (hit & (vacant < WIDTH)).to(tl.int64)
            active = active & (at == WIDTH)
            block = next_block(block, stride, blocks)
            left -= 1
        tl.atomic_add(counts + EMPTIED, tl.sum(emptied, 0), sem="relaxed")


def choose_victims(
    last_use: torch.Tensor, now: int, completed: int, counts: torch.Tensor, victims: torch.Tensor
) -> None:
    """Writes counts[EVICTED] slots to `victims`, or none and what is missing to counts[SHORT]."""
    capacity, device = len(last_use), last_use.device
    shape = {"TILE": _TILE, "AGES": _AGES}
    ages = torch.zeros(_AGES, dtype=torch.int32, device=device)
    tiles = blocks(capacity, _TILE)
    _ages_kernel[(min(_SPREAD, tiles),)](last_use, capacity, now, completed, counts, ages, **shape, num_warps=8)
    _age_kernel[(1,)](ages, counts, AGES=_AGES)
    tallies = torch.empty(tiles, dtype=torch.int64, device=device)
    _tally_kernel[(tiles,)](last_use, capacity, now, completed, counts, tallies, **shape, num_warps=8)
    sums = torch.cumsum(tallies, 0)
    _choose_kernel[(tiles,)](last_use, capacity, now, completed, counts, sums, victims, **shape, num_warps=8)


def remove(
    index: Index, slot_keys: torch.Tensor, victims: torch.Tensor, counts: torch.Tensor, keys: torch.Tensor
) -> None:
    """Takes the keys of counts[EVICTED] victims out of the index, and writes them to `keys`."""
    grid = (blocks(len(victims), LANES),)
    _remove_kernel[grid](victims, counts, *index.arguments, slot_keys, keys, LANES=LANES, num_warps=1)


def choose_victims_reference(last_use: torch.Tensor, now: int, completed: int, need: int) -> torch.Tensor | None:
    """The victims in order of slot; none if there are too few."""
    may = torch.nonzero(last_use <= completed).flatten()
    if len(may) < need:
        return None
    ages = (now - last_use[may]).clamp(max=_AGES - 1)
    oldest = torch.sort(ages, descending=True, stable=True).indices[:need]
    return may[oldest.sort().values].to(torch.int32)
