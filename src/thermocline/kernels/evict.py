"""Who leaves: the slots used least recently, never one that a batch in flight needs; and their keys out of the index.

`last_use[slot]` is the number of the newest batch that needs the slot, and in its lowest bits how many batches did, up
to seven. It is pinned while that batch is not completed. The oldest leave first, of equally old ones the lowest slots,
so the choice does not depend on the order of threads. A slot that n batches used counts as n * n times younger: rows
that come once do not push out those that come again and again (a tenth of the rows of a power law, simulated: 17 %
fewer misses than by age alone; with the true frequencies 21 %). Old is told in classes, four to every doubling of the
age: 64 classes can be counted at the speed of memory. One pass over four bytes per slot, on the GPU, makes histograms
of classes; then only the tiles that give victims are looked at again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thermocline.kernels.find import LANES
from thermocline.kernels.index import ABSENT, EMPTY, WIDTH, Index, home, look, next_block, slot_of
from thermocline.kernels.launch import blocks
from thermocline.kernels.segments import before

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

VISITS = tl.constexpr(3)  # bits of last_use that count batches
_MOST = tl.constexpr(7)
NEVER = 2**31 - 1
"""last_use of slots that were not given out."""
NEWEST = NEVER >> VISITS.value
"""Numbers of batches are below it."""

_AGES = 64
_TILE = 4096
_ROWS = 64


@triton.jit
def _quarters(number):
    """Of a number from 1 on: four times its logarithm, by exponent and two bits of the mantissa."""
    return (number.to(tl.float32).to(tl.int32, bitcast=True) >> 21) - 508


@triton.jit
def _age_class(now, use, AGES: tl.constexpr):
    age = _quarters(tl.maximum(now - (use >> VISITS), 1))
    visits = _quarters(tl.maximum(use & _MOST, 1))
    return tl.minimum(tl.maximum(age - 2 * visits, 0), AGES - 1)


@triton.jit
def used_again(use, now):
    """last_use of a slot that batch `now` needs too: the same whoever of the batch's ids comes first."""
    visits = tl.minimum((use & _MOST) + 1, _MOST)
    return tl.where(use >> VISITS == now, use, (now << VISITS) | visits)


@triton.jit(do_not_specialize=["tiles", "room"])
def _need_kernel(firsts, tiles, room, counts, TILE: tl.constexpr):
    """How many slots new keys need beyond the free ones; `firsts`: new keys per tile of ids."""
    need = tl.maximum(before(firsts, tiles, TILE).to(tl.int64) - room, 0)
    tl.store(counts + EVICTED, tl.where(tl.load(counts + LOST) > 0, 0, need))  # lost: nothing will be inserted


@triton.jit
def _tile(last_use, capacity, now, completed, TILE: tl.constexpr, AGES: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    use = tl.load(last_use + slot, mask=slot < capacity, other=0)
    return slot, (slot < capacity) & (use >> VISITS <= completed), _age_class(now, use, AGES)


@triton.jit(do_not_specialize=["now", "completed"])
def _ages_kernel(last_use, capacity, now, completed, counts, ages, TILE: tl.constexpr, AGES: tl.constexpr):
    """Per tile of slots: how many of each class may leave."""
    if tl.load(counts + EVICTED) > 0:
        _, may, age = _tile(last_use, capacity, now, completed, TILE, AGES)
        place = ages + tl.program_id(0).to(tl.int64) * AGES + tl.arange(0, AGES)
        tl.store(place, tl.histogram(age, AGES, mask=may))


@triton.jit
def _sum_kernel(ages, tiles, counts, totals, ROWS: tl.constexpr, AGES: tl.constexpr):
    """All tiles' histograms in one: integers, so that the order does not show."""
    if tl.load(counts + EVICTED) > 0:
        tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        number = tl.load(ages + tile * AGES + tl.arange(0, AGES)[None, :], mask=tile < tiles, other=0)
        tl.atomic_add(totals + tl.arange(0, AGES), tl.sum(number.to(tl.int64), 0), sem="relaxed")


@triton.jit
def _age_kernel(totals, counts, AGES: tl.constexpr):
    """Beyond which class all leave, and how many of that class: or, if that is not enough, nobody."""
    need = tl.load(counts + EVICTED)
    if need > 0:
        age = tl.arange(0, AGES)
        number = tl.load(totals + age)
        all_of_them = tl.sum(number, 0)
        as_old = all_of_them - tl.cumsum(number, 0) + number  # of this class and older
        bound = tl.sum((as_old >= need).to(tl.int64), 0) - 1
        older = tl.sum(tl.where(age > bound, number, 0), 0)
        short = tl.maximum(need - all_of_them, 0)
        tl.store(counts + SHORT, short)
        tl.store(counts + EVICTED, tl.where(short > 0, 0, need))
        tl.store(counts + _AGE, tl.where(short > 0, AGES, bound))
        tl.store(counts + _TAKE, tl.where(short > 0, 0, need - older))


@triton.jit
def _tally_kernel(ages, tiles, counts, tallies, ROWS: tl.constexpr, AGES: tl.constexpr):
    """Per tile of slots, in one word: how many are beyond the class, and how many of it."""
    tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tally = tl.zeros([ROWS], tl.int64)
    if tl.load(counts + EVICTED) > 0:
        age = tl.arange(0, AGES)[None, :]
        number = tl.load(ages + tile[:, None] * AGES + age, mask=tile[:, None] < tiles, other=0).to(tl.int64)
        bound = tl.load(counts + _AGE)
        tally = tl.sum(tl.where(age > bound, number << 32, tl.where(age == bound, number, 0)), 1)
    tl.store(tallies + tile, tally, mask=tile < tiles)


@triton.jit(do_not_specialize=["now", "completed"])
def _choose_kernel(last_use, capacity, now, completed, counts, sums, victims, TILE: tl.constexpr, AGES: tl.constexpr):
    if tl.load(counts + EVICTED) > 0:
        program = tl.program_id(0)
        end = tl.load(sums + program)
        begin = tl.load(sums + program - 1, mask=program > 0, other=0)
        take = tl.load(counts + _TAKE)
        if (end >> 32 > begin >> 32) | ((end != begin) & ((begin & 0xFFFFFFFF) < take)):  # only tiles that give any
            slot, may, age = _tile(last_use, capacity, now, completed, TILE, AGES)
            bound = tl.load(counts + _AGE)
            older = (may & (age > bound)).to(tl.int32)
            equal = (may & (age == bound)).to(tl.int32)
            rank = (begin >> 32) + tl.cumsum(older, 0) - older
            rank_equal = (begin & 0xFFFFFFFF) + tl.cumsum(equal, 0) - equal
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
    tiles = blocks(capacity, _TILE)
    ages = torch.empty(tiles * _AGES, dtype=torch.int32, device=device)
    totals = torch.zeros(_AGES, dtype=torch.int64, device=device)
    tallies = torch.empty(tiles, dtype=torch.int64, device=device)
    shape = {"TILE": _TILE, "AGES": _AGES, "num_warps": 8}
    _ages_kernel[(tiles,)](last_use, capacity, now, completed, counts, ages, **shape)
    _sum_kernel[(blocks(tiles, _ROWS),)](ages, tiles, counts, totals, ROWS=_ROWS, AGES=_AGES)
    _age_kernel[(1,)](totals, counts, AGES=_AGES)
    _tally_kernel[(blocks(tiles, _ROWS),)](ages, tiles, counts, tallies, ROWS=_ROWS, AGES=_AGES)
    sums = torch.cumsum(tallies, 0)
    _choose_kernel[(tiles,)](last_use, capacity, now, completed, counts, sums, victims, **shape)


def remove(
    index: Index, slot_keys: torch.Tensor, victims: torch.Tensor, counts: torch.Tensor, keys: torch.Tensor
) -> None:
    """Takes the keys of counts[EVICTED] victims out of the index, and writes them to `keys`."""
    grid = (blocks(len(victims), LANES),)
    _remove_kernel[grid](victims, counts, *index.arguments, slot_keys, keys, LANES=LANES, num_warps=1)


def choose_victims_reference(last_use: torch.Tensor, now: int, completed: int, need: int) -> torch.Tensor | None:
    """The victims in order of slot; none if there are too few."""
    may = torch.nonzero(last_use >> VISITS.value <= completed).flatten()
    if len(may) < need:
        return None

    def quarters(numbers: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(numbers.clamp(min=1).to(torch.float64))
        return 4 * (exponent - 1) + ((2 * mantissa - 1) * 4).to(torch.int32)

    use = last_use[may]
    visits = use & _MOST.value
    ages = (quarters(now - (use >> VISITS.value)) - 2 * quarters(visits)).clamp(min=0, max=_AGES - 1)
    oldest = torch.sort(ages, descending=True, stable=True).indices[:need]
    return may[oldest.sort().values].to(torch.int32)
