"""The ops together, as a step uses them, against the reference table: initial rows, pooling, dedup, update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.kernels import same_bits

from thermocline.embedding.optimizers import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, initial_state
from thermocline.embedding.reference import Pooling, ReferenceTable
from thermocline.kernels.gradient_index import find_occurrences
from thermocline.kernels.initial import InitialRows, write_initial_rows
from thermocline.kernels.optimizer_rules import Step
from thermocline.kernels.pool import pool_rows
from thermocline.kernels.segments import find_segments
from thermocline.kernels.update import update_rows


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=0.1), Adagrad(lr=0.1, initial_accumulator=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.01, weight_decay=0.01)],
    ids=lambda o: type(o).__name__,
)
def test_three_steps(optimizer: Optimizer, pooling: Pooling, device: str) -> None:
    dim, keys = 19, 60
    random = np.random.default_rng(dim)
    table = ReferenceTable(dim, optimizer, seed=3, table=4)
    all_keys = random.integers(0, 2**64, keys, np.uint64)
    rows = torch.empty(keys, dim + optimizer.state_floats(dim), device=device)
    init = InitialRows.of(table.initial.code, table.initial.scale, initial_state(optimizer), 3, 4)
    places = torch.arange(keys, dtype=torch.int32, device=device)
    write_initial_rows(rows, torch.from_numpy(all_keys.view(np.int64)).to(device), places, dim, init)
    weights, state = rows[:, :dim], rows[:, dim:] if rows.shape[1] > dim else None
    for number in (1, 2, 3):
        ids = np.concatenate([random.integers(0, keys, 150), np.full(70, number)])
        random.shuffle(ids)
        offsets = None if pooling == "none" else np.sort(np.append(random.integers(0, 221, 50), [0, 220]))
        factors = random.normal(size=220).astype(np.float32) if number != 2 else None
        slots = torch.from_numpy(ids.astype(np.int32)).to(device)
        cuts = None if offsets is None else torch.from_numpy(offsets).to(device)
        by = None if factors is None else torch.from_numpy(factors).to(device)
        mean = pooling == "mean"
        segments = find_segments(slots)
        grad_rows, coefs = find_occurrences(len(slots), segments.order, cuts, by, mean, device)
        out = pool_rows(weights, slots, cuts, by, mean=mean)
        same_bits(out.cpu(), torch.from_numpy(table.pool(all_keys[ids], offsets, pooling, factors)))
        grad = random.normal(size=out.shape).astype(np.float32)
        step = Step.of(optimizer, number, lr=0.05, scale=0.5)
        update_rows(weights, state, segments, torch.from_numpy(grad).to(device), grad_rows, coefs, step)
        table.update(all_keys[ids], grad, offsets, pooling, factors, step=number, lr=0.05, scale=0.5)
        same_bits(rows.cpu(), torch.from_numpy(table.read(all_keys)))
