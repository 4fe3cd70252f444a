"""Index and residents of a GPU table, checked against a second pair that only the references change."""

from __future__ import annotations

from typing import Any

import torch

from thermocline.kernels.evict import CLAIMED, EMPTIED, EVICTED, LOST, NEW, SHORT
from thermocline.kernels.find import find, find_reference
from thermocline.kernels.index import EMPTY_KEY, ENTRIES, Index
from thermocline.kernels.insert import InsertPlan, ReferencePlan, Residents, find_or_insert, find_or_insert_reference
from thermocline.kernels.rebuild import entries_reference, rebuild

# Keys that are special to the index or to integers: EMPTY_KEY, its alias, the limits of int64 and uint64.
ODD_KEYS = [EMPTY_KEY, EMPTY_KEY ^ 1, 0, 1, -1, 2**63 - 1, -(2**63)]


def random_keys(count: int, device: str, seed: int, unique: bool = True) -> torch.Tensor:
    """Random 64-bit keys that include ODD_KEYS, shuffled."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (2 * count + 8,), generator=draw, dtype=torch.int64)
    keys = torch.cat([torch.tensor(ODD_KEYS), keys])
    kept = torch.tensor(list(dict.fromkeys(keys.tolist())))[:count] if count < 10000 else torch.unique(keys)[:count]
    if not unique and count:
        kept = kept[torch.randint(0, len(kept), (count,), generator=draw)]
    return kept[torch.randperm(len(kept), generator=draw)].to(device)


class IndexPair:
    """Index and residents that kernels change, and residents that only the references change."""

    def __init__(self, slots: int, entries: int, device: str) -> None:
        self.index = Index.empty(entries, device)
        self.residents = Residents.empty(slots, device)
        self.expected = Residents.empty(slots, device)
        self.used = self.occupied = 0

    def insert(
        self,
        keys: torch.Tensor,
        now: int,
        completed: int = 0,
        unique: bool = False,
        count_visits: bool = False,
        stored: bool = False,
    ) -> tuple[InsertPlan, ReferencePlan]:
        """Insert into both, and compare all results. `stored`: with numbers in device memory, for a recorded launch."""
        options = {"used": self.used, "now": now, "completed": completed, "count_visits": count_visits}
        given: dict[str, Any] = {"unique": unique, **options}
        if stored:
            numbers = {name: torch.tensor([options[name]], device=keys.device) for name in ("used", "now", "completed")}
            given |= {**numbers, "evict": True}
        plan = find_or_insert(self.index, self.residents, keys, **given)
        expected = find_or_insert_reference(self.expected, keys, **options)
        counts = plan.counts.tolist()
        assert counts[LOST.value] == 0
        assert counts[SHORT.value] == expected.short
        assert counts[NEW.value] == len(expected.new_keys)
        assert counts[EVICTED.value] == len(expected.victims)
        self.occupied += counts[CLAIMED.value] - counts[EMPTIED.value]
        assert self.occupied == int((self.index.words.view(-1, 8)[:, :ENTRIES] != EMPTY_KEY).sum())
        assert torch.equal(plan.slots, expected.slots)
        assert torch.equal(plan.resident_slots, expected.resident_slots)
        if not expected.short:
            self.used = min(self.residents.capacity, self.used + counts[NEW.value])
            for name in ("new_keys", "new_slots", "victims", "victim_keys"):
                values = getattr(expected, name)
                assert torch.equal(getattr(plan, name)[: len(values)], values), name
        self.check()
        return plan, expected

    def rebuild(self) -> None:
        rebuild(self.index, self.residents, self.used)
        self.occupied = self.used
        self.check()

    def check(self) -> None:
        """Compare the residents; the index must contain each of them exactly once."""
        assert torch.equal(self.residents.keys, self.expected.keys)
        assert torch.equal(self.residents.last_use, self.expected.last_use)
        keys, slots = entries_reference(self.index)
        order = torch.sort(slots).indices
        assert torch.equal(slots[order], torch.arange(self.used, dtype=torch.int32, device=slots.device))
        assert torch.equal(keys[order], self.residents.keys[: self.used])

    def check_find(self, keys: torch.Tensor) -> None:
        out = torch.full((len(keys) + 3,), -77, dtype=torch.int32, device=keys.device)
        find(self.index, keys, out=out[: len(keys)])
        assert torch.equal(out[: len(keys)], find_reference(self.residents.keys[: self.used], keys))
        assert out[len(keys) :].tolist() == [-77] * 3
