"""tc.prefetch: pinned rows, DRAM too small for the queue, errors of each stage, Ctrl-C, and process exit."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.ssd import SMALL
from helpers.threads import our_threads, start_counting
from helpers.train import Net, Reference, ReferenceBag, all_keys, budget_for, make_batches, one_torch_thread, train_on

import thermocline as tc
from thermocline.batch import batch_of_handle
from thermocline.tiers.dram import DramTier

pytestmark = pytest.mark.timeout(120)
ADAGRAD = tc.Adagrad(lr=0.05)


@pytest.fixture(autouse=True)
def _no_leaked_thread() -> Iterator[None]:
    one_torch_thread()
    start_counting()
    yield
    assert our_threads() == []


def make_table(folder: Path | None = None, rows: int = 5000, **more: Any) -> tc.Table:
    store = {} if folder is None else {"ssd": folder / "t", "ssd_options": SMALL}
    return tc.Table(4, ADAGRAD, mem=budget_for(rows, 4, ADAGRAD), **store, **more)


def most_keys(batches: list[tc.Batch], window: int) -> int:
    return max(len(all_keys(batches[n : n + window])) for n in range(0, len(batches), window))


# ---- pinned rows


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 3])
def test_only_rows_of_batches_in_flight_are_pinned(depth: int, window: int) -> None:
    batches = make_batches(20)
    table = make_table()
    bag = tc.EmbeddingBag(table, 3)
    seen = 0
    for n, batch in enumerate(tc.prefetch(batches, table, depth=depth, pull_window=window)):
        first = n // window * window
        end = time.monotonic() + 20
        while True:  # until the pipeline is full
            pinned = table.dram.stats().pinned
            expected = len(all_keys(batches[first : first + depth * window]))
            if pinned == expected or time.monotonic() > end:
                break
            time.sleep(0.001)
        assert pinned == expected
        bag(batch).sum().backward()
        table.step()
        assert np.isin(batch.ids, batches[n].ids).all()
        seen += 1
    assert seen == 20
    table.dram.check()


def test_fields_without_a_bag_are_not_pulled() -> None:
    batches = make_batches(5)
    table = make_table()
    bag = tc.EmbeddingBag(table, [1])
    for batch in tc.prefetch(batches, table):
        bag(batch).sum().backward()
        table.step()
    expected = np.unique(np.concatenate([batch.select([1])[0] for batch in batches]))
    assert table.dram.stats().resident == len(expected)


def test_batches_keep_label_and_position() -> None:
    batches = make_batches(7)
    table = make_table()
    for n, batch in enumerate(tc.prefetch(iter(batches), table, pull_window=3)):
        assert batch is not batches[n]
        assert batch.label is batches[n].label
        assert batch.position == {"batch": n + 1}
        assert batches[n].prepared == {}


def test_batches_are_copied_whole() -> None:
    """Also attributes of a subclass; what was prepared for the loader's own batch stays with that."""

    class Named(tc.Batch):
        source = "none"

    table = tc.Table(4, tc.SGD(lr=0.1), mem="1MB")
    bag = tc.EmbeddingBag(table, 2)
    arguments: dict[str, Any] = {
        "weights": [1.0, 2.0], "dense": np.ones((1, 3)), "label": [1.0], "position": {"a": 1}, "names": ("x", "y"),
        "time": [7],
    }  # fmt: skip
    plain, named = (kind([1, 2], [0, 1, 2], 2, **arguments) for kind in (tc.Batch, Named))
    named.source = "file"
    plain.prepared["own"] = 1
    for batch, copied in zip((plain, named), tc.prefetch([plain, named], table), strict=True):
        assert type(copied) is type(batch)
        assert copied is not batch
        assert table in copied.prepared
        assert "own" not in copied.prepared
        for field in dataclasses.fields(batch):
            if field.init and field.name != "prepared":
                assert getattr(copied, field.name) is getattr(batch, field.name)
        assert getattr(copied, "source", "file") == "file"
        assert copied.handle is not None
        assert batch_of_handle(int(copied.handle.number)) is copied
    assert plain.prepared == {"own": 1}
    assert bag.table is table


def test_wrong_arguments() -> None:
    table = make_table()
    with pytest.raises(ValueError, match="needs at least one table"):
        tc.prefetch([])
    with pytest.raises(ValueError, match="pull_window is 0"):
        tc.prefetch([], table, pull_window=0)
    with pytest.raises(ValueError, match="depth is 0"):
        tc.prefetch([], table, depth=0)
    assert list(tc.prefetch([], table, table)) == []


def test_table_passed_twice_is_pulled_once() -> None:
    table = make_table()
    tc.EmbeddingBag(table, 3)
    for _ in tc.prefetch(make_batches(5), table, table):
        pass
    table.dram.check()


def test_stats_name_the_stages() -> None:
    table = make_table()
    bag = tc.EmbeddingBag(table, 3)
    with tc.prefetch(make_batches(10), table, depth=2, pull_window=2) as source:
        for batch in source:
            bag(batch)
        stats = source.stats
    assert [stage.name for stage in stats] == ["read", "collect", "pull", "load", "train"]
    assert [stage.items for stage in stats] == [5] * 5


# ---- DRAM budget


@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("window", [1, 4])
def test_pull_waits_until_earlier_windows_are_released(
    depth: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DRAM holds little more than one window: the pipeline is as deep as it allows, and rows equal the reference."""
    batches = make_batches(24, keys=3000)
    table = make_table(tmp_path, most_keys(batches, window) + 5)
    reference = Reference(table)
    refused = 0
    pin = DramTier.pin

    def counted(self: DramTier, keys: Any) -> Any:
        nonlocal refused
        try:
            return pin(self, keys)
        except tc.BudgetError:
            refused += 1
            raise

    monkeypatch.setattr(DramTier, "pin", counted)
    model, reference_model = Net([tc.EmbeddingBag(table, 3)], 12), Net([ReferenceBag(reference, 3)], 12)
    train_on(model, [table], tc.prefetch(batches, table, depth=depth, pull_window=window))
    train_on(reference_model, [reference], batches)
    reference.assert_equals(table, all_keys(batches))
    table.dram.check()
    assert refused > 0
    assert table.dram.stats().evictions > 0


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("ssd", [False, True])
def test_error_of_a_window_larger_than_dram_names_budget_and_need(depth: int, ssd: bool, tmp_path: Path) -> None:
    batches = make_batches(8, keys=3000)
    table = make_table(tmp_path if ssd else None, most_keys(batches, 1) + 5)
    bag = tc.EmbeddingBag(table, 3)
    budget, need = table.dram.stats().budget, len(all_keys(batches[:8]))
    assert table.dram.capacity < need
    with pytest.raises(tc.BudgetError, match=f"{need} rows does not fit: the budget of {budget} bytes") as caught:
        next(tc.prefetch(batches, table, depth=depth, pull_window=8))
    assert "needs a budget of about" in str(caught.value)
    table.dram.check()
    with pytest.raises(tc.BudgetError):
        train_table_only(bag, table, tc.prefetch(batches[:1] * 2 + [concatenated(batches)], table, depth=depth))
    table.dram.check()


def concatenated(batches: list[tc.Batch]) -> tc.Batch:
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.diff(batch.offsets) for batch in batches]))])
    return tc.Batch(np.concatenate([batch.ids for batch in batches]), offsets, batches[0].fields)


def train_table_only(bag: tc.EmbeddingBag, table: tc.Table, source: Any) -> None:
    for batch in source:
        bag(batch).sum().backward()
        table.step()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_accumulating_more_than_dram_raises_instead_of_deadlock(depth: int, tmp_path: Path) -> None:
    batches = make_batches(24, keys=3000)
    table = make_table(tmp_path, 3 * most_keys(batches, 1))
    bag = tc.EmbeddingBag(table, 3)
    trained = 0
    with pytest.raises(tc.BudgetError), tc.prefetch(batches, table, depth=depth) as source:  # noqa: PT012
        for batch in source:
            bag(batch).sum().backward()
            trained += 1
    assert trained >= 2
    table.step()
    table.dram.check()


def test_dropped_on_the_pull_thread_as_it_starts_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may finalize the pipeline on any thread at any allocation: here, inside its own wait."""
    batches = make_batches(24, keys=3000)
    table = make_table(tmp_path, most_keys(batches, 1) + 5)
    bag = tc.EmbeddingBag(table, 3)
    dropped = threading.Event()
    holder: list[Any] = []
    allocate = threading._allocate_lock  # type: ignore[attr-defined]

    def collecting() -> Any:
        if threading.current_thread().name == "thermocline-pull" and not dropped.is_set():
            while not started:
                time.sleep(0.001)
            holder.clear()
            dropped.set()
        return allocate()

    started: list[bool] = []
    monkeypatch.setattr(threading, "_allocate_lock", collecting)
    holder.append(tc.prefetch(batches, table, depth=4))
    bag(next(holder[0]))
    started.append(True)
    end = time.monotonic() + 20
    while not dropped.is_set() and time.monotonic() < end:
        time.sleep(0.01)
    while our_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert dropped.is_set()
    assert our_threads() == []
    while table.dram.stats().pinned and time.monotonic() < end:
        time.sleep(0.01)
    table.dram.check()


# ---- errors of each stage


class StageError(Exception):
    pass


def inject_failure(stage: str, tables: list[tc.Table], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the `at`-th call of the stage on the last table fail."""
    calls = 0

    def fail_at_call(real: Any, name: str) -> Any:
        def failing_call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise StageError(name)
            return real(*args)

        return failing_call

    if stage == "pull":
        pin, failing = DramTier.pin, fail_at_call(DramTier.pin, stage)
        monkeypatch.setattr(DramTier, "pin", lambda self, k: (failing if self is tables[-1].dram else pin)(self, k))
    else:
        table = tables[-1]
        calls_per_batch = {
            "collect": (table, "inputs"),
            "load": (table.backend, "plan_batch"),
            "read": (table, "prepare_read"),
        }
        owner, method = calls_per_batch[stage]
        setattr(owner, method, fail_at_call(getattr(owner, method), stage))


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(("window", "at"), [(1, 1), (1, 4), (3, 2), (3, 5)])
@pytest.mark.parametrize("stage", ["collect", "pull", "load", "read"])
def test_failing_stage_releases_all_pins(
    depth: int, window: int, at: int, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails on the second of two tables, inside a window: the pins of the first are released too, and only once."""
    batches = make_batches(30)
    tables = [make_table(name="a"), make_table(name="b")]
    bags = [tc.EmbeddingBag(table, 3) for table in tables]
    inject_failure(stage, tables, at, monkeypatch)
    source = tc.prefetch(batches, *tables, depth=depth, pull_window=window, training=stage != "read")
    with pytest.raises(StageError, match=stage) as caught:  # noqa: PT012
        for batch in source:
            sum(bag(batch).sum() for bag in bags).backward()  # type: ignore[union-attr]
            for table in tables:
                table.step()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "failing_call"
    for table in tables:
        table.dram.check()  # although `caught` still refers to the failed frames
    assert our_threads() == []


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("kind", [StageError, KeyboardInterrupt])
def test_error_in_the_loop_releases_all_pins(depth: int, kind: type[BaseException]) -> None:
    table = make_table()
    bag = tc.EmbeddingBag(table, 3)

    def loop() -> None:
        for n, batch in enumerate(tc.prefetch(make_batches(30), table, depth=depth, pull_window=2)):
            bag(batch).sum().backward()
            if n == 5:
                raise kind
            table.step()

    with pytest.raises(kind):
        loop()
    assert our_threads() == []
    table.discard_gradients()
    table.dram.check()


def test_gradient_is_valid_after_the_pipeline_is_closed() -> None:
    """backward, break, step: the rows stay pinned until the step."""
    batches = make_batches(3)
    table = make_table()
    reference = Reference(table)
    bag, reference_bag = tc.EmbeddingBag(table, 3), ReferenceBag(reference, 3)
    for batch in tc.prefetch(batches, table):
        bag(batch).pow(2).sum().backward()
        break
    reference_bag(batches[0]).pow(2).sum().backward()
    assert table.dram.stats().pinned == len(all_keys(batches[:1]))
    table.step()
    reference.step()
    reference.assert_equals(table, all_keys(batches))
    table.dram.check()


# ---- process exit

SCRIPT = """
import signal, sys, time, numpy as np, torch, thermocline as tc
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits SIG_IGN
sys.path.insert(0, {tests!r})
from helpers.train import make_batches
table = tc.Table(4, tc.SGD(), mem="1MB", ssd={folder!r})
bag = tc.EmbeddingBag(table, 3)
def forever():
    while True:
        yield from make_batches(5)
source = tc.prefetch(forever(), table, depth=4)
for n, batch in enumerate(source):
    bag(batch).sum().backward()
    table.step()
    if n == 20:
        table.commit()
        print("ready", flush=True)
    if n == 30 and {leave}:
        break
"""


@pytest.mark.parametrize("leave", [True, False])
def test_script_exits_without_delay(leave: bool, tmp_path: Path) -> None:
    """Exit with a full pipeline in a global variable, or by Ctrl-C: no hang, no crash, and the commit is intact."""
    code = SCRIPT.format(tests=str(Path(__file__).parent.parent), folder=str(tmp_path / "t"), leave=leave)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if not leave:
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if leave:
        assert (process.returncode, errors) == (0, "")
    else:
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in errors
        assert "ignored" not in errors
    with tc.SsdStore.open(tmp_path / "t") as store:
        assert store.epoch == 1
        store.check()
