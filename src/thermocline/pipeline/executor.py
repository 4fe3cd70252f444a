"""Stages connected by bounded queues, each on a thread of its own; knows no tables.

    read  ->  stage 1  ->  ...  ->  stage n  ->  the caller's loop

At most `depth` items are between `read` and the end of the loop's body. Depth 1 runs the same stages one after the
other on the caller's thread. An exception in any stage reaches the caller, with its own traceback, in place of the item
it belongs to; whatever came before it is delivered first.
"""

from __future__ import annotations

import _thread
import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class StageStats:
    """Where one stage's time went."""

    name: str
    items: int = 0
    busy_seconds: float = 0.0
    """Working."""
    wait_seconds: float = 0.0
    """Waiting for the stage before it."""
    blocked_seconds: float = 0.0
    """Waiting for room in the pipeline: the stages after it are slower."""
    fill: float = 0.0
    """Items ready for the next stage, on average."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


_END = object()


class Pipeline(Generic[T]):
    """An iterator over `source` with every item passed through `stages`, in order.

    `finish(item)` is called for every item that was read, whatever became of it: when the caller asks for the next one,
    when a stage fails on it, or at the end; once more if an interrupt cut it short. `on_stop()` is called before the
    stages' threads are waited for: a stage that waits must give up then; `on_closed(n)` afterwards, once they have
    ended: n items could have begun, however many did. The pipeline closes with its `with` block, at
    its end, when an error leaves it, and when nobody holds it any more: a `for` loop over it cleans up however it is
    left.
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: list[tuple[str, Callable[[Any], Any]]],
        *,
        depth: int,
        finish: Callable[[Any], None] = lambda item: None,
        on_stop: Callable[[], None] = lambda: None,
        on_closed: Callable[[int], None] = lambda items: None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: at least 1, which runs the stages one after the other")
        self._flow = _Flow(iter(source), stages, depth, finish, on_stop, on_closed)
        # The threads know the flow, never this object: so it can be dropped while they run, and stops them.
        weakref.finalize(self, _close, self._flow)
        self._flow.start()

    def __iter__(self) -> Pipeline[T]:
        return self

    def __next__(self) -> T:
        return self._flow.next()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stops the stages, waits for them, and finishes what they had ready. Calling it again does nothing."""
        self._flow.close()

    def __enter__(self) -> Pipeline[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> list[StageStats]:
        """Of the reader, every stage, and the caller's loop."""
        return self._flow.stats


def _close(flow: _Flow) -> None:
    """For the garbage collector, out of which no exception can come."""
    if flow.runs_here():  # in the middle of anything, maybe with a lock that the other stages need to end
        _thread.start_new_thread(flow.close, ())
        return
    try:
        flow.close()
    except KeyboardInterrupt:
        flow.close()
        _thread.interrupt_main()


def _join(thread: threading.Thread) -> None:
    """Also of one whose start an interrupt cut short: it may run a moment later, or never."""
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        try:
            thread.join()
        except RuntimeError:
            time.sleep(0.001)
        else:
            return


class _Flow:
    """What the caller and the threads share.

    The caller may be interrupted (Ctrl-C) between any two instructions. So everything it shares with the threads is
    plain: an attribute, or a SimpleQueue, whose put and get are whole. The locks inside threading's Event, Condition
    and Semaphore could be left taken for ever.
    """

    def __init__(
        self,
        source: Iterator[Any],
        stages: list[tuple[str, Callable[[Any], Any]]],
        depth: int,
        finish: Callable[[Any], None],
        on_stop: Callable[[], None],
        on_closed: Callable[[int], None],
    ) -> None:
        self._source = source
        self._stages = [stage for _, stage in stages]
        self._depth = depth
        self._finish = finish
        self._on_stop = on_stop
        self._on_closed = on_closed
        self._left = 0  # items that the caller is done with
        self._current: Any = _END
        self.stats = [StageStats("read"), *(StageStats(name) for name, _ in stages), StageStats("train")]
        self._asked = time.perf_counter()
        self._stopping = False
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item that may still be read
        for _ in range(depth):
            self._room.put(None)
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(len(stages) + 1)]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if self._depth == 1:
            return
        for i, stats in enumerate(self.stats[:-1]):
            work, args = (self._read, ()) if i == 0 else (self._work, (i - 1,))
            thread = threading.Thread(target=work, args=args, name=f"thermocline-{stats.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def runs_here(self) -> bool:
        """Whether the calling thread is one of the stages'."""
        return any(thread.ident == threading.get_ident() for thread in self._threads)

    # ---- the caller's side

    def next(self) -> Any:
        now = time.perf_counter()
        train = self.stats[-1]
        try:
            if self._current is not _END:
                train.busy_seconds += now - self._asked
                train.items += 1
                self._left += 1
                self._done()
            if not self._stopping:
                self._current = self._serial() if self._depth == 1 else self._take()
        except BaseException:
            self.close()
            raise
        self._asked = time.perf_counter()
        train.wait_seconds += self._asked - now
        if self._current is _END:
            self.close()
            raise StopIteration
        return self._current

    def close(self) -> None:
        """May be called again, also after an interrupt cut it short."""
        self._stopping = True
        self._on_stop()
        self._room.put(None)  # the reader may be waiting for room
        for q in self._queues:
            q.put(_END)
        for thread in self._threads:
            _join(thread)
        self._done()
        for q in self._queues:
            while True:
                try:
                    item = q.get_nowait()
                except queue.Empty:
                    break
                if item is not _END and not isinstance(item, _Failure):
                    self._finish(item)
            q.put(_END)  # for a thread that an interrupt let begin only now
        self._on_closed(self._left + self._depth)

    def _done(self) -> None:
        if self._current is not _END:
            self._finish(self._current)
            self._current = _END
            self._room.put(None)

    def _take(self) -> Any:
        last, before = self._queues[-1], self.stats[-2]
        before.fill += (last.qsize() - before.fill) / (self.stats[-1].items + 1)
        item = last.get()
        if isinstance(item, _Failure):
            raise item.error
        return item

    def _serial(self) -> Any:
        item = self._timed(0, lambda: next(self._source, _END))
        if item is not _END:
            for i in range(len(self._stages)):
                item = self._pass(i, item)
        return item

    # ---- both sides

    def _pass(self, i: int, item: Any) -> Any:
        """The item after stage i. One that fails is finished here."""
        try:
            return self._timed(i + 1, lambda: self._stages[i](item))
        except BaseException:
            self._finish(item)
            raise

    def _timed(self, i: int, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            item = work()
        finally:
            self.stats[i].busy_seconds += time.perf_counter() - start
        self.stats[i].items += item is not _END
        return item

    # ---- the stages' threads

    def _read(self) -> None:
        stats = self.stats[0]
        while True:
            start = time.perf_counter()
            self._room.get()
            stats.blocked_seconds += time.perf_counter() - start
            if self._stopping:
                return
            try:
                item = self._timed(0, lambda: next(self._source, _END))
            except BaseException as error:  # handed to the caller
                item = _Failure(error)
            self._queues[0].put(item)
            if item is _END or isinstance(item, _Failure):
                return

    def _work(self, i: int) -> None:
        before, stats = self.stats[i], self.stats[i + 1]
        source, target = self._queues[i], self._queues[i + 1]
        while True:
            item = None  # while this one waits, others decide how long the last one lives
            start = time.perf_counter()
            before.fill += (source.qsize() - before.fill) / (stats.items + 1)
            item = source.get()
            stats.wait_seconds += time.perf_counter() - start
            if item is _END or isinstance(item, _Failure):
                target.put(item)
                return
            if not self._stopping:
                try:
                    item = self._pass(i, item)
                except BaseException as error:  # handed to the caller
                    target.put(_Failure(error))
                    return
            if self._stopping:  # nobody may be left to take it; what waits in the queue is for close()
                self._finish(item)
                return
            target.put(item)
