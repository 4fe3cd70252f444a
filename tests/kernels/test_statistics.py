"""`update_statistics` has the bits of its plain-torch reference; `count_occurrences` counts as a loop does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from thermocline.kernels import INTERPRETED
from thermocline.kernels.segments import find_segments
from thermocline.kernels.statistics import (
    StatisticsStep,
    StoredStatistics,
    count_occurrences,
    update_statistics,
    update_statistics_reference,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = ("frequency", "last_step", "last_time", "show", "click")
WORDS = {"frequency": 1, "last_step": 1, "last_time": 2, "show": 1, "click": 1}
SUBSETS = [names for count in (1, 2, 5) for names in itertools.combinations(NAMES, count)]
RUNS = [(3, 0.5), (4, 1.0), (9, float(np.float32(0.9)))]


@pytest.mark.parametrize(
    ("names", "stored"), [*((names, False) for names in SUBSETS), (NAMES, True), (("last_step", "show"), True)]
)
def test_bits(names: tuple[str, ...], stored: bool) -> None:
    generator = torch.Generator().manual_seed(len(names))
    words = sum(WORDS[name] for name in names) + ("show" in names or "click" in names)
    arena = torch.rand(300, 3 + words, generator=generator)
    bits = arena.view(torch.int32)
    for number, name in enumerate(names):
        if name in ("frequency", "last_step", "last_time"):
            at = 3 + sum(WORDS[before] for before in names[:number])
            bits[:, at] = torch.randint(-(2**31), 2**31, (300,), generator=generator, dtype=torch.int32)
    if "show" in names or "click" in names:
        bits[:, -1] = torch.randint(0, 10, (300,), generator=generator, dtype=torch.int32)
        arena[:10, -2] = 2.0**-99  # becomes 0
    slots = torch.randperm(300, generator=generator)[:150].to(torch.int32)
    occurrences = torch.randint(-5, 2**20, (150, 2), generator=generator)
    occurrences[:, 0].abs_()
    step = StatisticsStep(names, words, 2**32 - 1, -5, RUNS)
    expected = arena.clone()
    update_statistics_reference(expected, slots[:140], occurrences[:140], step)
    ours = arena.clone().to(DEVICE)
    limit = torch.tensor([140], dtype=torch.int32, device=DEVICE)
    given: StatisticsStep | StoredStatistics = step
    if stored:
        given = StoredStatistics(names, words, torch.from_numpy(step.content()).to(DEVICE))
    update_statistics(ours, slots.to(DEVICE), occurrences.to(DEVICE), limit, given)
    assert torch.equal(ours.cpu().view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(expected.view(torch.int32), bits)


@pytest.mark.parametrize("indexed", [False, True])
def test_occurrences(indexed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (900,), generator=generator, dtype=torch.int32).to(DEVICE)
    segments = find_segments(ids)
    bags = torch.arange(900) // 3 if indexed else torch.arange(900)
    units = torch.randint(-9, 70000, (int(bags.max()) + 1,), generator=generator).to(DEVICE)
    rows = bags.to(DEVICE)[segments.order.long()].to(torch.int32) if indexed else None
    counted = count_occurrences(segments, rows, units).cpu().tolist()
    for i in range(int(segments.counts[0])):
        found = (ids == segments.slots[i]).nonzero().flatten().cpu()
        assert counted[i] == [len(found), int(units.cpu()[bags[found]].sum())]
    assert count_occurrences(segments, rows, None)[:, 1].eq(0).all()
