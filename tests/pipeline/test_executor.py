"""The executor without tables: order, depth, errors of every stage, closing in every state, no leaked thread."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.threads import our_threads, start_counting

from thermocline.pipeline.executor import Later, Pipeline

pytestmark = pytest.mark.timeout(60)
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 8])


@pytest.fixture(autouse=True)
def _no_leaked_thread() -> Iterator[None]:
    start_counting()
    yield
    assert our_threads() == []


class ItemCounter:
    """Counts the items that are read and finished."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.read: list[int] = []
        self.finished: list[int] = []
        self.in_flight = 0
        self.most = 0
        self.lock = threading.Lock()

    def source(self) -> Iterator[int]:
        for n in itertools.count() if self.limit is None else range(self.limit):
            with self.lock:
                self.read.append(n)
                self.most = max(self.most, len(self.read) - len(self.finished))
            yield n

    def finish(self, item: int) -> None:
        with self.lock:
            self.finished.append(item)

    def assert_all_finished(self) -> None:
        """Assert that every item read was finished exactly once."""
        assert sorted(self.finished) == self.read


def identity(item: Any) -> Any:
    return item


@DEPTHS
def test_items_pass_all_stages_in_order(depth: int) -> None:
    stages: list[tuple[str, Callable[[Any], Any]]] = [("double", lambda n: 2 * n), ("text", str)]
    assert list(Pipeline(range(50), stages, depth=depth)) == [str(2 * n) for n in range(50)]


@DEPTHS
def test_empty_source_and_no_stages(depth: int) -> None:
    assert list(Pipeline([], [("a", identity)], depth=depth)) == []
    assert list(Pipeline(range(5), [], depth=depth)) == [0, 1, 2, 3, 4]
    pipeline: Pipeline[int] = Pipeline([], [], depth=depth)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(pipeline)


@DEPTHS
def test_depth_is_reached_and_never_exceeded(depth: int) -> None:
    counter = ItemCounter(40)
    with Pipeline(counter.source(), [("a", identity), ("b", identity)], depth=depth, finish=counter.finish) as pipeline:
        for n, item in enumerate(pipeline):
            assert item == n
            assert counter.finished == list(range(n)), "an item is finished when the next one is requested"
            if n == 5:
                wait_until(lambda: len(counter.read) == 5 + depth)
            if n % 10 == 9:
                time.sleep(0.01)  # time to read too far
            assert len(counter.read) - len(counter.finished) <= depth
    assert counter.most == depth
    counter.assert_all_finished()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)


def test_depth_one_is_serial_on_the_callers_thread() -> None:
    events: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[int], int]:
        def stage(item: int) -> int:
            assert threading.current_thread() is threading.main_thread()
            events.append((name, item))
            return item

        return stage

    source = map(note("read"), range(3))
    for item in Pipeline(source, [("a", note("a")), ("b", note("b"))], depth=1, finish=note("end")):  # type: ignore[arg-type]
        note("train")(item)
    assert events == [(name, n) for n in range(3) for name in ("read", "a", "b", "train", "end")]


def test_stages_run_concurrently() -> None:
    """The reader has item n + 2, the first stage n + 1 and the second n; each waits for the others at a barrier."""
    barrier = threading.Barrier(3, timeout=20)

    def wait_for_others(item: int) -> int:
        if 0 <= item < 5:
            barrier.wait()
        return item

    source = (wait_for_others(n - 2) + 2 for n in range(10))
    stages = [("a", lambda n: wait_for_others(n - 1) + 1), ("b", wait_for_others)]
    assert list(Pipeline(source, stages, depth=4)) == list(range(10))


def test_bad_depth() -> None:
    with pytest.raises(ValueError, match="depth is 0: it must be at least 1"):
        Pipeline([], [], depth=0)


# ---- errors


class StageError(Exception):
    pass


def fails_at(n: int) -> Callable[[int], int]:
    def failing_stage(item: int) -> int:
        if item == n:
            raise StageError(f"item {item}")
        return item

    return failing_stage


@DEPTHS
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("where", [0, 1, 7])
def test_stage_error_is_raised_in_place_of_its_item(depth: int, stage: int, where: int) -> None:
    counter = ItemCounter()
    stages = [(f"s{n}", fails_at(where) if n == stage else identity) for n in range(3)]
    pipeline: Pipeline[int] = Pipeline(counter.source(), stages, depth=depth, finish=counter.finish)
    seen: list[int] = []
    with pytest.raises(StageError, match=f"item {where}") as caught:
        seen.extend(pipeline)
    assert seen == list(range(where))
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "failing_stage"
    assert our_threads() == []
    counter.assert_all_finished()
    with pytest.raises(StopIteration):
        next(pipeline)


@DEPTHS
@pytest.mark.parametrize("kind", [StageError, KeyboardInterrupt, SystemExit, StopAsyncIteration])
def test_source_error_is_raised(depth: int, kind: type[BaseException]) -> None:
    def failing_source() -> Iterator[int]:
        yield from range(3)
        raise kind("no more")

    seen: list[int] = []
    with pytest.raises(kind, match="no more") as caught:
        seen.extend(Pipeline(failing_source(), [("a", identity)], depth=depth))
    assert seen == [0, 1, 2]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "failing_source"


def test_source_that_is_not_iterable() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        Pipeline(7, [], depth=4)  # type: ignore[arg-type]


@DEPTHS
@pytest.mark.parametrize("kind", [StageError, KeyboardInterrupt])
def test_error_in_the_loop_stops_the_threads(depth: int, kind: type[BaseException]) -> None:
    """Without `with` or close: dropping the iterator closes it by reference count, without a collection."""
    counter = ItemCounter()

    def loop() -> None:
        for item in Pipeline(counter.source(), [("a", identity)], depth=depth, finish=counter.finish):
            if item == 4:
                raise kind("in the loop")

    gc.disable()
    try:
        with pytest.raises(kind, match="in the loop"):
            loop()
        assert our_threads() == []
    finally:
        gc.enable()
    counter.assert_all_finished()


@DEPTHS
def test_break_return_and_del_close_the_pipeline(depth: int) -> None:
    counter = ItemCounter()

    def loop() -> int:
        for item in Pipeline(counter.source(), [("a", identity)], depth=depth, finish=counter.finish):
            if item == 2:
                return item
        raise AssertionError

    assert loop() == 2
    assert our_threads() == []
    counter.assert_all_finished()
    other = ItemCounter()
    for _ in Pipeline(other.source(), [("a", identity)], depth=depth, finish=other.finish):
        break
    assert our_threads() == []
    pipeline: Pipeline[int] = Pipeline(other.source(), [("a", identity)], depth=depth)
    next(pipeline)
    del pipeline
    assert our_threads() == []


# ---- closing


@DEPTHS
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_in_the_middle(depth: int, taken: int) -> None:
    counter = ItemCounter()
    pipeline: Pipeline[int] = Pipeline(
        counter.source(), [("a", identity), ("b", identity)], depth=depth, finish=counter.finish
    )
    assert [next(pipeline) for _ in range(taken)] == list(range(taken))
    for _ in range(3):
        pipeline.close()
        assert our_threads() == []
        counter.assert_all_finished()
    with pytest.raises(StopIteration):
        next(pipeline)


@DEPTHS
def test_close_after_the_end(depth: int) -> None:
    counter = ItemCounter(3)
    with Pipeline(counter.source(), [("a", identity)], depth=depth, finish=counter.finish) as pipeline:
        assert list(pipeline) == [0, 1, 2]
        assert our_threads() == []
        counter.assert_all_finished()
    pipeline.close()
    counter.assert_all_finished()


def test_close_while_stages_are_busy_or_blocked() -> None:
    """The first stage is busy, the second is blocked until `on_stop`, and the reader is blocked by the depth."""
    counter = ItemCounter()
    stop = threading.Event()
    waiting = queue.SimpleQueue[int]()

    def blocks(item: int) -> int:
        waiting.put(item)
        stop.wait()
        raise StageError("stopped")

    def slow(item: int) -> int:
        time.sleep(0.001)
        return item

    pipeline: Pipeline[int] = Pipeline(
        counter.source(), [("slow", slow), ("blocks", blocks)], depth=4, finish=counter.finish, on_stop=stop.set
    )
    assert waiting.get() == 0
    wait_until(lambda: len(counter.read) == 4)
    pipeline.close()
    assert our_threads() == []
    counter.assert_all_finished()


def test_close_interrupted_and_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it joins the threads: the next call completes the close."""
    counter = ItemCounter()
    pipeline: Pipeline[int] = Pipeline(counter.source(), [("a", identity)], depth=3, finish=counter.finish)
    next(pipeline)
    join = threading.Thread.join

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.close()
    with pytest.raises(StopIteration):
        next(pipeline)
    assert our_threads() == []
    counter.assert_all_finished()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_interrupt_while_the_threads_start(at: int, late: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ctrl-C in the start of a thread, which then starts late or never: all threads end, and stderr is empty."""
    counter = ItemCounter()
    start, calls = threading.Thread.start, 0

    def interrupted(self: threading.Thread) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            if late:
                timers.append(threading.Timer(0.02, start, [self]))
                start(timers[0])
            raise KeyboardInterrupt
        start(self)

    def make() -> None:
        Pipeline(counter.source(), [("a", identity), ("b", identity)], depth=4, finish=counter.finish)

    timers: list[threading.Timer] = []
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    monkeypatch.undo()
    for timer in timers:
        timer.join()
    wait_until(lambda: our_threads() == [])
    counter.assert_all_finished()
    assert capsys.readouterr().err == ""


def test_dropped_on_a_stage_thread() -> None:
    """The garbage collector may finalize a pipeline on any thread, including its own stages."""
    counter = ItemCounter()
    holder: list[Any] = []
    held, dropped = threading.Event(), threading.Event()

    def stage(item: int) -> int:
        held.wait(20)
        if item == 3:
            holder.clear()
            dropped.set()
        return item

    holder.append(Pipeline(counter.source(), [("a", stage), ("b", identity)], depth=6, finish=counter.finish))
    held.set()
    assert dropped.wait(20)
    wait_until(lambda: our_threads() == [] and len(counter.finished) == len(counter.read))
    counter.assert_all_finished()


# ---- statistics


@DEPTHS
def test_stage_statistics(depth: int) -> None:
    def slow(item: int) -> int:
        time.sleep(0.01)  # long beside delays of a busy machine
        return item

    with Pipeline(range(20), [("quick", identity), ("slow", slow)], depth=depth) as pipeline:
        assert len(list(pipeline)) == 20
        stats = {stage.name: stage for stage in pipeline.stats}
    assert list(stats) == ["read", "quick", "slow", "train"]
    assert [stage.items for stage in stats.values()] == [20] * 4
    assert stats["slow"].busy_seconds >= 0.2
    assert stats["train"].wait_seconds >= 0.15
    assert stats["quick"].busy_seconds < stats["slow"].busy_seconds
    assert all(0 <= stage.fill <= depth for stage in stats.values())
    if depth > 1:
        assert stats["read"].blocked_seconds > 0.0
        assert stats["slow"].wait_seconds < stats["slow"].busy_seconds


# ---- stages on the caller's thread, ahead of the loop


def inline(source: Any, stages: list[Any], **options: Any) -> Pipeline[Any]:
    return Pipeline(source, stages, inline=lambda first: True, **options)


def test_inline_stages_run_ahead_on_the_callers_thread() -> None:
    events: list[tuple[str, int]] = []
    threads = set()

    def stage(item: int) -> int:
        threads.add(threading.current_thread())
        events.append(("stage", item))
        return item

    taken = []
    with inline(range(8), [("a", stage)], depth=3, finish=lambda item: events.append(("finish", item))) as items:
        for item in items:
            taken.append(item)
            events.append(("loop", item))
            time.sleep(0.02)  # the reader gets ahead
    assert taken == list(range(8))
    assert threads == {threading.current_thread()}
    for n in range(8):
        assert events.index(("stage", n)) < events.index(("loop", n)) < events.index(("finish", n))
    assert events.index(("stage", 4)) < events.index(("loop", 3)), "no stage ran ahead of the loop"
    for n in range(3, 8):
        assert events.index(("finish", n - 3)) < events.index(("stage", n)), "more than `depth` items in flight"


def test_inline_error_is_raised_after_earlier_items() -> None:
    finished: list[int] = []

    def stage(item: int) -> int:
        if item == 2:
            raise ValueError("item 2")
        return item

    items = inline(range(5), [("a", stage)], depth=4, finish=finished.append)
    assert next(items) == 0
    time.sleep(0.02)  # the reader gets ahead
    assert next(items) == 1
    with pytest.raises(ValueError, match="item 2"):
        next(items)
    assert sorted(set(finished)) == [0, 1, 2, *range(3, max(finished) + 1)]


def test_inline_stage_is_tried_again_later() -> None:
    """A stage that raises Later runs again, for the same item, after the loop has finished one."""
    in_flight: set[int] = set()
    attempts: list[int] = []

    def stage(item: int) -> int:
        attempts.append(item)
        if in_flight:
            raise Later
        in_flight.add(item)
        return item

    before: list[int] = []

    def first(item: int) -> int:
        before.append(item)
        return item

    taken = []
    for item in inline(range(6), [("a", first), ("b", stage)], depth=4, finish=in_flight.discard):
        taken.append(item)
        time.sleep(0.02)
    assert taken == list(range(6))
    assert before == list(range(6)), "an earlier stage ran twice"
    assert len(attempts) > 6


def test_newest_inline_item_rests_after_its_first_stage() -> None:
    """What the first stage launched runs while the loop has one item; the second stage waits for it."""
    events: list[tuple[str, int]] = []

    def stage(name: str) -> Any:
        return name, lambda item: events.append((name, item)) or item

    for item in inline(range(9), [stage("launch"), stage("wait")], depth=4):
        events.append(("loop", item))
        time.sleep(0.02)  # the reader gets ahead
    for n in range(4, 9):
        launched, waited = events.index(("launch", n)), events.index(("wait", n))
        assert [name for name, _ in events[launched:waited]].count("loop") == 1


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_inline_pipeline_closed_early(taken: int) -> None:
    started, finished = set(), set()

    def stage(item: int) -> int:
        started.add(item)
        return item

    items = inline(range(100), [("a", stage)], depth=4, finish=finished.add)
    assert list(itertools.islice(items, taken)) == list(range(taken))
    items.close()
    assert started <= finished


def test_first_item_chooses_threads() -> None:
    threads = set()

    def stage(item: int) -> int:
        threads.add(threading.current_thread().name)
        return item

    chosen: list[int] = []
    items: Pipeline[int] = Pipeline(range(9), [("a", stage), ("b", stage)], depth=3, inline=chosen.append)  # type: ignore[arg-type]
    assert list(items) == list(range(9))
    assert chosen == [0]
    assert threads == {"thermocline-a", "thermocline-b"}


def test_source_without_items_before_the_choice() -> None:
    def fails() -> Iterator[int]:
        raise ValueError("no data")
        yield 1

    options: dict[str, Any] = {"depth": 3, "inline": lambda first: False}
    assert list(Pipeline([], [("a", identity)], **options)) == []
    with pytest.raises(ValueError, match="no data"):
        next(Pipeline(fails(), [("a", identity)], **options))


@pytest.mark.parametrize("mode", [None, lambda first: False, lambda first: True])
def test_idle_is_called_on_the_callers_thread_while_it_waits(mode: Any) -> None:
    """Without `inline`, with it chosen, and with it declined: before the first item and between items."""
    gates = [threading.Event(), threading.Event()]
    calls: list[str] = []

    def source() -> Iterator[int]:
        for n, gate in enumerate(gates):
            gate.wait()
            yield n

    def idle() -> None:
        calls.append(threading.current_thread().name)
        gates[0 if not gates[0].is_set() else 1].set()

    with Pipeline(source(), [("a", lambda item: item)], depth=3, inline=mode, idle=idle) as items:
        assert list(items) == [0, 1]
    assert calls == ["MainThread"] * 2


def test_idle_may_raise() -> None:
    stopped = threading.Event()

    def source() -> Iterator[int]:
        stopped.wait()
        yield 0

    def idle() -> None:
        raise InterruptedError

    items = Pipeline(source(), [("a", lambda item: item)], depth=3, idle=idle, on_stop=stopped.set)
    with pytest.raises(InterruptedError):
        next(items)
