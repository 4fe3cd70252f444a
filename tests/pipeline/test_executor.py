"""The pipeline by itself: order, depth, errors of every stage, closing in every state, and no thread left behind."""

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

from thermocline.pipeline.executor import Pipeline

pytestmark = pytest.mark.timeout(60)
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 8])


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thermocline-")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    assert our_threads() == []
    yield
    assert our_threads() == []


class Books:
    """Counts what goes in and what is finished."""

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

    def balanced(self) -> None:
        """Everything that was read is finished, once."""
        assert sorted(self.finished) == self.read


def same(item: Any) -> Any:
    return item


@DEPTHS
def test_items_come_in_order_through_all_stages(depth: int) -> None:
    stages: list[tuple[str, Callable[[Any], Any]]] = [("double", lambda n: 2 * n), ("text", str)]
    assert list(Pipeline(range(50), stages, depth=depth)) == [str(2 * n) for n in range(50)]


@DEPTHS
def test_nothing_to_read_and_no_stages(depth: int) -> None:
    assert list(Pipeline([], [("a", same)], depth=depth)) == []
    assert list(Pipeline(range(5), [], depth=depth)) == [0, 1, 2, 3, 4]
    pipeline: Pipeline[int] = Pipeline([], [], depth=depth)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(pipeline)


@DEPTHS
def test_depth_is_reached_and_never_passed(depth: int) -> None:
    books = Books(40)
    with Pipeline(books.source(), [("a", same), ("b", same)], depth=depth, finish=books.finish) as pipeline:
        for n, item in enumerate(pipeline):
            assert item == n
            assert books.finished == list(range(n)), "an item is finished when the next one is asked for"
            if n == 5:
                wait_until(lambda: len(books.read) == 5 + depth)
            if n % 10 == 9:
                time.sleep(0.01)  # time to read too far
            assert len(books.read) - len(books.finished) <= depth
    assert books.most == depth
    books.balanced()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
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


def test_stages_work_at_the_same_time() -> None:
    """Item n + 2 is read, n + 1 in the first stage and n in the second, and each waits for the others."""
    barrier = threading.Barrier(3, timeout=20)

    def meet(item: int) -> int:
        if 0 <= item < 5:
            barrier.wait()
        return item

    source = (meet(n - 2) + 2 for n in range(10))
    stages = [("a", lambda n: meet(n - 1) + 1), ("b", meet)]
    assert list(Pipeline(source, stages, depth=4)) == list(range(10))


def test_bad_depth() -> None:
    with pytest.raises(ValueError, match="depth is 0: at least 1"):
        Pipeline([], [], depth=0)


# ---- errors


class Broken(Exception):
    pass


def breaks_at(n: int) -> Callable[[int], int]:
    def the_stage_that_breaks(item: int) -> int:
        if item == n:
            raise Broken(f"item {item}")
        return item

    return the_stage_that_breaks


@DEPTHS
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("where", [0, 1, 7])
def test_an_error_of_a_stage_comes_in_its_items_place(depth: int, stage: int, where: int) -> None:
    books = Books()
    stages = [(f"s{n}", breaks_at(where) if n == stage else same) for n in range(3)]
    pipeline: Pipeline[int] = Pipeline(books.source(), stages, depth=depth, finish=books.finish)
    seen: list[int] = []
    with pytest.raises(Broken, match=f"item {where}") as caught:
        seen.extend(pipeline)
    assert seen == list(range(where))
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "the_stage_that_breaks"
    assert our_threads() == []
    books.balanced()
    with pytest.raises(StopIteration):
        next(pipeline)


@DEPTHS
@pytest.mark.parametrize("kind", [Broken, KeyboardInterrupt, SystemExit, StopAsyncIteration])
def test_an_error_of_the_source(depth: int, kind: type[BaseException]) -> None:
    def the_source_that_breaks() -> Iterator[int]:
        yield from range(3)
        raise kind("no more")

    seen: list[int] = []
    with pytest.raises(kind, match="no more") as caught:
        seen.extend(Pipeline(the_source_that_breaks(), [("a", same)], depth=depth))
    assert seen == [0, 1, 2]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "the_source_that_breaks"


def test_a_source_that_cannot_be_iterated() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        Pipeline(7, [], depth=4)  # type: ignore[arg-type]


@DEPTHS
@pytest.mark.parametrize("kind", [Broken, KeyboardInterrupt])
def test_an_error_in_the_loop_stops_the_threads_at_once(depth: int, kind: type[BaseException]) -> None:
    """No `with`, no close: the loop's iterator is dropped, and that is enough, without the garbage collector."""
    books = Books()

    def loop() -> None:
        for item in Pipeline(books.source(), [("a", same)], depth=depth, finish=books.finish):
            if item == 4:
                raise kind("in the loop")

    gc.disable()
    try:
        with pytest.raises(kind, match="in the loop"):
            loop()
        assert our_threads() == []
    finally:
        gc.enable()
    books.balanced()


@DEPTHS
def test_break_return_and_del(depth: int) -> None:
    books = Books()

    def loop() -> int:
        for item in Pipeline(books.source(), [("a", same)], depth=depth, finish=books.finish):
            if item == 2:
                return item
        raise AssertionError

    assert loop() == 2
    assert our_threads() == []
    books.balanced()
    other = Books()
    for _ in Pipeline(other.source(), [("a", same)], depth=depth, finish=other.finish):
        break
    assert our_threads() == []
    pipeline: Pipeline[int] = Pipeline(other.source(), [("a", same)], depth=depth)
    next(pipeline)
    del pipeline
    assert our_threads() == []


# ---- closing


@DEPTHS
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_in_the_middle(depth: int, taken: int) -> None:
    books = Books()
    pipeline: Pipeline[int] = Pipeline(books.source(), [("a", same), ("b", same)], depth=depth, finish=books.finish)
    assert [next(pipeline) for _ in range(taken)] == list(range(taken))
    for _ in range(3):
        pipeline.close()
        assert our_threads() == []
        books.balanced()
    with pytest.raises(StopIteration):
        next(pipeline)


@DEPTHS
def test_close_after_the_end(depth: int) -> None:
    books = Books(3)
    with Pipeline(books.source(), [("a", same)], depth=depth, finish=books.finish) as pipeline:
        assert list(pipeline) == [0, 1, 2]
        assert our_threads() == []
        books.balanced()
    pipeline.close()
    books.balanced()


def test_close_while_every_stage_is_busy_or_waits() -> None:
    """The first stage works, the second waits for something only `on_stop` can give, the reader waits for room."""
    books = Books()
    stop = threading.Event()
    waiting = queue.SimpleQueue[int]()

    def waits(item: int) -> int:
        waiting.put(item)
        stop.wait()
        raise Broken("gave up")

    def slow(item: int) -> int:
        time.sleep(0.001)
        return item

    pipeline: Pipeline[int] = Pipeline(
        books.source(), [("slow", slow), ("waits", waits)], depth=4, finish=books.finish, on_stop=stop.set
    )
    assert waiting.get() == 0
    wait_until(lambda: len(books.read) == 4)
    pipeline.close()
    assert our_threads() == []
    books.balanced()


def test_close_interrupted_and_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it waits for the threads: the next call goes on where it was."""
    books = Books()
    pipeline: Pipeline[int] = Pipeline(books.source(), [("a", same)], depth=3, finish=books.finish)
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
    books.balanced()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_interrupted_while_the_threads_begin(at: int, late: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ctrl-C before the last of them runs, which it never does, or only then: all end, nothing is complained about."""
    books = Books()
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
        Pipeline(books.source(), [("a", same), ("b", same)], depth=4, finish=books.finish)

    timers: list[threading.Timer] = []
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    monkeypatch.undo()
    for timer in timers:
        timer.join()
    wait_until(lambda: our_threads() == [])
    books.balanced()
    assert capsys.readouterr().err == ""


def test_dropped_on_a_thread_of_its_own() -> None:
    """The garbage collector may find a pipeline on any thread, its own stage's included."""
    books = Books()
    holder: list[Any] = []
    held, dropped = threading.Event(), threading.Event()

    def stage(item: int) -> int:
        held.wait(20)
        if item == 3:
            holder.clear()
            dropped.set()
        return item

    holder.append(Pipeline(books.source(), [("a", stage), ("b", same)], depth=6, finish=books.finish))
    held.set()
    assert dropped.wait(20)
    wait_until(lambda: our_threads() == [] and len(books.finished) == len(books.read))
    books.balanced()


# ---- books of time


@DEPTHS
def test_stats(depth: int) -> None:
    def slow(item: int) -> int:
        time.sleep(0.002)
        return item

    with Pipeline(range(20), [("quick", same), ("slow", slow)], depth=depth) as pipeline:
        assert len(list(pipeline)) == 20
        stats = {stage.name: stage for stage in pipeline.stats}
    assert list(stats) == ["read", "quick", "slow", "train"]
    assert [stage.items for stage in stats.values()] == [20] * 4
    assert stats["slow"].busy_seconds >= 0.04
    assert stats["train"].wait_seconds >= 0.03
    assert stats["quick"].busy_seconds < stats["slow"].busy_seconds
    assert all(0 <= stage.fill <= depth for stage in stats.values())
    if depth > 1:
        assert stats["read"].blocked_seconds > 0.0
        assert stats["slow"].wait_seconds < stats["slow"].busy_seconds
