"""`tc.Table` gives the bits of the reference table: steps, learning rates, clipping, accumulation, tables and bags."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ssd import SMALL
from helpers.train import (
    OPTIMIZERS,
    Net,
    Reference,
    ReferenceBag,
    all_keys,
    bits,
    loss_of,
    make_batches,
    one_torch_thread,
    train_on,
    weights_of,
)

import thermocline as tc

pytestmark = pytest.mark.usefixtures("_one_thread")
UNTRAINED = [5, 2**63, 2**64 - 1]


@pytest.fixture
def _one_thread() -> None:
    one_torch_thread()


class Twins:
    """A model on `tc.Table` and an equal one on the reference."""

    def __init__(self, tables: list[tc.Table], bags: list[tuple[int, Any, Any]], seed: int = 0) -> None:
        """bags: (index of the table, fields, pooling)."""
        self.tables = tables
        self.references = [Reference(table, seed=seed) for table in tables]
        width = sum(tables[t].dim * (f if isinstance(f, int) else len(f)) for t, f, _ in bags)
        self.model = Net([tc.EmbeddingBag(tables[t], f, pooling=p) for t, f, p in bags], width)
        self.twin = Net([ReferenceBag(self.references[t], f, p) for t, f, p in bags], width)

    def train(self, batches: list[tc.Batch], **step: Any) -> None:
        train_on(self.model, self.tables, tc.prefetch(batches, *self.tables, depth=2), **step)
        train_on(self.twin, self.references, batches, **step)

    def check(self, batches: list[tc.Batch]) -> None:
        keys = [*all_keys(batches).tolist(), *UNTRAINED]
        for table, reference in zip(self.tables, self.references, strict=True):
            reference.assert_equals(table, keys)
            table.dram.check()
        assert weights_of(self.model) == weights_of(self.twin)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_each_optimizer(optimizer: Any, weighted: bool) -> None:
    batches = make_batches(6, weighted=weighted)
    twins = Twins([tc.Table(5, optimizer, mem="1MB")], [(0, 3, ["sum", "mean", "sum"])])
    twins.train(batches)
    twins.check(batches)


def test_several_tables_of_different_dims_and_optimizers() -> None:
    batches = make_batches(8, fields=5, weighted=True)
    tables = [
        tc.Table(4, tc.SGD(lr=0.1), mem="1MB", name="a"),
        tc.Table(7, tc.Adam(lr=0.01, weight_decay=0.1), mem="1MB", name="b"),
        tc.Table(1, tc.RowWiseAdagrad(lr=0.1), mem="1MB", name="c"),
    ]
    twins = Twins(tables, [(0, [0, 1], "sum"), (1, [1, 2, 3], ["mean", "sum", "mean"]), (2, 5, "mean")])
    twins.train(batches)
    twins.check(batches)
    rows = [table.read(all_keys(batches)) for table in tables]
    assert [r.shape[1] for r in rows] == [4, 21, 2]


def test_several_bags_on_one_table() -> None:
    batches = make_batches(8, fields=4, keys=60, weighted=True)
    table = tc.Table(6, tc.Adagrad(lr=0.05), mem="1MB")
    # Overlapping fields, fields pooled alike in two bags, and equal groups at different positions.
    bags = [(0, [0, 1], "sum"), (0, [1, 2, 3], ["sum", "mean", "sum"]), (0, [0, 2, 1], ["sum", "mean", "sum"])]
    twins = Twins([table], bags)
    twins.train(batches)
    twins.check(batches)


def test_initial_rows_depend_on_name_and_seed() -> None:
    options = {"mem": "1MB", "optimizer": tc.SGD()}
    rows = [tc.Table(8, name=n, seed=s, **options).read(UNTRAINED) for n, s in [("a", 0), ("b", 0), ("a", 1), ("a", 0)]]  # type: ignore[arg-type]
    assert bits(rows[0]) == bits(rows[3])
    assert len({bits(r) for r in rows}) == 3
    reference = Reference(tc.Table(8, tc.SGD(), mem="1MB", name="a"), seed=1)
    assert bits(reference.table.read(UNTRAINED)) == bits(rows[2])


# ---- step


def test_learning_rate_of_the_table_and_of_one_step() -> None:
    batches = make_batches(9)
    twins = Twins([tc.Table(4, tc.Adam(lr=0.5), mem="1MB")], [(0, 3, "sum")])
    for n, batch in enumerate(batches):
        rate = 0.5 / (n + 1)
        for side in (*twins.tables, *twins.references):
            side.lr = rate
        twins.train([batch], **({"lr": 0.003} if n % 3 == 1 else {}))
    twins.check(batches)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_clipping(optimizer: Any, max_norm: float) -> None:
    batches = make_batches(5, keys=40)
    twins = Twins([tc.Table(4, optimizer, mem="1MB")], [(0, 3, ["mean", "sum", "sum"])])
    twins.train(batches, max_norm=max_norm, scale=0.5)
    twins.check(batches)


@pytest.mark.parametrize("max_norm", [0.02, 10.0])
def test_clipping_equals_torch(max_norm: float) -> None:
    (batch,) = make_batches(1, keys=40)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    model = Net([tc.EmbeddingBag(table, 3)], 12)
    keys = all_keys([batch])
    embedding = torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(table.read(keys)), freeze=False, mode="sum", include_last_offset=True
    )
    indices = torch.from_numpy(np.searchsorted(keys, batch.ids))
    twin = Net([lambda b: embedding(indices, torch.from_numpy(b.offsets)).view(len(b), -1)], 12)
    twin.dense.load_state_dict(model.dense.state_dict())
    loss_of(model, batch).backward()
    loss_of(twin, batch).backward()
    norm = table.step(max_norm=max_norm)
    expected = torch.nn.utils.clip_grad_norm_(embedding.parameters(), max_norm)
    torch.optim.SGD(embedding.parameters(), lr=0.1).step()
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    assert norm is not None
    assert 0.02 < norm < 10.0, "one of the two cases must clip"
    np.testing.assert_allclose(table.read(keys), embedding.weight.detach().numpy(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gradient_norm_changes_nothing(optimizer: Any) -> None:
    """gradient_norm() between or after the backward passes of a step equals the norm of the step; no row changes."""
    batches = make_batches(6, keys=40, weighted=True)
    tables = [tc.Table(4, optimizer, mem="1MB") for _ in range(2)]
    models = [Net([tc.EmbeddingBag(table, 3, pooling=["mean", "sum", "sum"])], 12) for table in tables]
    for n, batch in enumerate(batches):
        for table, model in zip(tables, models, strict=True):
            loss_of(model, batch).backward()
            if table is tables[0] and n != 2:
                assert table.gradient_norm() > 0
        if n % 2:
            norm = tables[0].gradient_norm()
            tables[0].step(scale=0.5)
            assert tables[1].step(scale=0.5, max_norm=1e6) == 0.5 * norm
            assert [table.gradient_norm() for table in tables] == [0.0, 0.0]
            assert bits(tables[0].read(all_keys(batches))) == bits(tables[1].read(all_keys(batches)))
    loss_of(models[0], batches[0]).backward()
    tables[0].gradient_norm()
    before = tables[0].read(all_keys(batches))
    tables[0].discard_gradients()
    tables[0].step()
    assert bits(tables[0].read(all_keys(batches))) == bits(before)
    tables[0].dram.check()


@pytest.mark.parametrize("kind", [tc.SGD, tc.Adagrad, tc.RowWiseAdagrad, tc.Adam, tc.PartialRowWiseAdam])
def test_weight_decay_is_l2_on_touched_rows(kind: Any) -> None:
    batches = make_batches(6, keys=60)
    table = tc.Table(4, kind(lr=0.05, weight_decay=0.3), mem="1MB")
    twins = Twins([table], [(0, 3, "sum")])
    twins.train(batches[:3])
    before = table.read(all_keys(batches))
    twins.train(batches[3:4])
    touched = np.isin(all_keys(batches), batches[3].ids)
    changed = (table.read(all_keys(batches)) != before).any(1)
    assert (changed == touched).all()
    twins.check(batches)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("window", [1, 2])
def test_gradient_accumulation(optimizer: Any, window: int) -> None:
    """Steps after 1, 3, 2 and 3 backward passes: gradients of a key are summed over them, then applied once."""
    batches = make_batches(9, keys=80, weighted=True)
    table = tc.Table(4, optimizer, mem="1MB", accumulate=3)
    twins = Twins([table], [(0, [0, 2], "sum"), (0, [1], "mean")])
    stops = {0, 3, 5, 8}
    for model, tables, source in (
        (twins.model, twins.tables, tc.prefetch(batches, *twins.tables, depth=3, pull_window=window)),
        (twins.twin, twins.references, batches),
    ):
        for n, batch in enumerate(source):
            loss_of(model, batch).backward()
            if n in stops:
                tables[0].step(scale=0.5)
    twins.check(batches)
    assert twins.tables[0].step_count == 4


def test_loss_scale_and_discarded_step() -> None:
    """AMP: the loss is scaled, the step applies 1 / scale. A discarded step changes nothing and is not counted."""
    batches = make_batches(6)
    table = tc.Table(4, tc.Adam(lr=0.01), mem="1MB")
    twins = Twins([table], [(0, 3, "sum")])
    for n, batch in enumerate(tc.prefetch(batches, table)):
        (loss_of(twins.model, batch) * 1024.0).backward()
        if n == 2:
            table.discard_gradients()
        else:
            table.step(scale=1 / 1024)
    for n, batch in enumerate(batches):
        (loss_of(twins.twin, batch) * 1024.0).backward()
        if n == 2:
            twins.references[0].tape.clear()
        else:
            twins.references[0].step(scale=1 / 1024)
    assert table.step_count == 5
    twins.check(batches)


def test_half_precision_gradients() -> None:
    (batch,) = make_batches(1)
    table = tc.Table(4, tc.SGD(lr=1.0), mem="1MB")
    bag = tc.EmbeddingBag(table, 3)
    keys = all_keys([batch])
    before = table.read(keys)
    bag(batch).to(torch.bfloat16).sum().backward()
    table.step()
    uses = np.array([(batch.ids == key).sum() for key in keys], np.float32)
    assert bits(table.read(keys)) == bits(before - uses[:, None])


def test_step_without_gradients_is_counted() -> None:
    batches = make_batches(3)
    twins = Twins([tc.Table(4, tc.Adam(lr=0.01), mem="1MB")], [(0, 3, "sum")])
    for batch in batches:
        twins.train([batch])
        for side in (*twins.tables, *twins.references):
            assert side.step() is None
            assert side.step(max_norm=1.0) == 0.0
    assert twins.tables[0].step_count == 9
    twins.check(batches)


def test_failed_step_changes_nothing_and_leaves_no_pin() -> None:
    batches = make_batches(2)
    twins = Twins([tc.Table(4, tc.Adam(lr=0.01), mem="1MB")], [(0, 3, "sum")])
    (table,) = twins.tables
    twins.train(batches[:1])
    loss_of(twins.model, batches[1]).backward()
    (gradient,) = table._pending.gradients
    gradient.values = gradient.values[:, :2]
    with pytest.raises(Exception, match=r"."):
        table.step()
    assert table.step_count == 1
    table.dram.check()
    twins.model.zero_grad()
    twins.train(batches)
    twins.check(batches)


# ---- batches and rows


def test_more_than_64_occurrences_of_one_key() -> None:
    """Blocks of 64 are summed separately: 200 occurrences over several bags and batches."""
    rng = np.random.default_rng(0)
    batches = [
        tc.Batch.from_lists(
            [[rng.integers(0, 3, 5).tolist(), [7] * 9] for _ in range(20)],
            label=torch.from_numpy(rng.integers(0, 2, 20).astype(np.float32)),
        )
        for _ in range(4)
    ]
    table = tc.Table(3, tc.Adagrad(lr=0.1), mem="1MB", accumulate=4)
    twins = Twins([table], [(0, [1, 0], ["sum", "mean"]), (0, [0], "sum")])
    twins.train(batches)
    for model, table in ((twins.model, twins.tables[0]), (twins.twin, twins.references[0])):
        for batch in batches:
            loss_of(model, batch).backward()
        table.step()
    twins.check(batches)


@pytest.mark.parametrize("how", ["prefetched", "by hand"])
def test_batches_are_reused_over_epochs(how: str) -> None:
    batches = make_batches(4)
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")
    twins = Twins([table], [(0, 3, "sum")])
    for _ in range(3):
        train_on(twins.model, [table], tc.prefetch(batches, table, depth=8) if how == "prefetched" else batches)
        train_on(twins.twin, twins.references, batches)
    twins.check(batches)
    assert all(batch.prepared == {} for batch in batches)


def test_batch_in_flight_many_times() -> None:
    (batch,) = make_batches(1)
    table = tc.Table(4, tc.Adam(lr=0.1), mem="1MB")
    twins = Twins([table], [(0, 3, "sum")])
    twins.train([batch] * 12)
    twins.check([batch])


def test_rows_yields_the_trained_rows() -> None:
    batches = make_batches(4)
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB")
    twins = Twins([table], [(0, [0, 1], "sum")])
    twins.train(batches)
    table.read(UNTRAINED)
    seen = {int(k): row.tobytes() for keys, rows in table.rows(7) for k, row in zip(keys, rows, strict=True)}
    assert seen == {key: row.tobytes() for key, row in twins.references[0].table.rows.items()}


# ---- store


def test_commit_reopen_and_older_epoch(tmp_path: Path) -> None:
    batches = make_batches(6)
    table = tc.Table(4, tc.Adagrad(lr=0.1), mem="1MB", ssd=tmp_path / "t", ssd_options=SMALL)
    twins = Twins([table], [(0, 3, "sum")])
    keys = all_keys(batches)
    twins.train(batches[:2])
    old, epoch = table.read(keys), table.commit()
    twins.train(batches[2:4])
    middle, _ = table.read(keys), table.commit(b"a note")
    twins.train(batches[4:])
    assert bits(table.read(keys)) != bits(middle)
    table.reopen()
    assert bits(table.read(keys)) == bits(middle)
    assert table.note == b"a note"
    table.reopen(epoch)
    assert bits(table.read(keys)) == bits(old)
    table.close()
    with tc.SsdStore.open(tmp_path / "t") as store:
        assert store.row_bytes == 32


def test_reopen_during_a_pipeline_keeps_rows_correct(tmp_path: Path) -> None:
    batches = make_batches(12, keys=300)
    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path / "t", ssd_options=SMALL)
    bag = tc.EmbeddingBag(table, 3)
    table.commit()
    with tc.prefetch(batches, table, depth=4) as source:
        first = next(source)
        old = bag(first).sum()
        while table.dram.stats().pinned < len(all_keys(batches[:4])):
            time.sleep(0.001)  # otherwise a pull in progress fails on the closed store
        table.reopen()
        with pytest.raises(RuntimeError, match="released"):
            old.backward()
        assert bits(bag(first)) == bits(bag.eval()(batches[0]))
        bag.train()
        bag(first).sum().backward()
        table.step()
        for batch in source:  # pulled before or after reopen
            bag(batch).sum().backward()
            table.step()
    twin = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    copy = tc.EmbeddingBag(twin, 3)
    for batch in batches:
        copy(batch).sum().backward()
        twin.step()
    assert bits(table.read(all_keys(batches))) == bits(twin.read(all_keys(batches)))
    table.dram.check()
    table.close()


def test_commit_without_ssd_is_an_error() -> None:
    with pytest.raises(ValueError, match="'ads' has no ssd"):
        tc.Table(4, tc.SGD(), mem="1MB", name="ads").commit()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        *(({name: value}, "a whole number") for name in ("dim", "seed", "threads") for value in ("16", 16.0, True)),
        *(
            ({"optimizer": value}, "SGD, Adagrad, RowWiseAdagrad, Adam or PartialRowWiseAdam, such as Adagrad")
            for value in ("adagrad", None)
        ),
        ({"initial": 3}, "Uniform, Normal or Constant"),
        ({"ssd": 5}, "a folder's name, or None"),
        ({"name": 3}, "text"),
    ],
)
def test_arguments_of_wrong_type_are_named(options: dict[str, Any], rule: str) -> None:
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=f"^{name} is {value!r}: it must be {rule}"):
        tc.Table(**{"dim": 4, "optimizer": tc.SGD(lr=0.1), **options})


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b"])
def test_names(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        tc.Table(4, tc.SGD(), mem="1MB", name=name)


def test_batch_over_budget_names_the_budget() -> None:
    table = tc.Table(16, tc.Adagrad(), mem="100KB")
    bag = tc.EmbeddingBag(table, 3)
    (batch,) = make_batches(1, examples=1000, keys=10**6)
    with pytest.raises(tc.BudgetError, match=r"(?s)100.*rows"):
        bag(batch)
    table.dram.check()


def test_table_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """No thread, cache or autograd graph keeps a table, its memory or the lock of its store."""

    def train() -> weakref.ref[tc.Table]:
        table = tc.Table(4, tc.SGD(), mem="1MB", ssd=tmp_path / "t", ssd_options=SMALL)
        bag = tc.EmbeddingBag(table, 3)
        for batch in tc.prefetch(make_batches(5), table):
            bag(batch).sum().backward()
            table.step()
        return weakref.ref(table)

    table = train()
    gc.collect()
    assert table() is None
    tc.Table(4, tc.SGD(), mem="1MB", ssd=tmp_path / "t", ssd_options=SMALL).close()
