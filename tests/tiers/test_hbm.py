"""The HBM tier, on a GPU or under Triton's interpreter: moving rows between tiers changes no bit."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import (
    OPTIMIZERS,
    Net,
    Reference,
    ReferenceBag,
    all_keys,
    budget_for,
    loss_of,
    make_batches,
    one_torch_thread,
    train_on,
)

import thermocline as tc
from thermocline.arrays import as_keys
from thermocline.kernels import INTERPRETED
from thermocline.tiers import hbm_backend, hbm_update
from thermocline.tiers.dram import DramTier
from thermocline.tiers.hbm import HbmTier, bytes_for, row_capacity
from thermocline.tiers.hbm_transfer import RowTransfer

DEVICE: Any = "interpreter" if INTERPRETED else "cuda"
UNTRAINED = [5, 2**63, 2**64 - 1]


def hbm_table(rows: int, dim: int = 4, optimizer: Any = None, **options: Any) -> tc.Table:
    """Create a table whose HBM tier holds `rows` rows."""
    chosen = optimizer or tc.Adagrad(lr=0.05)
    budget = bytes_for(rows, dim + chosen.state_floats(dim))
    return tc.Table(dim, chosen, hbm=budget, mem="4MB", device=DEVICE, **options)


def hbm_of(table: tc.Table) -> HbmTier:
    assert table.hbm is not None
    return table.hbm


def train_both(
    table: tc.Table, batches: list[tc.Batch], bags: list[tuple[Any, Any]], depth: int = 1, **step: Any
) -> None:
    """Train on `table` and on the reference, both with a dense network on the table's device, and compare."""
    one_torch_thread()
    reference = Reference(table)
    device = hbm_of(table).device
    width = table.dim * sum(f if isinstance(f, int) else len(f) for f, _ in bags)
    model = Net([tc.EmbeddingBag(table, f, pooling=p) for f, p in bags], width).to(device)
    twin = Net([ReferenceBag(reference, f, p) for f, p in bags], width).to(device)
    train_on(model, [table], tc.prefetch(batches, table, depth=depth), **step)
    train_on(twin, [reference], batches, **step)
    keys = [*all_keys(batches).tolist(), *UNTRAINED]
    reference.assert_equals(table, keys)
    hbm_of(table).check()
    table.dram.check()
    table.write_back()
    assert np.array_equal(table.dram.read(np.array(keys, np.uint64)), table.read(np.array(keys, np.uint64)))


@pytest.mark.parametrize(("name", "weighted"), [("sgd", False), ("adagrad", True), ("rowwise", True), ("adam", False)])
def test_each_optimizer(name: str, weighted: bool) -> None:
    batches = make_batches(4, weighted=weighted, keys=120)
    table = hbm_table(60, optimizer=OPTIMIZERS[name])
    train_both(table, batches, [(3, ["sum", "mean", "sum"])], depth=2)
    assert hbm_of(table).stats().evictions > 0


def test_several_bags_and_clipping() -> None:
    batches = make_batches(4, fields=4, weighted=True, keys=100)
    table = hbm_table(80)
    train_both(table, batches, [([0, 1], "mean"), ([1, 2, 3], "sum")], max_norm=0.1)


def test_budget_includes_index_and_metadata() -> None:
    table = hbm_table(100)
    stats = hbm_of(table).stats()
    assert stats.capacity == 100
    assert stats.bytes_total <= stats.budget
    for budget in (1000, 4096, 12345, 10**6):
        rows = row_capacity(budget, 8)
        assert rows == 0 or bytes_for(rows, 8) <= budget < bytes_for(rows + 1, 8)
    with pytest.raises(tc.BudgetError, match="hbm is 10"):
        tc.Table(4, tc.SGD(), hbm=10, device=DEVICE)


def test_batch_over_budget_names_the_budget() -> None:
    (batch,) = make_batches(1, keys=500, examples=8)
    table = hbm_table(10)
    bag = tc.EmbeddingBag(table, 3)
    with pytest.raises(tc.BudgetError, match=r"hbm=.* holds 10 rows"):
        bag(batch)
    gc.collect()
    hbm_of(table).check()
    with pytest.raises(tc.BudgetError, match="holds 10 rows"):
        next(iter(tc.prefetch([batch], table)))
    hbm_of(table).check()


def test_evaluation_inserts_nothing() -> None:
    batches = make_batches(6, keys=100)
    table = hbm_table(70)
    bag = tc.EmbeddingBag(table, 3, pooling="mean")
    for batch in tc.prefetch(batches[:3], table, depth=2):
        bag(batch).sum().backward()
        table.step()
    before = hbm_of(table).stats()
    bag.eval()
    cpu = tc.Table(4, tc.Adagrad(lr=0.05), mem="4MB")
    cpu.dram.push(all_keys(batches), table.read(all_keys(batches)))
    other = tc.EmbeddingBag(cpu, 3, pooling="mean").eval()
    for batch in tc.prefetch(batches, table, training=False):
        assert torch.equal(bag(batch).cpu(), other(batch))
    assert torch.equal(bag(batches[4]).cpu(), other(batches[4]))  # not prefetched
    after = hbm_of(table).stats()
    assert (before.resident, before.ids, before.misses) == (after.resident, after.ids, after.misses)


def test_tier_counts(tmp_path: Any) -> None:
    """Each row of a batch counts once, at its source: new, SSD after reopen, then HBM. Evaluation does not count."""
    batches = make_batches(6)
    unique = sum(len(np.unique(batch.ids)) for batch in batches)
    with_ssd = hbm_table(400, ssd=tmp_path / "rows")
    bag = tc.EmbeddingBag(with_ssd, batches[0].fields)
    for expected in ("new", "ssd"):
        before = with_ssd.tier_counts()
        for batch in tc.prefetch(batches, with_ssd, depth=2):
            bag(batch).sum().backward()
            with_ssd.step()
        bag.eval()(batches[0])
        bag.train()
        counts = {tier: count - before[tier] for tier, count in with_ssd.tier_counts().items()}
        once = len(all_keys(batches))
        assert counts == {"hbm": unique - once, "mem": 0, "ssd": 0, "new": 0, expected: once}
        with_ssd.commit()
        with_ssd.reopen()


def test_pins_are_released_when_a_loop_ends_early() -> None:
    batches = make_batches(8, keys=200)
    table = hbm_table(300)
    bag = tc.EmbeddingBag(table, 3)
    for n, batch in enumerate(tc.prefetch(batches, table, depth=3)):
        out = bag(batch).sum()
        if n == 3:
            break
        out.backward()
        table.step()
    del batch, out
    gc.collect()
    hbm_of(table).check()
    stale = bag(batches[5])
    table.step()
    with pytest.raises(RuntimeError, match="released"):
        stale.sum().backward()


def test_rows_and_reopen(tmp_path: Any) -> None:
    batches = make_batches(6, keys=150)
    table = hbm_table(60, ssd=tmp_path / "rows")
    bag = tc.EmbeddingBag(table, 3)
    for n, batch in enumerate(tc.prefetch(batches, table, depth=2)):
        bag(batch).sum().backward()
        table.step()
        if n == 2:
            table.commit()
            keys = all_keys(batches[:3])
            saved = table.read(keys)
    exported = {int(key): row for keys_, rows_ in table.rows() for key, row in zip(keys_, rows_, strict=True)}
    assert sorted(exported) == sorted(all_keys(batches).tolist())
    assert np.array_equal(np.stack([exported[int(k)] for k in keys]), table.read(keys))
    table.reopen()
    assert np.array_equal(table.read(keys), saved)
    assert hbm_of(table).stats().resident == 0
    table.close()


def test_devices() -> None:
    with pytest.raises(ValueError, match="no hbm"):
        tc.Table(4, tc.SGD(), device="cuda")
    with pytest.raises(ValueError, match="auto, cpu, cuda"):
        tc.Table(4, tc.SGD(), device="tpu")  # type: ignore[arg-type]
    assert tc.Table(4, tc.SGD(), hbm="1MB", device="cpu").hbm is None
    if INTERPRETED:
        assert tc.Table(4, tc.SGD(), hbm="1MB").hbm is None
        with pytest.raises(ValueError, match="no GPU"):
            tc.Table(4, tc.SGD(), hbm="1MB", device="cuda")
    else:
        assert hbm_of(tc.Table(4, tc.SGD(), hbm="1MB")).device.type == "cuda"


def test_loops_that_end_early_change_no_bit() -> None:
    """Slots of windows that were planned but not loaded, or loaded but not trained, are reused correctly."""
    one_torch_thread()
    batches = make_batches(10, keys=150)
    table = hbm_table(70)
    reference = Reference(table)
    model = Net([tc.EmbeddingBag(table, 3)], 12).to(hbm_of(table).device)
    twin = Net([ReferenceBag(reference, 3)], 12).to(hbm_of(table).device)
    dense = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    first = 0
    for depth, steps in [(4, 1), (3, 3), (2, 2), (4, 2), (1, 2)]:
        for n, batch in enumerate(tc.prefetch(batches[first:], table, depth=depth)):
            if n == steps:
                break
            loss_of(model, batch).backward()
            table.step()
            dense.step()
            dense.zero_grad()
        first += steps
    train_on(twin, [reference], batches)
    reference.assert_equals(table, [*all_keys(batches).tolist(), *UNTRAINED])
    hbm_of(table).check()


@pytest.mark.parametrize("erase", [False, True])
def test_evicted_rows_are_pushed_to_their_slots(erase: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are those that the DRAM tier has for the keys, also while later loads reuse the slots in HBM."""
    batches = make_batches(12, keys=100)
    table = hbm_table(70)
    known_rows, pushed_rows = [0], [0]
    push = DramTier.push_stored

    def checked(dram: DramTier, keys: Any, rows: Any, *, known: Any = None, **options: Any) -> None:
        if known is not None:
            wanted, slots = as_keys(keys), np.empty(len(keys), np.uint32)
            dram.read_into(wanted, np.empty_like(rows), slots)
            noted = known.slots != 2**32 - 1
            assert np.array_equal(known.slots[noted], slots[noted])
            assert (known.version == dram.slots_version) == (not erase)
            known_rows[0] += int(noted.sum())
            pushed_rows[0] += len(keys)
        push(dram, keys, rows, known=known, **options)

    monkeypatch.setattr(DramTier, "push_stored", checked)
    if erase:
        table.dram.erase(np.arange(10, dtype=np.uint64))  # another version from now on: keys are compared
    train_both(table, [*batches, *batches], [(3, "sum")], depth=3)
    assert pushed_rows[0] > known_rows[0] > 50  # rows that were initialised in HBM have no slot
    table.write_back()
    hbm_of(table).reset(table.dram)
    assert (hbm_of(table)._transfer.dram_slots.memory == -1).all()


def test_a_failed_write_back_is_an_error_though_later_ones_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save would publish the old rows: it waits for the last write-back only."""
    table = tc.Table(4, tc.SGD(lr=0.1), hbm=bytes_for(60, 4), mem="1MB", device=DEVICE)
    bag = tc.EmbeddingBag(table, 1)
    push, pushes = DramTier.push_stored, 0

    def fail_once(self: DramTier, *args: Any, **options: Any) -> None:
        nonlocal pushes
        pushes += 1
        if pushes == 1:
            raise OSError("no space left")
        push(self, *args, **options)

    monkeypatch.setattr(DramTier, "push_stored", fail_once)
    transfer = hbm_of(table)._transfer

    def train(first: int) -> None:
        keys = np.arange(first, first + 40, dtype=np.uint64)
        bag(tc.Batch(keys, np.arange(41), 1)).sum().backward()
        table.step()

    train(0)
    with contextlib.suppress(OSError, tc.ThermoclineError):  # which call raises it is a matter of time
        train(40)
        train(80)
    transfer.wait_for_write_back()
    assert pushes >= 1
    with pytest.raises(tc.ThermoclineError, match=r"rows were lost between HBM and DRAM .OSError: no space left"):
        table.write_back()
    table.close()


def test_failed_write_back_is_an_error() -> None:
    """A full DRAM tier without SSD raises; afterwards the table refuses to train until it is reopened."""
    batches = make_batches(8, keys=400)
    rows = budget_for(20, 4, tc.SGD())
    budget = bytes_for(60, 4)
    table = tc.Table(4, tc.SGD(lr=0.1), hbm=budget, mem=rows, device=DEVICE)
    bag = tc.EmbeddingBag(table, 3)

    def train() -> None:
        for batch in tc.prefetch(batches, table, depth=2):
            bag(batch).sum().backward()
            table.step()

    with pytest.raises(tc.BudgetError, match="DRAM tier"):
        train()
    with pytest.raises(tc.ThermoclineError, match="rows were lost"):
        bag(batches[0])
    with pytest.raises(tc.ThermoclineError, match="rows were lost"):
        table.read([1])
    table.reopen()
    assert bag(batches[0]).shape == (8, 3, 4)


def test_stochastic_rounding_uses_the_key_before_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU that runs behind: an update runs when the host waits for it, at the latest before its slots are
    overwritten."""
    launched: list[Any] = []

    def wait(*_: Any) -> None:
        while launched:
            launched.pop(0)()

    def defer(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: launched.append(lambda: real(*a, **k)))

    def run_after_wait(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: (wait(), real(*a, **k))[1])

    defer(hbm_update, "update_rows")
    run_after_wait(hbm_backend, "pool_rows")  # on the same stream
    run_after_wait(HbmTier, "wait_for_training")
    run_after_wait(RowTransfer, "_on")  # before evicted rows are copied out
    options: dict[str, Any] = {"precision": tc.Precision(kind="int4"), "mem": "4MB"}
    tables = [
        tc.Table(4, tc.SGD(lr=0.1), hbm=bytes_for(8, 2), device=DEVICE, **options),
        tc.Table(4, tc.SGD(lr=0.1), **options),
    ]
    for table in tables:
        bag = tc.EmbeddingBag(table, 1)
        for n in range(6):
            ids = np.arange(8, dtype=np.uint64) + np.uint64(8 * (n % 3))
            bag(tc.Batch(ids, np.arange(9), 1)).exp().sum().backward()
            table.step()
        wait()
    keys = np.arange(24, dtype=np.uint64)
    assert np.array_equal(tables[0].read(keys), tables[1].read(keys))
    assert hbm_of(tables[0]).stats().evictions == 40


def test_rows_are_those_of_the_first_iteration() -> None:
    """`rows()` writes back when iteration begins, so that a step after the call is included."""
    table = hbm_table(100)
    bag = tc.EmbeddingBag(table, 3)
    (batch,) = make_batches(1)
    rows = table.rows()
    bag(batch).sum().backward()
    table.step()
    keys, values = next(rows)
    assert np.array_equal(values, table.read(keys))


def test_failed_replacement_of_rows_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the DRAM tier was replaced: the undo point brings back the rows that HBM had."""
    table = hbm_table(100)
    bag = tc.EmbeddingBag(table, 3)
    (batch,) = make_batches(1)
    bag(batch).sum().backward()
    table.step()
    before = table.read(batch.ids)
    undo = table.backend.undo_point()

    def fail(*_: Any) -> None:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as broken:
        broken.setattr(HbmTier, "reset", fail)
        with pytest.raises(RuntimeError, match="the device failed"):
            table.backend.replace_rows(iter([]), None)
    undo()
    assert np.array_equal(table.read(batch.ids), before)
    bag(batch).sum().backward()
    table.step()
    hbm_of(table).check()


def test_reopening_under_a_pipeline_is_refused_and_changes_no_row(tmp_path: Any) -> None:
    """Windows in flight have slots of the rows before: their loads would write into slots of other keys."""
    batches = make_batches(4, keys=60)
    table = hbm_table(200, ssd=tmp_path / "rows")
    bag = tc.EmbeddingBag(table, 3)
    table.commit()
    with tc.prefetch(batches, table, depth=2) as prepared:
        first = next(prepared)
        with pytest.raises(tc.ThermoclineError, match=r"reopen\(\) while \d windows have rows in HBM"):
            table.reopen()
        for batch in [first, *prepared]:
            bag(batch).sum().backward()
            table.step()
    trained = table.read(all_keys(batches))
    twin = tc.Table(4, tc.Adagrad(lr=0.05), mem="4MB", name=table.name)
    twin_bag = tc.EmbeddingBag(twin, 3)
    for batch in tc.prefetch(batches, twin, depth=1):
        twin_bag(batch).sum().backward()
        twin.step()
    assert (trained == twin.read(all_keys(batches))).all()
    table.reopen()
    assert (table.read(all_keys(batches)) != trained).any()
    hbm_of(table).check()
