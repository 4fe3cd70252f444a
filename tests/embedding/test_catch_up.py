"""Rows that replay missed steps (`lazy="catch_up"`): as torch's loops over all rows, what reads see, limits, saving.

tests/exact/test_catch_up.py compares bits over tiers and pipelines.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import bits

import thermocline as tc
from thermocline.distributed.shard_reader import ShardReaderTable
from thermocline.embedding.optimizers import Optimizer
from thermocline.embedding.reference import optimize
from thermocline.embedding.reference_backend import ReferenceBackend
from thermocline.embedding.row_version import RowVersion
from thermocline.kernels import INTERPRETED
from thermocline.training.metrics import auc

KEYS, DIM, FIELDS, EXAMPLES, STEPS = 400, 8, 4, 16, 240
ADAM = tc.Adam(lr=0.05, weight_decay=0.02, lazy="catch_up")


def batch_of(ids: Any, fields: int = 1, label: Any = None) -> tc.Batch:
    """Return a batch with one id per field."""
    flat = np.asarray(ids, np.uint64).reshape(-1)
    return tc.Batch(flat, np.arange(len(flat) + 1), fields, label=label)


def last_steps(rows: Any) -> list[int]:
    return rows[:, -1].copy().view(np.uint32).tolist()  # type: ignore[no-any-return]


def step_on(table: tc.Table, bag: tc.EmbeddingBag, ids: Any, **step: Any) -> None:
    bag(batch_of(ids)).sum().backward()
    table.step(**step)


# ---- against torch


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(FIELDS * DIM, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.net(vectors.flatten(1)).squeeze(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (tc.SGD(lr=0.2, weight_decay=0.01, lazy="catch_up"), torch.optim.SGD),
        (tc.Adagrad(lr=0.05, weight_decay=0.01, lazy="catch_up"), torch.optim.Adagrad),
        (tc.Adam(lr=0.01, weight_decay=0.01, lazy="catch_up"), torch.optim.Adam),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, tc.SGD | tc.Adagrad | tc.Adam) else "",
)
def test_as_a_torch_loop_that_updates_all_rows(ours: Optimizer, theirs: Any) -> None:
    """240 steps with a rate of its own each, rows that miss up to all steps: weights within 2e-6, AUC within 0.0003.

    Without replays weights differ by more than 0.01: the bound can fail.
    """
    rng = np.random.default_rng(0)
    effect = rng.normal(size=KEYS)
    ids = (KEYS * rng.random((STEPS + 125, EXAMPLES, FIELDS)) ** 2).astype(np.int64)
    label = torch.from_numpy((rng.random(ids.shape[:2]) < 1 / (1 + np.exp(-effect[ids].sum(2)))).astype(np.float32))

    def rate(step: int) -> float:
        return ours.lr * (1 + math.sin(step / 10)) * 0.7

    def train_table(optimizer: Optimizer) -> tuple[Any, torch.Tensor]:
        table = tc.Table(DIM, optimizer, mem="8MB", seed=1)
        bag, head = tc.EmbeddingBag(table, FIELDS), Head()
        dense = torch.optim.Adam(head.parameters(), lr=0.01)
        for step in range(STEPS):
            logits = head(bag(batch_of(ids[step], FIELDS)))
            torch.nn.functional.binary_cross_entropy_with_logits(logits, label[step]).backward()
            table.step(lr=rate(step))
            dense.step()
            dense.zero_grad()
        bag.eval()
        with torch.no_grad():
            scores = head(bag(batch_of(ids[STEPS:], FIELDS)))
        return table.read(np.arange(KEYS))[:, :DIM], scores

    start = tc.Table(DIM, ours, mem="8MB", seed=1).read(np.arange(KEYS))[:, :DIM]
    embedding = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(start.copy()), freeze=False, mode="sum")
    head = Head()
    dense = torch.optim.Adam(head.parameters(), lr=0.01)
    rows = theirs(embedding.parameters(), lr=ours.lr, weight_decay=ours.weight_decay)

    def forward(part: Any) -> torch.Tensor:
        return head(embedding(torch.from_numpy(part.reshape(-1, 1))).view(-1, FIELDS, DIM))

    for step in range(STEPS):
        torch.nn.functional.binary_cross_entropy_with_logits(forward(ids[step]), label[step]).backward()
        rows.param_groups[0]["lr"] = rate(step)
        for optimizer in (rows, dense):
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        scores = forward(ids[STEPS:])

    held_out = label[STEPS:].flatten()
    weights, ours_scores = train_table(ours)
    expected = embedding.weight.detach().numpy()
    assert np.abs(weights - expected).max() < 2e-6
    assert abs(auc(ours_scores, held_out) - auc(scores, held_out)) < 0.0003
    assert auc(scores, held_out) > 0.6
    touched, _ = train_table(dataclasses.replace(ours, lazy="touched"))
    assert np.abs(touched - expected).max() > 0.01


# ---- reads


HBM: dict[str, Any] = {"hbm": "1MB", "device": "interpreter" if INTERPRETED else "cuda"}


@pytest.mark.parametrize(
    "options", [{}, HBM, {"make_backend": ReferenceBackend.make}], ids=["dram", "hbm", "reference"]
)
def test_reads_are_caught_up_and_change_nothing(options: dict[str, Any]) -> None:
    table = tc.Table(DIM, ADAM, mem="8MB", **options)
    bag = tc.EmbeddingBag(table, 1)
    step_on(table, bag, [1, 2])
    for _ in range(5):
        step_on(table, bag, [2])
    stored = {int(key): row.copy() for keys, rows in table.rows() for key, row in zip(keys, rows, strict=True)}
    assert last_steps(np.stack([stored[1], stored[2]])) == [1, 6]
    read = table.read([1, 2, 3])
    assert last_steps(read) == [6, 6, 6]
    assert np.abs(read[0] - stored[1])[:DIM].max() > 0.05  # momentum goes on
    assert np.abs(read[2, :DIM] - tc.Table(DIM, ADAM, mem="8MB").read([3])[0, :DIM]).max() > 0.001  # L2 from step 1 on
    bag.eval()
    pinned = iter(tc.prefetch([batch_of([1, 2, 3])], table))  # for training
    for batch in (next(pinned), batch_of([1, 2, 3])):
        assert bits(bag(batch).detach().flatten()) == bits(read[:, :DIM])
    assert next(pinned, None) is None
    assert {int(key): row.tobytes() for keys, rows in table.rows() for key, row in zip(keys, rows, strict=True)} == {
        key: row.tobytes() for key, row in stored.items()
    }
    # A frozen bag reads as evaluation does, in training mode too.
    frozen = tc.EmbeddingBag(table, 1)
    frozen.requires_grad_(False)
    assert bits(frozen(batch_of([1, 2, 3])).flatten()) == bits(read[:, :DIM])


@pytest.mark.parametrize("make_backend", [None, ReferenceBackend.make], ids=["dram", "reference"])
def test_a_step_between_forward_and_backward_is_replayed(make_backend: Any) -> None:
    """Key 1 is read before step 2 and updated in step 3: it replays step 2 before."""
    table = tc.Table(DIM, ADAM, mem="8MB", make_backend=make_backend)
    bag = tc.EmbeddingBag(table, 1)
    step_on(table, bag, [1, 2])
    window = iter(tc.prefetch([batch_of([1]), batch_of([2])], table, pull_window=2))
    late = bag(next(window))
    bag(next(window)).sum().backward()
    table.step()
    caught_up = table.read([1])[0]
    late.sum().backward()
    table.step()
    expected = caught_up.copy()
    optimize(ADAM, expected[:-1], np.ones(DIM, np.float32), 3, ADAM.lr)
    expected[-1:].view(np.uint32)[0] = 3
    assert bits(table.read([1])[0]) == bits(expected)


def test_a_forward_pass_without_a_step_counts_as_a_read_of_training(tmp_path: Path) -> None:
    """Its rows are caught up in place, and stay so when they are evicted: this shows beyond `catch_up_steps`."""
    optimizer = dataclasses.replace(ADAM, catch_up_steps=3)
    rows = []
    for options in ({"mem": "12KB", "ssd": tmp_path, "lookahead": 0}, {"make_backend": ReferenceBackend.make}):
        table = tc.Table(DIM, optimizer, **options)  # type: ignore[arg-type]
        bag = tc.EmbeddingBag(table, 1)
        step_on(table, bag, [1])
        for step in range(12):
            if step == 6:
                bag(batch_of([1]))
                table.discard_gradients()
            step_on(table, bag, range(10 + 20 * step, 30 + 20 * step))
        rows.append(bits(table.read([1])))
        assert table.store is None or table.dram.stats().evictions > 200
    assert rows[0] == rows[1]


def test_clipping_by_norm_catches_up_before_the_step() -> None:
    tables = [tc.Table(DIM, ADAM, mem="8MB", make_backend=make) for make in (None, ReferenceBackend.make)]
    for table in tables:
        bag = tc.EmbeddingBag(table, 1)
        for step in range(8):
            step_on(table, bag, [step % 3, 7], max_norm=0.5)
    assert bits(tables[0].read([0, 1, 2, 7, 9])) == bits(tables[1].read([0, 1, 2, 7, 9]))


# ---- limits


def test_a_row_that_missed_more_steps_replays_the_last_ones() -> None:
    """A row misses steps 2 to 11, of which the last four are replayed, each with its rate and number."""
    optimizer = dataclasses.replace(ADAM, catch_up_steps=4)
    table = tc.Table(DIM, optimizer, mem="8MB")
    bag = tc.EmbeddingBag(table, 1)
    step_on(table, bag, [1, 2])
    expected = table.read([1])[0]
    for step in range(2, 12):
        step_on(table, bag, [2], lr=0.01 * step)
    for step in range(8, 12):
        optimize(optimizer, expected[:-1], np.zeros(DIM, np.float32), step, 0.01 * step)
    expected[-1:].view(np.uint32)[0] = 11
    assert bits(table.read([1])[0]) == bits(expected)


@pytest.mark.parametrize("optimizer", [tc.SGD(lazy="catch_up"), tc.Adagrad(lazy="catch_up")], ids=str)
def test_missed_steps_without_l2_change_nothing(optimizer: Optimizer) -> None:
    table = tc.Table(DIM, optimizer, mem="8MB")
    bag = tc.EmbeddingBag(table, 1)
    step_on(table, bag, [1, 2])
    before = table.read([1])
    step_on(table, bag, [2])
    assert bits(table.read([1])[:, :-1]) == bits(before[:, :-1])


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"Adam\.lazy is 'never': it must be one of touched, catch_up"):
        tc.Adam(lazy="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SGD\.catch_up_steps is 0: it must be a whole number from 1 to 100,000"):
        tc.SGD(lazy="catch_up", catch_up_steps=0)
    with pytest.raises(ValueError, match=r'Adam\.lazy is \'catch_up\': it must be "touched" with precision bf16'):
        tc.Table(DIM, ADAM, precision="bf16")
    with pytest.raises(tc.ConfigError, match=r"train\.lazy is \"never\""):
        tc.Config.parse('[train]\nlazy = "never"')


def test_steps_that_replay_are_not_recorded() -> None:
    table = tc.Table(DIM, ADAM, mem="8MB", **HBM)
    assert table.backend.cannot_record() == "rows of table 'table' replay missed steps (lazy = \"catch_up\")"


# ---- saving


def test_the_layout_of_other_tables_is_as_before() -> None:
    """Stores and checkpoints of earlier versions open: their layouts do not have the new fields."""
    for optimizer in (tc.SGD(), tc.Adagrad(), tc.RowWiseAdagrad(), tc.Adam()):
        layout = tc.Table(DIM, optimizer, mem="8MB").layout["optimizer"]
        assert not {"lazy", "catch_up_steps"} & layout.keys()
    assert tc.Table(DIM, ADAM, mem="8MB").layout["optimizer"]["lazy"] == "catch_up"
    assert ADAM.state_floats(DIM) == tc.Adam().state_floats(DIM) + 1


def test_state_dict_has_the_rates() -> None:
    """Loaded rows go on with the bits of the original, with rates that changed before."""
    tables = [tc.Table(DIM, ADAM, mem="8MB") for _ in range(2)]
    bags = [tc.EmbeddingBag(table, 1) for table in tables]
    for step in range(6):
        step_on(tables[0], bags[0], [1, 2] if step == 0 else [2], lr=0.01 * (step + 1))
    models = [torch.nn.Sequential(bag) for bag in bags]
    state = tc.state_dict(models[0], rows=True)
    tc.load_state_dict(models[1], state)
    for table, bag in zip(tables, bags, strict=True):
        step_on(table, bag, [1])
    assert bits(tables[0].read([1, 2, 3])) == bits(tables[1].read([1, 2, 3]))

    from thermocline.embedding.table_state import decode, encode

    description = decode(state["tables/table/table"])
    del description["rates"]
    state["tables/table/table"] = encode(description)
    with pytest.raises(tc.FormatError, match=r"step 6 have the rates of 0 steps saved"):
        tc.load_state_dict(models[1], state)


def test_a_store_opens_with_its_rates(tmp_path: Path) -> None:
    """A table opened on a commit replays steps before it; a table that does not catch up cannot open the store."""
    with_steps = tc.Table(DIM, ADAM, mem="8MB", ssd=tmp_path)
    bag = tc.EmbeddingBag(with_steps, 1)
    for step in range(6):
        step_on(with_steps, bag, [1, 2] if step == 0 else [2], lr=0.01 * (step + 1))
    with_steps.commit(b"mine")
    expected = bits(with_steps.read([1, 2, 3]))
    with_steps.close()
    again = tc.Table(DIM, ADAM, mem="8MB", ssd=tmp_path)
    assert again.note == b"mine"
    assert bits(again.read([1, 2, 3])) == expected
    again.close()
    reader = ShardReaderTable(DIM, ADAM, mem="8MB", ssd=tmp_path)
    reader.open_stores([(tmp_path, 1)])
    reader.set_version(RowVersion("", 6), [(0.01 * step, 1) for step in range(1, 7)])
    assert bits(reader.read([1, 2, 3])) == expected
    reader.close()
    with pytest.raises(tc.ThermoclineError, match="100"):
        tc.Table(DIM, tc.Adam(), mem="8MB", ssd=tmp_path)
