"""Admission: settings, what a key without a row reads as, counts over saves, pipelines and rows from elsewhere."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.admission import count_within
from helpers.backends import open_table
from helpers.ssd import SMALL

import thermocline as tc
from thermocline.embedding.admission import SHARED_KEY

LOCAL = ["dram", "hbm", "reference"]


def batch_of(*examples: list[int], weights: Any = None) -> tc.Batch:
    return tc.Batch.from_lists([[ids] for ids in examples], weights=weights)


def train(table: tc.Table, bag: Any, *examples: list[int]) -> torch.Tensor:
    """Train one batch with gradient 1; return its vectors."""
    pooled = bag(batch_of(*examples))
    pooled.sum().backward()
    table.step()
    return pooled.detach().cpu()


def keys_of(table: tc.Table) -> set[int]:
    return {key for keys, _ in table.rows() for key in keys.tolist()}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({}, "Admission.count is None: it must be a number of occurrences from 1, or None with a probability"),
        ({"count": 0}, "Admission.count is 0: it must be a number of occurrences from 1"),
        ({"count": 2, "probability": 0.5}, "Admission.probability is 0.5: it must be None with count=2"),
        ({"probability": 1.5}, "Admission.probability is 1.5: it must be a number above 0 and up to 1"),
        ({"count": 2**17, "sketch": True}, "Admission.count is 131072: it must be at most 65535 with sketch=True"),
        ({"probability": 0.5, "sketch": True}, "Admission.sketch is True: it must be False with a probability"),
        ({"count": 2, "memory": 100}, "Admission.memory is 100: it must be a size of at least 4096 bytes"),
        ({"count": 2, "otherwise": "none"}, "Admission.otherwise is 'none': it must be one of initial, zero, shared"),
    ],
)
def test_settings_are_checked(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + text.replace("(", r"\(")):
        tc.Admission(**setting)


def test_tables_that_cannot_have_admission_are_refused() -> None:
    with pytest.raises(ValueError, match=r"precision.scale_lr is 0.01: it must be 0 with admission"):
        open_table("dram", admission=tc.Admission(count=2), precision=tc.Precision("int8", range=1.0, scale_lr=0.01))
    with pytest.raises(ValueError, match=r"Adam\.lazy is 'catch_up': it must be touched with admission"):
        open_table(
            "dram", admission=tc.Admission(count=2), optimizer=tc.Adam(lr=0.1, weight_decay=0.1, lazy="catch_up")
        )
    with pytest.raises(TypeError, match=r"admission is 3: it must be a tc\.Admission"):
        open_table("dram", admission=3)


@pytest.mark.parametrize("backend", LOCAL)
def test_a_key_not_admitted_reads_its_initial_row_and_is_not_trained(backend: str) -> None:
    table = open_table(backend, admission=tc.Admission(count=3))
    bag = tc.EmbeddingBag(table, 1)
    initial = table.read(np.array([7, 8], np.uint64))
    vectors = train(table, bag, [7], [7, 8], [])
    expected = np.stack([initial[0, :4], initial[0, :4] + initial[1, :4], 0 * initial[0, :4]])
    assert torch.equal(vectors[:, 0], torch.from_numpy(expected))
    assert keys_of(table) == set()
    train(table, bag, [7], [8])  # 7 has three occurrences, 8 two
    assert keys_of(table) == {7}
    assert not np.array_equal(table.read([7])[0], initial[0])
    assert np.array_equal(table.read([8])[0], initial[1])
    table.close()


@pytest.mark.parametrize("backend", LOCAL)
def test_mean_divides_by_all_ids_and_zero_is_zero_in_evaluation_too(backend: str) -> None:
    table = open_table(backend, admission=tc.Admission(count=2, otherwise="zero"))
    mean, single = tc.EmbeddingBag(table, 1, pooling="mean"), tc.EmbeddingBag(table, 1, pooling="none")
    batch = batch_of([7, 8, 9])
    train(table, mean, [7, 7])
    row = torch.from_numpy(table.read([7])[0, :4])
    for module in (mean, single):
        module.eval()
    assert torch.equal(mean(batch).cpu()[0, 0], row / 3)
    assert torch.equal(single(batch).cpu(), torch.stack([row, 0 * row, 0 * row]))
    table.close()


@pytest.mark.parametrize("backend", LOCAL)
def test_the_shared_row_is_trained(backend: str) -> None:
    table = open_table(backend, admission=tc.Admission(count=3, otherwise="shared"))
    bag = tc.EmbeddingBag(table, 1)
    before = table.read([SHARED_KEY])[0, :4]
    vectors = train(table, bag, [5], [6])
    assert torch.equal(vectors[:, 0], torch.from_numpy(np.stack([before, before])))
    assert keys_of(table) == {SHARED_KEY}
    bag.eval()
    assert torch.equal(bag(batch_of([11])).cpu()[0, 0], torch.from_numpy(table.read([SHARED_KEY])[0, :4]))
    table.close()


@pytest.mark.parametrize("otherwise", ["initial", "zero", "shared"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_weights_per_id_get_their_gradient(otherwise: Any, pooling: Any) -> None:
    """Each weight's gradient is the dot product of its vector, as it was read, and the gradient of the bag."""
    table = open_table("dram", admission=tc.Admission(count=2, otherwise=otherwise))
    bag = tc.EmbeddingBag(table, 1, pooling=pooling)
    single = tc.EmbeddingBag(table, 1, pooling="none").eval()
    train(table, tc.EmbeddingBag(table, 1), [7, 7])
    batch = batch_of([7, 8], [9], weights=[0.5, 2.0, -1.0])
    vectors = single(batch_of([7, 8], [9]))
    weights = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    grad = torch.randn(3, 4) if pooling == "none" else torch.randn(2, 1, 4)
    bag(batch, weights).backward(grad)
    of_id = grad if pooling == "none" else grad[torch.tensor([0, 0, 1]), 0]
    expected = (vectors * of_id).sum(1) / (torch.tensor([2.0, 2.0, 1.0]) if pooling == "mean" else 1)
    assert weights.grad is not None
    assert torch.allclose(weights.grad, expected, atol=1e-6)
    table.discard_gradients()
    table.close()


@pytest.mark.parametrize("setting", [{"count": 3}, {"count": 3, "sketch": True}, {"probability": 0.3}])
def test_evaluation_counts_nothing(setting: Any) -> None:
    table = open_table("dram", admission=tc.Admission(**setting, otherwise="zero"))
    bag = tc.EmbeddingBag(table, 1)
    bag.eval()
    for _ in range(4):
        assert not bag(batch_of([7])).any()
        for batch in tc.prefetch([batch_of([7])], table, training=False):
            assert not bag(batch).any()
    stats = table.admission_stats
    assert stats is not None
    assert stats.batches == stats.counters == stats.keys_admitted == 0
    table.close()


@pytest.mark.parametrize("sketch", [False, True])
def test_counters_are_saved_as_of_the_trained_step(sketch: bool, tmp_path: Path) -> None:
    """Fails if batches that were only planned had advanced the saved counters: key 7 would be admitted too early."""
    setting = tc.Admission(count=3, sketch=sketch, memory="64KB")
    for resumed in (False, True):
        table = open_table("dram", admission=setting)
        bag = tc.EmbeddingBag(table, 1)
        checkpoints = tc.Checkpoints(tmp_path, [table])
        if resumed:
            assert checkpoints.restore() is not None
        source = tc.prefetch([batch_of([7])] * 6, table, depth=6)
        admitted = []
        for step, batch in enumerate(source, 1):
            bag(batch).sum().backward()
            table.step()
            admitted.append(7 in keys_of(table))
            if not resumed and step == 1:
                checkpoints.save(step)
        assert admitted == ([False, True] if resumed else [False, False]) + [True] * 4
        checkpoints.close()
        table.close()


def test_batches_of_a_closed_pipeline_do_not_count() -> None:
    table = open_table("dram", admission=tc.Admission(count=3))
    bag = tc.EmbeddingBag(table, 1)
    for _ in range(2):
        for batch in tc.prefetch([batch_of([7])] * 9, table, depth=8):
            bag(batch).sum().backward()
            table.step()
            break
        assert keys_of(table) == set()
    train(table, bag, [7])
    assert keys_of(table) == {7}
    table.close()


def test_a_second_planner_is_refused() -> None:
    table = open_table("dram", admission=tc.Admission(count=3))
    bag = tc.EmbeddingBag(table, 1)
    with tc.prefetch([batch_of([7])] * 3, table) as source:
        next(source)
        with pytest.raises(tc.ThermoclineError, match="has admission and an open training pipeline"):
            tc.prefetch([batch_of([7])], table)
        with pytest.raises(tc.ThermoclineError, match="has admission and an open training pipeline"):
            bag(batch_of([8]))
        with pytest.raises(tc.ThermoclineError, match=r"requires_grad_\(\) while a training pipeline is open"):
            bag.requires_grad_(False)
    with pytest.raises(ValueError, match="depth"):
        tc.prefetch([batch_of([7])], table, depth=0)
    train(table, bag, [7])
    table.close()


def test_keys_with_a_row_are_admitted(tmp_path: Path) -> None:
    """Of a store that was trained without admission, of a state_dict, and of `load_rows`."""
    options: dict[str, Any] = {"ssd": tmp_path / "store", "ssd_options": SMALL}
    table = open_table("dram", **options)
    train(table, tc.EmbeddingBag(table, 1), [1, 2])
    table.commit()
    table.close()
    table = open_table("dram", admission=tc.Admission(count=2, otherwise="zero"), **options)
    bag = tc.EmbeddingBag(table, 1)
    bag.eval()
    assert [bool(bag(batch_of([key])).any()) for key in (1, 2, 3)] == [True, True, False]
    bag.train()
    train(table, bag, [1, 3])
    assert keys_of(table) == {1, 2}
    state = tc.state_dict(bag, rows=True)
    table.close()
    other = open_table("dram", admission=tc.Admission(count=9))
    bag = tc.EmbeddingBag(other, 1)
    tc.load_state_dict(bag, state)
    other.load_rows([5], np.ones((1, 4), np.float32))
    before = other.read([1, 2, 4, 5])
    train(other, bag, [1, 4, 5])
    assert (other.read([1, 2, 4, 5]) != before).any(1).tolist() == [True, False, False, True]
    other.close()


def test_a_restored_key_without_a_row_stays_admitted(tmp_path: Path) -> None:
    """A step that was given up admits its keys all the same; a run that resumes must know them."""
    setting = tc.Admission(count=2)
    table = open_table("dram", admission=setting)
    bag = tc.EmbeddingBag(table, 1)
    checkpoints = tc.Checkpoints(tmp_path, [table])
    bag(batch_of([7, 7])).sum().backward()
    table.discard_gradients()
    checkpoints.save(1)
    table.close()
    checkpoints.close()
    table = open_table("dram", admission=setting)
    bag = tc.EmbeddingBag(table, 1)
    tc.Checkpoints(tmp_path, [table]).restore()
    train(table, bag, [7])
    assert keys_of(table) == {7}
    table.close()


def test_a_restore_with_another_setting_keeps_admitted_keys(tmp_path: Path) -> None:
    table = open_table("dram", admission=tc.Admission(count=2))
    checkpoints = tc.Checkpoints(tmp_path, [table])
    train(table, tc.EmbeddingBag(table, 1), [1, 1, 2])
    checkpoints.save(1)
    checkpoints.close()
    table.close()
    for setting, kept, warned in (
        (tc.Admission(count=3), {1}, False),
        (tc.Admission(count=2, sketch=True), {1}, True),
        (None, {1, 2}, False),
    ):
        table = open_table("dram", admission=setting)
        bag = tc.EmbeddingBag(table, 1)
        checkpoints = tc.Checkpoints(tmp_path, [table])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoints.restore()
        assert any("keys without a row count from 0" in str(w.message) for w in caught) == warned
        train(table, bag, [1, 2])
        assert keys_of(table) == kept
        checkpoints.close()
        table.close()


def test_counters_beyond_their_memory_are_dropped_with_one_warning() -> None:
    table = open_table("dram", admission=tc.Admission(count=3, memory=4096), mem="16MB")
    bag = tc.EmbeddingBag(table, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for first in range(0, 3000, 100):
            train(table, bag, list(range(first, first + 100)))
    (warning,) = caught
    assert "admission counters were dropped, those with the smallest counts" in str(warning.message)
    assert Path(warning.filename).name == "test_admission.py"
    stats = table.admission_stats
    assert stats is not None
    assert stats.counters_dropped > 2000
    assert stats.counter_bytes <= 4096
    assert stats.counters <= 4096 // 12
    table.close()


def skewed_batches(count: int) -> list[tc.Batch]:
    """Batches of 100 examples of one id; a few keys are frequent."""
    rng = np.random.default_rng(6)
    ids = rng.geometric(0.02, (count, 100)) * rng.integers(1, 40, (count, 100))
    return [tc.Batch(batch.astype(np.uint64), np.arange(101), 1) for batch in ids]


@pytest.mark.parametrize("sketch", [False, True])
def test_what_is_dropped_does_not_depend_on_tiers_or_the_look_ahead(sketch: bool, tmp_path: Path) -> None:
    """Counters exceed their memory, keys collide in the sketch: decisions need one order of the keys of a batch."""
    batches, admission = skewed_batches(50), tc.Admission(count=5, memory=4096, sketch=sketch)
    expected, dropped = count_within(batches, admission)
    assert dropped > 100
    found = []
    for tiers, depth, window in (("dram", 1, 1), ("dram", 4, 3), ("reference", 2, 1), ("ssd", 3, 2)):
        table = (
            tc.Table(4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path, ssd_options=SMALL, lookahead=8, admission=admission)
            if tiers == "ssd"
            else open_table(tiers, admission=admission)
        )
        bag = tc.EmbeddingBag(table, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with tc.prefetch(batches, table, depth=depth, pull_window=window) as source:
                for batch in source:
                    bag(batch).sum().backward()
                    table.step()
        stats = table.admission_stats
        assert stats is not None
        found.append((keys_of(table), stats.counters_dropped, stats.ids_refused))
        table.close()
    assert all(each == found[0] for each in found)
    if not sketch:
        assert found[0][:2] == (expected, dropped)


def test_probability_admits_the_same_keys_again() -> None:
    rows = []
    for seed in (0, 0, 1):
        table = open_table("dram", admission=tc.Admission(probability=0.25), seed=seed)
        train(table, tc.EmbeddingBag(table, 1), list(range(400)))
        rows.append(keys_of(table))
        table.close()
    assert rows[0] == rows[1] != rows[2]
    assert 60 < len(rows[0]) < 140


def test_a_deletion_while_a_batch_is_added_to_the_look_ahead(tmp_path: Path) -> None:
    """The step thread decides again between the look-ahead's decision and its use: the batch keeps its ids."""
    table = tc.Table(
        4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path, ssd_options=SMALL,
        admission=tc.Admission(count=2), expiry=tc.Expiry(every=1000, min_norm=1e-9),
    )  # fmt: skip
    bag = tc.EmbeddingBag(table, 1)
    train(table, bag, [1], [1], [2], [2])
    horizon: Any = table.backend.horizon(training=True)
    add = horizon._inner.add

    def add_then_forget(inputs: Any) -> Any:
        added = add(inputs)
        table.backend.forget(np.array([2], np.uint64))  # type: ignore[attr-defined]
        return added

    horizon._inner.add = add_then_forget
    batch = batch_of([1], [2], [3])
    ahead = horizon.add(table.inputs(batch))
    assert ahead.restore().tolist() == [1, 2, 3]
    window: Any = table.backend.stage([table.inputs(batch)], [ahead])
    assert window.inputs[0].refused.tolist() == [False, True, True]
    assert window.inner.inputs == [window.inputs[0].trained]
    assert window.inner.working_sets[0].keys.tolist() == [1]
    window.release()
    table.close()


def test_rows_are_loaded_after_a_forward_pass_without_a_step() -> None:
    table = open_table("dram", admission=tc.Admission(count=2))
    bag = tc.EmbeddingBag(table, 1)
    bag(batch_of([5]))
    table.load_rows([9], np.ones((1, table.dim), np.float32))
    assert table.read_rows([9])[0].tolist() == [[1.0] * table.dim]
    train(table, bag, [5], [9])
    assert keys_of(table) == {5, 9}  # the second occurrence of 5; 9 has a row


def test_other_rows_are_refused_while_a_pipeline_is_open(tmp_path: Path) -> None:
    table = tc.Table(
        4, tc.SGD(lr=0.1), mem="1MB", ssd=tmp_path, ssd_options=SMALL, admission=tc.Admission(count=1)
    )  # fmt: skip
    bag = tc.EmbeddingBag(table, 1)
    train(table, bag, [1])
    table.commit()
    with tc.prefetch([batch_of([2]), batch_of([3])], table, depth=2) as batches:
        bag(next(batches)).sum().backward()
        table.step()
        with pytest.raises(tc.ThermoclineError, match=r"reopen\(\) while a training pipeline is open"):
            table.reopen()
        assert 2 in keys_of(table)
    with (
        tc.prefetch([batch_of([2])], table, depth=1),  # nothing is pinned
        pytest.raises(tc.ThermoclineError, match="loading rows while a training pipeline is open"),
    ):
        table.load_rows([9], np.ones((1, 4), np.float32))
    table.reopen()
    assert keys_of(table) == {1}
    table.close()
