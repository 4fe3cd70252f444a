"""find_or_insert: a slot for every key of a batch; keys that are not there get one, others leave if they must.

    claim      every id finds the entry of its key, or takes an empty one; the slots that are hit are touched
    count      ids that are first to miss a key: in that order, new keys are numbered
    evict      `thermocline.kernels.evict`: as many slots as new keys lack, none of them pinned by this batch or another
    settle     new keys get their slots; if there are not enough, all that was taken is given back
    resolve    ids that missed a key but were not first

Slots, new keys and victims are the same in every run: only where in the index an entry lies depends on timing, and
nothing else depends on that. Nothing here waits for the host: what was counted stays on the GPU until someone reads it.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from thermocline.kernels.evict import (
    CLAIMED,
    COUNTS,
    LOST,
    NEVER,
    NEW,
    NEWEST,
    SHORT,
    VISITS,
    _need_kernel,
    choose_victims,
    choose_victims_reference,
    remove,
    used_again,
)
from thermocline.kernels.find import LANES, find_reference
from thermocline.kernels.index import ABSENT, Index, claim, slot_of
from thermocline.kernels.launch import blocks
from thermocline.kernels.segments import before

_TILE = 1024  # ids whose new keys are counted together


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Residents:
    """Who is in which slot. Slots are given out from the first; once all are, by eviction only."""

    keys: torch.Tensor
    """int64[slots]."""
    last_use: torch.Tensor
    """int32[slots]: the newest batch that needs the slot, and how many did (evict.py); NEVER: not given out yet."""

    @classmethod
    def empty(cls, slots: int, device: torch.device | str) -> Residents:
        """Nobody."""
        return cls(
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.full((slots,), NEVER, dtype=torch.int32, device=device),
        )

    def clear(self) -> None:
        """Nobody again."""
        self.last_use.fill_(NEVER)

    def renumber(self, shift: int) -> None:
        """Batches are called by numbers so much lower from now on; those before the first all count as number 0."""
        batch, visits = self.last_use >> VISITS.value, self.last_use & ((1 << VISITS.value) - 1)
        renamed = ((batch - shift).clamp(min=0) << VISITS.value) | visits
        self.last_use.copy_(torch.where(self.last_use == NEVER, self.last_use, renamed))

    @property
    def capacity(self) -> int:
        """How many slots."""
        return len(self.keys)


BYTES_PER_SLOT = 12
"""Of Residents."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What find_or_insert decided, in device memory: lists as long as the batch, of which `counts` are valid."""

    slots: torch.Tensor
    """int32 per id; -1 for those of new keys if there was no room."""
    found: torch.Tensor
    """int32 per id: its slot if the key was there, else -1."""
    new_keys: torch.Tensor
    """counts[NEW] keys that were not there, in order of first occurrence."""
    new_slots: torch.Tensor
    """Their slots; -1 beyond."""
    victims: torch.Tensor
    """counts[EVICTED] slots, ascending, whose rows must leave before the new ones come."""
    victim_keys: torch.Tensor
    counts: torch.Tensor
    """int64: by NEW, EVICTED, SHORT (slots that were missing: then nothing was inserted), CLAIMED and EMPTIED
    (entries of the index taken and freed), LOST (ids the index had no room for)."""

    @property
    def memory(self) -> list[torch.Tensor]:
        """What another stream than the plan's own reads to move rows."""
        return [self.new_slots, self.victims, self.victim_keys, self.counts]


@triton.jit(do_not_specialize=["count", "now"])
def _claim_kernel(
    keys,
    count,
    words,
    halves,
    blocks,
    strides,
    last_use,
    now,
    slots,
    found,
    entries,
    firsts,
    takings,
    counts,
    UNIQUE: tl.constexpr,
    COUNT: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    key = tl.load(keys + i, mask=active, other=0)
    block, number, took = claim(words, entries + i, key, active, blocks, strides)
    there = active & (block >= 0)
    entry = slot_of(block, number)
    slot = tl.load(halves + entry, mask=there & ~took, other=ABSENT, cache_modifier=".cg")
    hit = there & (slot >= 0)
    missing = there & (slot < 0)
    tl.store(slots + i, tl.where(hit, slot, -1), mask=active)
    tl.store(found + i, tl.where(hit, slot, -1), mask=active)
    tl.store(entries + i, tl.where(missing, entry, -1), mask=active)
    use = tl.zeros_like(slot) + ((now << VISITS) | 1)
    if COUNT:
        use = used_again(tl.load(last_use + slot, mask=hit, other=0), now)
    tl.store(last_use + slot, use, mask=hit)
    tile = tl.program_id(0) * LANES // TILE
    if UNIQUE:
        new = tl.sum(missing.to(tl.int32), 0)
        if new > 0:
            tl.atomic_add(firsts + tile, new, sem="relaxed")
    else:  # of the ids that miss a key the first has the greatest value
        tl.atomic_max(halves + entry, (-2 - i).to(tl.int32), mask=missing, sem="relaxed")
    taken = tl.sum(took.to(tl.int32), 0)
    if taken > 0:  # counted per tile: one word for all would be a queue
        tl.atomic_add(takings + tile, taken, sem="relaxed")
    lost = tl.sum((active & (block < 0)).to(tl.int64), 0)
    if lost > 0:
        tl.atomic_add(counts + LOST, lost, sem="relaxed")


@triton.jit
def _is_first(halves, entry, i, UNIQUE: tl.constexpr):
    missing = entry >= 0
    if not UNIQUE:
        missing = missing & (tl.load(halves + entry, mask=missing, other=0) == (-2 - i).to(tl.int32))
    return missing


@triton.jit(do_not_specialize=["count"])
def _count_kernel(entries, count, halves, firsts, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    entry = tl.load(entries + i, mask=i < count, other=-1)
    tl.store(firsts + tl.program_id(0), tl.sum(_is_first(halves, entry, i, False).to(tl.int32), 0))


@triton.jit(do_not_specialize=["count", "used", "now"])
def _settle_kernel(
    keys,
    count,
    halves,
    slots,
    entries,
    firsts,
    takings,
    used,
    capacity,
    victims,
    counts,
    slot_keys,
    last_use,
    now,
    new_keys,
    new_slots,
    UNIQUE: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    i = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    entry = tl.load(entries + i, mask=i < count, other=-1)
    first = _is_first(halves, entry, i, UNIQUE)
    enough = (tl.load(counts + SHORT) == 0) & (tl.load(counts + LOST) == 0)
    number = first.to(tl.int32)
    earlier = before(firsts, tile, TILE)
    rank = earlier + tl.cumsum(number, 0) - number
    tl.atomic_add(counts + CLAIMED, tl.load(takings + tile).to(tl.int64), sem="relaxed")
    if tile == tl.num_programs(0) - 1:
        tl.store(counts + NEW, (earlier + tl.sum(number, 0)).to(tl.int64))
    place = used + rank
    slot = tl.where(place < capacity, place, -1)
    if enough:
        slot = tl.where(
            place < capacity, place, tl.load(victims + place - capacity, mask=first & (place >= capacity), other=-1)
        )
        key = tl.load(keys + i, mask=first, other=0)
        tl.store(slots + i, slot, mask=first)
        tl.store(slot_keys + slot, key, mask=first)
        tl.store(last_use + slot, tl.zeros_like(slot) + ((now << VISITS) | 1), mask=first)
        tl.store(new_keys + rank, key, mask=first)
        tl.store(new_slots + rank, slot, mask=first)
    tl.store(halves + entry, tl.where(enough, slot, ABSENT), mask=first)


@triton.jit(do_not_specialize=["count"])
def _resolve_kernel(slots, entries, count, halves, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    entry = tl.load(entries + i, mask=i < count, other=-1)
    slot = tl.load(halves + entry, mask=entry >= 0, other=-1)
    tl.store(slots + i, tl.maximum(slot, -1), mask=entry >= 0)


def find_or_insert(
    index: Index,
    residents: Residents,
    keys: torch.Tensor,
    *,
    used: int,
    now: int,
    completed: int,
    unique: bool = False,
    count_visits: bool = False,
) -> Plan:
    """Slots for all `keys`, which batch number `now` needs: until it is completed, none of them can leave.

    used       slots given out so far: the caller adds counts[NEW], up to the capacity
    completed  the newest batch whose slots are free to leave
    unique     no key occurs twice in `keys`: saves two kernels
    count_visits   rows that several batches needed stay longer; otherwise only their age counts
    """
    if now >= NEWEST:
        raise ValueError(f"batch number {now}: numbers go up to {NEWEST - 1}")
    keys = keys.contiguous()
    device, n = keys.device, len(keys)
    programs, tiles = blocks(n, LANES), blocks(n, _TILE)
    slots, found, victims = (torch.empty(n, dtype=torch.int32, device=device) for _ in range(3))
    new_slots = torch.full((n,), -1, dtype=torch.int32, device=device)
    new_keys, victim_keys = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    entries = torch.empty(programs * LANES, dtype=torch.int64, device=device)  # comms beyond the ids park here
    zeros = torch.zeros(COUNTS + tiles, dtype=torch.int64, device=device)
    counts, (firsts, takings) = zeros[:COUNTS], zeros[COUNTS:].view(torch.int32).view(2, tiles)
    _claim_kernel[(programs,)](
        keys,
        n,
        *index.arguments,
        residents.last_use,
        now,
        slots,
        found,
        entries,
        firsts,
        takings,
        counts,
        UNIQUE=unique,
        COUNT=count_visits,
        LANES=LANES,
        TILE=_TILE,
        num_warps=1,
    )
    if not unique:
        _count_kernel[(tiles,)](entries, n, index.halves, firsts, TILE=_TILE)
    if n > residents.capacity - used:
        _need_kernel[(1,)](firsts, tiles, residents.capacity - used, counts, TILE=_TILE)
        choose_victims(residents.last_use, now, completed, counts, victims)
        remove(index, residents.keys, victims, counts, victim_keys)
    _settle_kernel[(tiles,)](
        keys,
        n,
        index.halves,
        slots,
        entries,
        firsts,
        takings,
        used,
        residents.capacity,
        victims,
        counts,
        residents.keys,
        residents.last_use,
        now,
        new_keys,
        new_slots,
        UNIQUE=unique,
        TILE=_TILE,
    )
    if not unique:
        _resolve_kernel[(tiles,)](slots, entries, n, index.halves, TILE=_TILE)
    return Plan(slots, found, new_keys, new_slots, victims, victim_keys, counts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReferencePlan:
    """A Plan's lists, as long as they are."""

    slots: torch.Tensor
    found: torch.Tensor
    new_keys: torch.Tensor
    new_slots: torch.Tensor
    victims: torch.Tensor
    victim_keys: torch.Tensor
    short: int


def find_or_insert_reference(
    residents: Residents, keys: torch.Tensor, *, used: int, now: int, completed: int, count_visits: bool = False
) -> ReferencePlan:
    """The same on `residents` alone, which it changes."""
    slots = find_reference(residents.keys[:used], keys)
    once, most = (now << VISITS.value) | 1, (1 << VISITS.value) - 1
    hit = slots[slots >= 0].unique().long()
    visits = ((residents.last_use[hit] & most) + 1).clamp(max=most)
    residents.last_use[hit] = (now << VISITS.value) | (visits if count_visits else torch.ones_like(visits))
    missing = keys[slots < 0].tolist()
    new_keys = torch.tensor(list(dict.fromkeys(missing)), dtype=torch.int64, device=keys.device)
    room = residents.capacity - used
    need = max(0, len(new_keys) - room)
    none = torch.empty(0, dtype=torch.int32, device=keys.device)
    victims = choose_victims_reference(residents.last_use, now, completed, need) if need else none
    if victims is None:
        may = int((residents.last_use >> VISITS.value <= completed).sum())
        return ReferencePlan(slots, slots, new_keys, none, none, none.long(), need - may)
    fresh = torch.arange(used, min(used + len(new_keys), residents.capacity), dtype=torch.int32, device=keys.device)
    new_slots = torch.cat([fresh, victims])
    victim_keys = residents.keys[victims.long()]
    residents.keys[new_slots.long()] = new_keys
    residents.last_use[new_slots.long()] = once
    where = find_reference(new_keys, keys)
    resolved = torch.where(slots >= 0, slots, new_slots[where.clamp(min=0).long()] if len(new_slots) else slots)
    return ReferencePlan(resolved, slots, new_keys, new_slots, victims, victim_keys, 0)
