"""find_or_insert: a slot for every key of a batch. Inserts missing keys, and evicts others if slots are missing.

    claim      finds or claims the index entry of every id, and updates last_use of resident keys
    count      counts, per tile, the ids that are the first of a new key: they define the order of new keys
    evict      `thermocline.kernels.evict`: chooses slots that are not pinned, as many as are missing
    assign     gives slots to new keys; if too few slots are evictable, reverts all claimed entries
    resolve    gives the other ids of a new key its slot

Slots, new keys and victims are deterministic. Only the position of an entry in the index depends on timing, and no
result depends on it. The host does not wait: all counts stay in device memory until the caller reads them.
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
from thermocline.kernels.index import ABSENT, Index, claim, slot_offset
from thermocline.kernels.launch import blocks, kernel, stored_int
from thermocline.kernels.segments import prefix_sum

_TILE = 1024  # ids per count of new keys


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Residents:
    """The key and the last use of every slot. Slots are assigned in ascending order, then by eviction."""

    keys: torch.Tensor
    """int64[slots]."""
    last_use: torch.Tensor
    """int32[slots]: the newest batch that needs the slot and a count of batches (evict.py); NEVER if never assigned."""

    @classmethod
    def empty(cls, slots: int, device: torch.device | str) -> Residents:
        """Residents of `slots` unassigned slots."""
        return cls(
            torch.zeros(slots, dtype=torch.int64, device=device),
            torch.full((slots,), NEVER, dtype=torch.int32, device=device),
        )

    def clear(self) -> None:
        """Mark all slots as unassigned."""
        self.last_use.fill_(NEVER)

    def renumber(self, shift: int) -> None:
        """Subtract `shift` from all batch numbers, down to 0, so that they stay below NEWEST in long runs."""
        batch, visits = self.last_use >> VISITS.value, self.last_use & ((1 << VISITS.value) - 1)
        renamed = ((batch - shift).clamp(min=0) << VISITS.value) | visits
        self.last_use.copy_(torch.where(self.last_use == NEVER, self.last_use, renamed))

    @property
    def capacity(self) -> int:
        return len(self.keys)


BYTES_PER_SLOT = 12
"""Bytes of `Residents` per slot."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InsertPlan:
    """Result of find_or_insert in device memory: lists as long as the batch, valid up to their element of `counts`."""

    slots: torch.Tensor
    """int32[ids]: the slot of each id; -1 for new keys if slots were missing."""
    resident_slots: torch.Tensor
    """int32[ids]: the slot of each id whose key was resident, else -1."""
    new_keys: torch.Tensor
    """int64: counts[NEW] keys that were not resident, in order of first occurrence."""
    new_slots: torch.Tensor
    """int32: the slots of `new_keys`; -1 from counts[NEW] on."""
    victims: torch.Tensor
    """int32: counts[EVICTED] slots, ascending, whose rows must be copied out before new rows are copied in."""
    victim_keys: torch.Tensor
    """int64: the keys of `victims`."""
    counts: torch.Tensor
    """int64[COUNTS], by NEW, EVICTED, SHORT, CLAIMED, LOST, EMPTIED (evict.py). SHORT or LOST: nothing was inserted."""

    @classmethod
    def of_residents(cls, slots: torch.Tensor, counts: torch.Tensor) -> InsertPlan:
        """Plan of ids whose keys are resident: nothing is inserted or evicted."""
        none, no_keys = slots[:0], counts[:0]
        return cls(slots, slots, no_keys, none, none, no_keys, counts)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Tensors that another stream reads to move rows."""
        return [self.new_slots, self.victims, self.victim_keys, self.counts]

    def copy(self) -> InsertPlan:
        """Copy what is needed to move rows, before a replay overwrites it."""
        lists = {name: getattr(self, name).clone() for name in ("new_keys", "new_slots", "victims", "victim_keys")}
        return dataclasses.replace(self, **lists, counts=self.counts.clone())


@kernel(do_not_specialize=["count", "now"])
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
    resident_slots,
    entries,
    firsts,
    claims,
    counts,
    UNIQUE: tl.constexpr,
    COUNT: tl.constexpr,
    STORED: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    now = stored_int(now, STORED)
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    active = i < count
    key = tl.load(keys + i, mask=active, other=0)
    block, number, claimed = claim(words, entries + i, key, active, blocks, strides)
    present = active & (block >= 0)
    entry = slot_offset(block, number)
    slot = tl.load(halves + entry, mask=present & ~claimed, other=ABSENT, cache_modifier=".cg")
    hit = present & (slot >= 0)
    missing = present & (slot < 0)
    tl.store(slots + i, tl.where(hit, slot, -1), mask=active)
    tl.store(resident_slots + i, tl.where(hit, slot, -1), mask=active)
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
    else:  # the first id of a new key has the greatest value
        tl.atomic_max(halves + entry, (-2 - i).to(tl.int32), mask=missing, sem="relaxed")
    num_claimed = tl.sum(claimed.to(tl.int32), 0)
    if num_claimed > 0:  # counted per tile, because atomics on one word would serialize
        tl.atomic_add(claims + tile, num_claimed, sem="relaxed")
    lost = tl.sum((active & (block < 0)).to(tl.int64), 0)
    if lost > 0:
        tl.atomic_add(counts + LOST, lost, sem="relaxed")


@triton.jit
def _is_first(halves, entry, i, UNIQUE: tl.constexpr):
    missing = entry >= 0
    if not UNIQUE:
        missing = missing & (tl.load(halves + entry, mask=missing, other=0) == (-2 - i).to(tl.int32))
    return missing


@kernel(do_not_specialize=["count"])
def _count_kernel(entries, count, halves, firsts, TILE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    entry = tl.load(entries + i, mask=i < count, other=-1)
    tl.store(firsts + tl.program_id(0), tl.sum(_is_first(halves, entry, i, False).to(tl.int32), 0))


@kernel(do_not_specialize=["count", "used", "now"])
def _assign_kernel(
    keys,
    count,
    halves,
    slots,
    entries,
    firsts,
    claims,
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
    STORED: tl.constexpr,
    TILE: tl.constexpr,
):
    used = stored_int(used, STORED)
    now = stored_int(now, STORED)
    tile = tl.program_id(0)
    i = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    entry = tl.load(entries + i, mask=i < count, other=-1)
    first = _is_first(halves, entry, i, UNIQUE)
    enough = (tl.load(counts + SHORT) == 0) & (tl.load(counts + LOST) == 0)
    number = first.to(tl.int32)
    earlier = prefix_sum(firsts, tile, TILE)
    rank = earlier + tl.cumsum(number, 0) - number
    tl.atomic_add(counts + CLAIMED, tl.load(claims + tile).to(tl.int64), sem="relaxed")
    if tile == tl.num_programs(0) - 1:
        tl.store(counts + NEW, (earlier + tl.sum(number, 0)).to(tl.int64))
    position = used + rank
    slot = tl.where(position < capacity, position, -1)
    if enough:
        slot = tl.where(
            position < capacity,
            position,
            tl.load(victims + position - capacity, mask=first & (position >= capacity), other=-1),
        )
        key = tl.load(keys + i, mask=first, other=0)
        tl.store(slots + i, slot, mask=first)
        tl.store(slot_keys + slot, key, mask=first)
        tl.store(last_use + slot, tl.zeros_like(slot) + ((now << VISITS) | 1), mask=first)
        tl.store(new_keys + rank, key, mask=first)
        tl.store(new_slots + rank, slot, mask=first)
    tl.store(halves + entry, tl.where(enough, slot, ABSENT), mask=first)


@kernel(do_not_specialize=["count"])
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
    used: int | torch.Tensor,
    now: int | torch.Tensor,
    completed: int | torch.Tensor,
    unique: bool = False,
    count_visits: bool = False,
    evict: bool | None = None,
) -> InsertPlan:
    """Find or assign slots for int64 `keys`, and pin them until batch `now` is completed.

    used          slots assigned so far; the caller adds counts[NEW], up to the capacity
    completed     the newest completed batch: its slots and older ones may be evicted
    unique        no key occurs twice in `keys`, which saves two kernels
    count_visits  keep rows longer that several batches needed; otherwise only their age counts
    evict         whether slots may be missing; by default computed from `used`

    used, now and completed are numbers, or int64[1] in device memory, for a launch that is recorded.
    """
    stored = not isinstance(now, int)
    if not stored and now >= NEWEST:
        raise ValueError(f"batch number is {now}: must be below {NEWEST}; call Residents.renumber")
    keys = keys.contiguous()
    device, n = keys.device, len(keys)
    programs, tiles = blocks(n, LANES), blocks(n, _TILE)
    padded = max(4, -(-n // 4) * 4)  # lists are aligned to 16 bytes: Triton compiles another kernel for others
    lists = torch.empty(8, padded, dtype=torch.int32, device=device)  # one allocation, because each takes host time
    slots, resident_slots, victims, new_slots = (part[:n] for part in lists[:4])
    new_keys, victim_keys = (part[:n] for part in lists[4:].view(torch.int64).view(2, padded))
    new_slots.fill_(-1)
    entries = torch.empty(programs * LANES, dtype=torch.int64, device=device)  # lanes past the ids use the rest
    per_tile = -(-tiles // 4) * 4
    zeros = torch.zeros(COUNTS + per_tile, dtype=torch.int64, device=device)
    counts, (firsts, claims) = zeros[:COUNTS], zeros[COUNTS:].view(torch.int32).view(2, per_tile)
    _claim_kernel[(programs,)](
        keys,
        n,
        *index.arguments,
        residents.last_use,
        now,
        slots,
        resident_slots,
        entries,
        firsts,
        claims,
        counts,
        UNIQUE=unique,
        COUNT=count_visits,
        STORED=stored,
        LANES=LANES,
        TILE=_TILE,
        num_warps=1,
    )
    if not unique:
        _count_kernel[(tiles,)](entries, n, index.halves, firsts, TILE=_TILE)
    if n > residents.capacity - used if evict is None else evict:
        _need_kernel[(1,)](firsts, tiles, residents.capacity, used, counts, STORED=stored, TILE=_TILE)
        choose_victims(residents.last_use, now, completed, counts, victims)
        remove(index, residents.keys, victims, counts, victim_keys)
    _assign_kernel[(tiles,)](
        keys,
        n,
        index.halves,
        slots,
        entries,
        firsts,
        claims,
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
        STORED=stored,
        TILE=_TILE,
    )
    if not unique:
        _resolve_kernel[(tiles,)](slots, entries, n, index.halves, TILE=_TILE)
    return InsertPlan(slots, resident_slots, new_keys, new_slots, victims, victim_keys, counts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReferencePlan:
    """Lists of an `InsertPlan`, with exact lengths."""

    slots: torch.Tensor
    resident_slots: torch.Tensor
    new_keys: torch.Tensor
    new_slots: torch.Tensor
    victims: torch.Tensor
    victim_keys: torch.Tensor
    short: int


def find_or_insert_reference(
    residents: Residents, keys: torch.Tensor, *, used: int, now: int, completed: int, count_visits: bool = False
) -> ReferencePlan:
    """`find_or_insert` in plain torch, without an index. Changes `residents`."""
    slots = find_reference(residents.keys[:used], keys)
    used_once, max_visits = (now << VISITS.value) | 1, (1 << VISITS.value) - 1
    hit = slots[slots >= 0].unique().long()
    visits = ((residents.last_use[hit] & max_visits) + 1).clamp(max=max_visits)
    residents.last_use[hit] = (now << VISITS.value) | (visits if count_visits else torch.ones_like(visits))
    missing = keys[slots < 0].tolist()
    new_keys = torch.tensor(list(dict.fromkeys(missing)), dtype=torch.int64, device=keys.device)
    need = max(0, len(new_keys) - (residents.capacity - used))
    empty = torch.empty(0, dtype=torch.int32, device=keys.device)
    victims = choose_victims_reference(residents.last_use, now, completed, need) if need else empty
    if victims is None:
        evictable = int((residents.last_use >> VISITS.value <= completed).sum())
        return ReferencePlan(slots, slots, new_keys, empty, empty, empty.long(), need - evictable)
    fresh = torch.arange(used, min(used + len(new_keys), residents.capacity), dtype=torch.int32, device=keys.device)
    new_slots = torch.cat([fresh, victims])
    victim_keys = residents.keys[victims.long()]
    residents.keys[new_slots.long()] = new_keys
    residents.last_use[new_slots.long()] = used_once
    new_index = find_reference(new_keys, keys)
    resolved = torch.where(slots >= 0, slots, new_slots[new_index.clamp(min=0).long()] if len(new_slots) else slots)
    return ReferencePlan(resolved, slots, new_keys, new_slots, victims, victim_keys, 0)
