"""The kernels of a training step together, against the reference table: pooling, segments, gradients, update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import same_bits

from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from thermocline.embedding.reference import Pooling, ReferenceTable
from thermocline.kernels.gradient_index import index_gradients
from thermocline.kernels.optimizer_rules import OptimizerStep
from thermocline.kernels.pool import pool_rows
from thermocline.kernels.segments import find_segments
from thermocline.kernels.update import update_rows


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.1),
        Adagrad(lr=0.1, initial_accumulator=0.1),
        RowWiseAdagrad(lr=0.1),
        Adam(lr=0.01, weight_decay=0.01),
        PartialRowWiseAdam(lr=0.01, weight_decay=0.01),
    ],
    ids=lambda o: type(o).__name__,
)
@pytest.mark.parametrize(("keys", "cold"), [(30, 60), pytest.param(6000, 15000, marks=pytest.mark.gpu)])
def test_three_steps(keys: int, cold: int, optimizer: Optimizer, pooling: Pooling, device: str) -> None:
    """Every step has `cold` random ids and one hot key of two blocks; step 2 has no weights."""
    dim, ids_per_step = 19, cold + 66
    random = np.random.default_rng(dim)
    table = ReferenceTable(dim, optimizer, seed=3, table=4)
    all_keys = random.integers(0, 2**64, keys, np.uint64)
    rows = torch.from_numpy(table.read(all_keys)).to(device)
    weights, state = rows[:, :dim], rows[:, dim:] if rows.shape[1] > dim else None
    for number in (1, 2, 3):
        ids = np.concatenate([random.integers(0, keys, cold), np.full(66, number)])
        random.shuffle(ids)
        offsets = None
        if pooling != "none":
            cuts = random.integers(0, ids_per_step + 1, ids_per_step // 4)
            offsets = np.sort(np.append(cuts, [0, ids_per_step]))
        factors = random.normal(size=ids_per_step).astype(np.float32) if number != 2 else None
        slots = torch.from_numpy(ids.astype(np.int32)).to(device)
        device_offsets = None if offsets is None else torch.from_numpy(offsets).to(device)
        device_factors = None if factors is None else torch.from_numpy(factors).to(device)
        mean = pooling == "mean"
        segments = find_segments(slots)
        grad_rows, coefs = index_gradients(len(slots), segments.order, device_offsets, device_factors, mean, device)
        out = pool_rows(weights, slots, device_offsets, device_factors, mean=mean)
        same_bits(out.cpu(), torch.from_numpy(table.pool(all_keys[ids], offsets, pooling, factors)))
        grad = random.normal(size=out.shape).astype(np.float32)
        step = OptimizerStep.of(optimizer, number, lr=0.05, scale=0.5)
        update_rows(weights, state, segments, torch.from_numpy(grad).to(device), grad_rows, coefs, step)
        table.update(all_keys[ids], grad, offsets, pooling, factors, step=number, lr=0.05, scale=0.5)
        same_bits(rows.cpu(), torch.from_numpy(table.read(all_keys)))
