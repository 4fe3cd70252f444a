"""Recorded planning against planning without recordings: the same slots, rows and bits, with misses and evictions."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.train import all_keys, bits

import thermocline as tc
from thermocline.kernels import INTERPRETED
from thermocline.tiers import plan_graph
from thermocline.tiers.hbm import bytes_for
from thermocline.tiers.hbm_backend import HbmBackend
from thermocline.tiers.plan_graph import PlanGraph, WindowShapes
from thermocline.tiers.plan_layout import BagLayout, Capacities

DEVICE: Any = "interpreter" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def equal_batches(count: int, sizes: list[int], *, keys: int = 60, weighted: bool = False) -> list[tc.Batch]:
    """Batches of 2 fields with equal numbers of ids, distributed over the bags differently."""
    rng = np.random.default_rng(5)
    batches = []
    for _ in range(count):
        offsets = np.concatenate([[0], np.cumsum(rng.permutation(sizes))])
        ids = rng.integers(0, keys, offsets[-1]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        weights = rng.normal(size=offsets[-1]).astype(np.float32) if weighted else None
        batches.append(tc.Batch(ids, offsets, 2, weights))
    return batches


def train(
    batches: list[tc.Batch],
    bags: list[tuple[Any, Any]],
    *,
    recorded: bool,
    rows: int = 40,
    inline: bool = False,
    depth: int = 2,
    accumulate: int = 1,
    delay: int = 0,
    **options: Any,
) -> tuple[tc.Table, HbmBackend]:
    table = tc.Table(4, tc.Adam(lr=0.01), hbm=bytes_for(rows, 12), mem="4MB", device=DEVICE, **options)
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    backend.plan_graphs.enabled = recorded
    backend.plans_on_device = inline
    modules = [tc.EmbeddingBag(table, fields, pooling=pooling) for fields, pooling in bags]
    table.accumulate = accumulate
    for number, batch in enumerate(tc.prefetch(batches, table, depth=depth, pull_window=2)):
        loss = sum((module(batch) ** 2).sum() * (n + 1) for n, module in enumerate(modules))
        assert isinstance(loss, torch.Tensor)
        if delay:
            torch.cuda._sleep(delay)
        loss.backward()
        if (number + 1) % accumulate == 0:
            table.step()
    table.step()
    return table, backend


@pytest.mark.parametrize(
    ("sizes", "bags", "weighted"),
    [
        ([1] * 8, [(2, "sum")], False),  # one id per bag: no offsets
        ([0, 1, 2, 3, 1, 5], [(2, "mean")], True),
        ([2] * 6, [([0], "mean"), ([1], "none")], False),  # 6 ids each
    ],
)
def test_equal_to_planning_without_recordings(sizes: list[int], bags: Any, weighted: bool) -> None:
    batches = equal_batches(9, sizes, weighted=weighted)  # the last window has one batch
    keys = all_keys(batches)
    plain, _ = train(batches, bags, recorded=False)
    table, backend = train(batches, bags, recorded=True)
    (graph,) = backend.plan_graphs._graphs.values()
    assert any(recording is not None for recording in graph._recordings.values())
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    assert plain.hbm is not None
    table.hbm.check()
    stats, expected = table.hbm.stats(), plain.hbm.stats()
    assert (stats.ids, stats.rows, stats.resident) == (expected.ids, expected.rows, expected.resident)
    assert stats.evictions > 0


@pytest.mark.parametrize("rows", [40, 120])  # with evictions, and with room for all keys
@pytest.mark.parametrize(
    ("sizes", "bags", "weighted"),
    [
        ([1] * 8, [(2, "sum")], False),
        ([0, 1, 2, 3, 1, 5], [(2, "mean")], True),
        ([2] * 6, [([0], "mean"), ([1], "none")], False),
    ],
)
def test_windows_without_new_keys_are_planned_by_finding(
    sizes: list[int], bags: Any, weighted: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few keys, then others: a window with a new key is planned twice, and nothing else differs."""
    known = equal_batches(6, sizes, keys=8, weighted=weighted)
    batches = [*known, *known, *equal_batches(4, sizes, keys=60, weighted=weighted), *known, *known]
    keys = all_keys(batches)
    plain, _ = train(batches, bags, recorded=False, rows=rows)
    started: list[tuple[str, int]] = []
    wait = PlanGraph._wait

    def noted(graph: PlanGraph, plan: Any, lists: Any, event: Any) -> Any:
        assigned = wait(graph, plan, lists, event)
        started.append(("find" if plan.slots is plan.resident_slots else "insert", assigned.counts[0]))
        return assigned

    monkeypatch.setattr(PlanGraph, "_wait", noted)
    table, backend = train(batches, bags, recorded=True, rows=rows)
    (graph,) = backend.plan_graphs._graphs.values()
    assert plan_graph._Kind.FIND in graph._recordings
    found = [new for kind, new in started if kind == "find"]
    assert found.count(0) >= 2
    assert len(found) > found.count(0)
    for (kind, new), (after, _) in itertools.pairwise(started):
        assert kind == "insert" or new == 0 or after == "insert"  # a plan that misses a key is not used
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    assert plain.hbm is not None
    table.hbm.check()
    assert dataclasses.replace(table.hbm.stats(), rows=0) == dataclasses.replace(plain.hbm.stats(), rows=0)
    assert torch.equal(table.hbm.residents.last_use, plain.hbm.residents.last_use)


@pytest.mark.parametrize(
    ("sizes", "bags", "weighted"),
    [
        ([1] * 8, [(2, "sum")], False),
        ([0, 1, 2, 3, 1, 5], [(2, "sum")], False),
        ([0, 1, 2, 3, 1, 5], [(2, "mean")], True),
        ([2] * 6, [([0], "mean"), ([1], "none")], False),
    ],
)
def test_page_locked_ids_are_not_copied_on_the_host(
    sizes: list[int], bags: Any, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of two batches and, the last, of one: their ids are uploaded one by one, before offsets and weights."""
    batches = equal_batches(9, sizes, weighted=weighted)
    keys = all_keys(batches)
    plain, _ = train(batches, bags, recorded=False)
    staged: list[Any] = []
    stage = PlanGraph.stage
    if INTERPRETED:
        monkeypatch.setattr(plan_graph, "is_page_locked", lambda tensor: True)
    else:
        for batch in batches:
            batch.ids = torch.from_numpy(batch.ids.view(np.int64)).pin_memory().numpy().view(np.uint64)
    monkeypatch.setattr(plan_graph, "_DIRECT_IDS", 1)
    monkeypatch.setattr(PlanGraph, "stage", lambda *given: staged.append(stage(*given)) or staged[-1])
    table, backend = train(batches, bags, recorded=True)
    (graph,) = backend.plan_graphs._graphs.values()
    uploads = [ids for ids in staged if ids.in_place]
    if len(bags) == 1 or INTERPRETED:  # the ids of some fields are a new array, which is not page-locked
        assert uploads == staged
    for ids in uploads:
        assert len(ids.in_place) == 2 * len(bags)
        assert len(ids.keys) == graph.shape.words - plan_graph.HEADER - graph.shape.keys
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    table.hbm.check()


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    ("sizes", "weighted"), [([1] * 8, False), ([0, 1, 2, 3, 1, 5], False), ([0, 1, 2, 3, 1, 5], True)]
)
def test_many_ids_are_uploaded_before_their_plan_is_launched(
    sizes: list[int], weighted: bool, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With evictions, windows that are planned again, and with ids that are in page-locked memory or not."""
    batches = equal_batches(9, sizes, weighted=weighted)
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "mean")], recorded=False)
    staged: list[Any] = []
    stage = PlanGraph.stage
    if INTERPRETED:
        monkeypatch.setattr(plan_graph, "is_page_locked", lambda tensor: locked)
    elif locked:
        for batch in batches:
            batch.ids = torch.from_numpy(batch.ids.view(np.int64)).pin_memory().numpy().view(np.uint64)
    monkeypatch.setattr(plan_graph, "_DIRECT_IDS", 1)
    monkeypatch.setattr(plan_graph, "_IDS_AHEAD", 1)
    monkeypatch.setattr(PlanGraph, "stage", lambda *given: staged.append(stage(*given)) or staged[-1])
    table, backend = train(batches, [(2, "mean")], recorded=True)
    (graph,) = backend.plan_graphs._graphs.values()
    assert len(staged) >= 3
    for ids in staged:
        assert len(ids.keys) == graph.shape.words - plan_graph.HEADER
        assert len(ids.sources) == (3 if locked else 1)  # the ids of two batches and the rest, or all in one
        assert (ids.uploaded is None) == INTERPRETED
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    table.hbm.check()


@pytest.mark.parametrize("ahead", [1, 1 << 18])
def test_page_locked_ids_live_until_the_device_has_read_them(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged inputs keep the memory alive, and the tier keeps them until the plan is read."""
    monkeypatch.setattr(plan_graph, "_IDS_AHEAD", ahead)
    monkeypatch.setattr(plan_graph, "is_page_locked", lambda tensor: True)
    monkeypatch.setattr(plan_graph, "_DIRECT_IDS", 1)
    table = tc.Table(4, tc.SGD(lr=0.01), hbm=bytes_for(40, 4), mem="4MB", device=DEVICE)
    bag = tc.EmbeddingBag(table, 2)
    assert isinstance(table.backend, HbmBackend)
    table.backend.plan_graphs.enabled = True
    for batch in equal_batches(2, [0, 1, 2, 3]):
        table.prepare(batch)
    (batch,) = equal_batches(1, [0, 1, 2, 3])
    owner = batch.ids
    while owner.base is not None:  # of the memory: views do not keep each other alive
        owner = owner.base
    window, ids = table.stage([batch]), weakref.ref(owner)
    assert window.graph is not None
    assert bag.table is table
    window.inputs.clear()
    del batch, owner
    gc.collect()
    assert ids() is not None
    table.backend.launch(window)
    window.ids = None
    gc.collect()
    assert ids() is not None
    table.backend.pin(window)
    gc.collect()
    assert ids() is None
    window.release()


def test_small_or_read_only_ids_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_graph, "is_page_locked", lambda tensor: True)
    table = tc.Table(4, tc.SGD(lr=0.01), hbm=bytes_for(40, 4), mem="4MB", device=DEVICE)
    bag = tc.EmbeddingBag(table, 2)
    (batch,) = equal_batches(1, [0, 1, 2, 3])
    inputs = table.inputs(batch)
    graph = PlanGraph(table.hbm, WindowShapes().of([inputs]))  # type: ignore[arg-type]
    assert graph.stage([inputs]).in_place == ()
    monkeypatch.setattr(plan_graph, "_DIRECT_IDS", 6)
    assert len(graph.stage([inputs]).in_place) == 1
    batch.ids.flags.writeable = False
    staged = graph.stage([inputs])
    assert staged.in_place == ()
    assert staged.keys[:6].tolist() == batch.ids.view(np.int64).tolist()
    assert bag.table is table


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("sizes", [[1] * 8, [0, 1, 2, 3, 1, 5]])
def test_memory_of_released_windows_is_used_again(sizes: list[int], accumulate: int) -> None:
    """With gradients of several batches per step, windows own it for longer."""
    batches = equal_batches(24, sizes, weighted=True)
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=120, accumulate=accumulate)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=120, inline=True, accumulate=accumulate)
    assert bits(table.read(keys)) == bits(plain.read(keys))
    (graph,) = backend.plan_graphs._graphs.values()
    used = {lists.memory.data_ptr() for lists in graph._free}
    assert 2 <= len(used) <= 3 + accumulate + plan_graph._SPARE_LISTS  # of 12 windows
    assert len(used) == len(graph._free)
    assert all(len(lists.batches) == 2 for lists in graph._free)


def test_memory_of_windows_in_flight_is_not_used_again() -> None:
    batches = equal_batches(6, [1] * 8)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=60)
    bag = tc.EmbeddingBag(table, 2)
    for batch in batches[:2]:  # the recording of windows of one batch
        table.prepare(batch)
    plans: list[Any] = [table.prepare(batch) for batch in batches]
    assert len({plan.lists.memory.data_ptr() for plan in plans}) == 6
    slots = [plan.lists.bags(plan.specs)[plan.specs[0]].slots.clone() for plan in plans]
    released = plans.pop()
    released.pins.release()
    other: Any = table.prepare(batches[0])
    assert other.lists is released.lists
    for plan, expected in zip(plans, slots, strict=False):
        assert torch.equal(plan.bags[plan.specs[0]].slots, expected)
    assert torch.equal(other.bags[other.specs[0]].slots, slots[0])
    with pytest.raises(tc.ThermoclineError, match="6 windows pinned"):
        backend.require_idle()
    del plan, plans, released, other
    backend.require_idle()
    assert bag.table is table


class FakeEvent:
    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended


def test_planning_does_not_wait_for_training_while_there_are_spare_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest released lists are used again when training has read them; else new ones, as long as there are."""
    batches = equal_batches(3, [1] * 8)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=60)
    bag = tc.EmbeddingBag(table, 2)
    assert table.hbm is not None
    for batch in batches[:2]:  # the recording of windows of one batch
        table.prepare(batch)
    graph = next(graph for graph in backend.plan_graphs._graphs.values() if len(graph.shape.ids) == 1)
    graph._free.clear()
    waits: list[Any] = []
    stream = SimpleNamespace(wait_event=waits.append)
    monkeypatch.setattr(plan_graph, "current_stream", lambda device: stream)
    monkeypatch.setattr(table.hbm, "record_uses", lambda events: events.setdefault(0, FakeEvent()))
    taken = [graph._take_lists()]
    for _ in range(plan_graph._SPARE_LISTS):  # training still reads what was released
        graph._give_back(taken[-1])
        taken.append(graph._take_lists())
    assert waits == []
    assert len({lists.memory.data_ptr() for lists in taken}) == 1 + plan_graph._SPARE_LISTS
    graph._give_back(taken[-1])
    assert graph._take_lists() is taken[0]  # no spare ones: wait for the oldest
    assert waits == [taken[0].uses[0]]
    taken[1].uses[0].ended = True  # type: ignore[attr-defined]
    assert graph._take_lists() is taken[1]
    assert bag.table is table


@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize("inline", [False, True])
def test_memory_is_not_overwritten_while_the_gpu_reads_it(inline: bool) -> None:
    """The GPU is several steps behind the host."""
    batches = equal_batches(60, [1] * 400, keys=2000)
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=4000)
    table, _ = train(batches, [(2, "sum")], recorded=True, rows=4000, inline=inline, delay=3_000_000)
    assert bits(table.read(keys)) == bits(plain.read(keys))


@pytest.mark.parametrize("rows", [40, 120])
def test_planning_on_the_callers_thread(rows: int) -> None:
    """The stages run ahead on the caller's thread; a window that does not fit yet waits; rows load on a thread."""
    batches = equal_batches(12, [1, 0, 2, 3], keys=200)
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=rows)
    table, _ = train(batches, [(2, "sum")], recorded=True, rows=rows, inline=True, depth=6)
    assert bits(table.read(keys)) == bits(plain.read(keys))
    assert table.hbm is not None
    table.hbm.check()


def test_one_of_two_tables_waits_on_the_callers_thread() -> None:
    """The pull stage runs again for the table that had no room, and not for the other."""
    batches = equal_batches(8, [1, 0, 2, 3], keys=200)
    read = []
    for inline in (False, True):
        sizes = {"large": 120, "small": 14}
        tables = [
            tc.Table(4, tc.SGD(lr=0.1), hbm=bytes_for(rows, 4), mem="4MB", device=DEVICE, name=name)
            for name, rows in sizes.items()
        ]
        bags = [tc.EmbeddingBag(table, 2) for table in tables]
        for table in tables:
            assert isinstance(table.backend, HbmBackend)
            table.backend.plans_on_device = inline
        for batch in tc.prefetch(batches, *tables, depth=4):
            loss: Any = torch.stack([(bag(batch) ** 2).sum() for bag in bags]).sum()
            loss.backward()
            for table in tables:
                table.step()
        read.append([bits(table.read(all_keys(batches))) for table in tables])
    assert read[0] == read[1]


def test_batches_of_other_shapes_are_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than recordings, and shapes that occur once."""
    monkeypatch.setattr("thermocline.tiers.plan_graph._MAX_GRAPHS", 1)
    batches = [*equal_batches(4, [1] * 8), *equal_batches(4, [3] * 4), *equal_batches(2, [1] * 6)]
    keys = all_keys(batches)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=60)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=60)
    assert len(backend.plan_graphs._graphs) == 1
    assert bits(table.read(keys)) == bits(plain.read(keys))


def test_a_full_index_is_rebuilt() -> None:
    """A window whose keys the index has no entry for is planned again after a rebuild."""
    batches = equal_batches(30, [1] * 8, keys=4000)
    table, _ = train(batches, [(2, "sum")], recorded=True, rows=20)
    plain, _ = train(batches, [(2, "sum")], recorded=False, rows=20)
    assert table.hbm is not None
    assert table.hbm.stats().rebuilds > 0
    assert bits(table.read(all_keys(batches))) == bits(plain.read(all_keys(batches)))


def test_a_window_over_budget_changes_nothing() -> None:
    batches = equal_batches(6, [1] * 8, keys=8)
    wide = equal_batches(5, [1] * 8, keys=10**6)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=18)
    bag = tc.EmbeddingBag(table, 2)
    assert table.hbm is not None
    for batch in wide[:3]:  # the recording of windows of one batch
        table.prepare(batch)
    assert len(backend.plan_graphs._graphs) == 2
    keys = all_keys([*batches, *wide])
    before = bits(table.read(keys))
    held = [table.prepare(batch) for batch in wide[:2]]
    with pytest.raises(tc.BudgetError, match="holds 18 rows"):
        table.prepare(wide[4])
    del held
    table.hbm.check()
    assert bits(table.read(keys)) == before
    assert bag(wide[4]).shape == (4, 2, 4)


def test_device_memory_is_allocated_while_planning() -> None:
    """Not by the thread that stages, whose stream may have freed the memory and still write to it."""
    table = tc.Table(4, tc.SGD(lr=0.01), hbm=bytes_for(40, 4), mem="4MB", device=DEVICE)
    backend = table.backend
    assert isinstance(backend, HbmBackend)
    backend.plan_graphs.enabled = True
    batch = equal_batches(1, [1] * 8)
    bag = tc.EmbeddingBag(table, 2)
    first, second = (table.stage(batch) for _ in range(2))
    assert bag.table is table
    graph = second.graph
    assert first.graph is None
    assert graph is not None
    owned = [graph._header, graph._record]  # page-locked, never freed
    tensors = [value for value in vars(graph).values() if isinstance(value, torch.Tensor)]
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in owned]
    for window in (first, second):
        backend.pin(window)
        backend.load(window)
        window.release()
    assert graph._block is not None


def test_planning_waits_for_a_running_load_of_a_released_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots may be reused: rows must not be copied there later."""
    table = tc.Table(4, tc.SGD(lr=0.01), hbm=bytes_for(40, 4), mem="4MB", device=DEVICE)
    tier = table.hbm
    assert tier is not None
    entered, go_on = threading.Event(), threading.Event()
    load_rows = tier._transfer._load_rows

    def slow(missing: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        load_rows(missing)

    monkeypatch.setattr(tier._transfer, "_load_rows", slow)
    keys = np.arange(8, dtype=np.uint64)
    pins = tier.pin(tier.stage([keys]))
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(tier.load, pins)
        assert entered.wait(60)
        pins.release()
        planning = pool.submit(tier.pin, tier.stage([keys]))
        try:
            with pytest.raises(TimeoutError):
                planning.result(0.3)
        finally:
            go_on.set()
        loading.result()
        planning.result().release()


def test_layouts_of_several_threads_have_their_own_sizes() -> None:
    """Bags with one vector per id have no spare capacity."""
    capacities = Capacities()

    def wrong(ids: int) -> int:
        bags = [BagLayout(ids, None, False, False) for _ in range(20)]
        return sum(bag.ids != ids for _ in range(300) for bag in capacities.layout(bags).bags)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(wrong, [10, 20, 30, 40])) == 0


def test_windows_of_equal_sizes_have_one_shape_until_a_capacity_grows() -> None:
    table = tc.Table(4, tc.SGD(lr=0.01), hbm=bytes_for(40, 4), mem="4MB", device=DEVICE)
    bag = tc.EmbeddingBag(table, 2)
    small, other, large = [table.inputs(equal_batches(1, [n, 0, 2, 3])[0]) for n in (1, 1, 300)]
    shapes = WindowShapes()
    first = shapes.of([small])
    assert shapes.of([small, small]) is not first
    assert shapes.of([other]) is shapes.of([small])
    assert shapes.of([other]) == first
    grown = shapes.of([large])
    assert shapes.of([small]).layouts == grown.layouts != first.layouts
    assert shapes.of([small]).ids == first.ids != grown.ids
    assert bag.table is table


def launched_window(table: tc.Table, batch: tc.Batch) -> Any:
    window = table.stage([batch])
    table.backend.launch(window)
    return window


def test_rows_read_between_launch_and_finish() -> None:
    """The index has keys of a launched window whose rows are not loaded: a read ends the plan first."""
    batches = equal_batches(6, [1] * 8, keys=200)
    table, backend = train(batches, [(2, "sum")], recorded=True, rows=40)
    bag = tc.EmbeddingBag(table, 2)
    assert table.hbm is not None
    new = equal_batches(1, [1] * 8, keys=10**6)[0]
    keys = all_keys([*batches, new])
    before = bits(table.read(keys))
    window = launched_window(table, new)
    assert window.pins.pending is None
    assert bits(table.read(keys)) == before
    assert window.pins.pending is not None
    backend.pin(window)
    backend.load(window)
    window.release()
    dropped = launched_window(table, batches[0])
    dropped.release()  # a pipeline was closed
    assert bits(table.read(keys)) == before
    assert bag(new).shape == (4, 2, 4)
    table.hbm.check()


def test_a_launched_window_over_budget_can_be_launched_again() -> None:
    """Another call ends the plan, and `pin` raises the error of it; later there is room."""
    table, backend = train(equal_batches(4, [1] * 8, keys=8), [(2, "sum")], recorded=True, rows=18)
    wide = equal_batches(3, [1] * 8, keys=10**6)
    bag = tc.EmbeddingBag(table, 2)
    held = [launched_window(table, batch) for batch in wide[:2]]
    for window in held:
        backend.pin(window)
    last = launched_window(table, wide[2])
    table.read(all_keys(wide))
    with pytest.raises(tc.BudgetError, match="holds 18 rows"):
        table.pin(last)
    table.backend.launch(last)
    for window in held:
        window.release()
    table.pin(last)  # planned when there was no room: the error of that plan is out of date
    backend.load(last)
    last.release()
    assert table.hbm is not None
    table.hbm.check()
    assert bag(wide[2]).shape == (4, 2, 4)


def test_an_interrupted_launch_stops_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys may be in the index without rows: nothing may be read until the table is reopened."""
    batches = equal_batches(4, [1] * 8)
    table, _ = train(batches, [(2, "sum")], recorded=False)
    bag = tc.EmbeddingBag(table, 2)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(table.hbm, "_find_or_insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launched_window(table, batches[0])
    with pytest.raises(tc.ThermoclineError, match="Reopen the table"):
        table.read(all_keys(batches))
    table.reopen()
    assert bag(batches[0]).shape == (4, 2, 4)
