"""Replayed steps of the Triton kernel against plain torch: equal bits for every dim and optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import floats, same_bits

from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from thermocline.embedding.step_rates import StepRates
from thermocline.kernels.catch_up import catch_up_reference, catch_up_rows
from thermocline.kernels.optimizer_rules import OptimizerStep

LIMIT, TARGET = 6, 9
OPTIMIZERS: list[Optimizer] = [
    SGD(weight_decay=0.1, lazy="catch_up", catch_up_steps=LIMIT),
    Adagrad(weight_decay=0.1, lazy="catch_up", catch_up_steps=LIMIT),
    RowWiseAdagrad(weight_decay=0.1, lazy="catch_up", catch_up_steps=LIMIT),
    Adam(weight_decay=0.1, lazy="catch_up", catch_up_steps=LIMIT),
    Adam(lazy="catch_up", catch_up_steps=LIMIT),
    PartialRowWiseAdam(lazy="catch_up", catch_up_steps=LIMIT),
]


def rates_of(optimizer: Optimizer) -> tuple[StepRates, list[OptimizerStep]]:
    rates = StepRates(optimizer)
    for step in range(1, TARGET + 1):
        rates.add(step, 0.01 * step)
    return rates, [OptimizerStep.of(optimizer, step, lr=0.01 * step) for step in range(1, TARGET + 1)]


def random_rows(count: int, optimizer: Optimizer, dim: int, device: str) -> torch.Tensor:
    """Rows as of steps 0 to 11: some missed more steps than are replayed, some are newer than the target."""
    rows = floats((count, dim + optimizer.state_floats(dim)), np.random.default_rng(dim), device).abs()
    rows.view(torch.int32)[:, -1] = torch.arange(count, device=device) % 12
    return rows


@pytest.mark.parametrize(("dim", "optimizer"), [*zip([3, 16, 19, 40, 1, 19], OPTIMIZERS, strict=True)], ids=str)
def test_rows_have_the_bits_of_the_missed_steps(dim: int, optimizer: Optimizer, device: str) -> None:
    rates, steps = rates_of(optimizer)
    ring = torch.from_numpy(rates.ring).to(device)
    rows = random_rows(24, optimizer, dim, device)
    expected = rows.clone()
    catch_up_reference(expected, dim, steps, LIMIT)
    assert not torch.equal(expected[:, :dim], rows[:, :dim])
    copies = rows.clone()
    catch_up_rows(copies, dim, steps[0], ring, TARGET)
    same_bits(copies, expected)

    # Slots of an arena, before step 10; the last two of the list do not count.
    slots = torch.tensor([5, 0, 11, 2, 23, 8, 9, 1], dtype=torch.int32, device=device)
    counts = torch.tensor([6, 0, 0], dtype=torch.int32, device=device)
    dirty = torch.zeros(24, dtype=torch.uint8, device=device)
    arena = rows.clone()
    catch_up_rows(arena, dim, steps[0], ring, TARGET, slots=slots, counts=counts, dirty=dirty, stamp=TARGET + 1)
    chosen = [5, 0, 2, 8]  # 11 and 23 are newer
    assert dirty.nonzero()[:, 0].tolist() == sorted(chosen)
    expected.view(torch.int32)[:, -1] = TARGET + 1
    same_bits(arena[chosen], expected[chosen])
    others = [slot for slot in range(24) if slot not in chosen]
    same_bits(arena[others], rows[others])


def test_rows_of_another_layout_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"must be contiguous float32\[\.\., 13 or more\]"):
        catch_up_rows(torch.zeros(2, 12, device=device), 4, rates_of(OPTIMIZERS[3])[1][0], torch.zeros(2, 4), 1)
