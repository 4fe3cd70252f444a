"""Stages connected by bounded queues, each on a thread of its own; knows no tables.

    read  ->  stage 1  ->  ...  ->  stage n  ->  the caller's loop

At most `depth` items are between `read` and the end of the loop's body. Depth 1 runs the same stages one after the other
on the caller's thread. An exception in any stage reaches the caller, with its own traceback, in place of the item it
belongs to; whatever came before it is delivered first.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
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

    `finish(item)` is called once for every item that came through the first stage, when the caller asks for the next
    one or closes; also for items the caller never saw. `on_stop()` is called before the stages' threads are waited for:
    a stage that waits must give up then. Close the pipeline, or use it in a `with` statement.
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: list[tuple[str, Callable[[Any], Any]]],
        *,
        depth: int,
        finish: Callable[[Any], None] = lambda item: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: at least 1, which runs the stages one after the other")
        self._source: Iterator[Any] = iter(source)
        self._stages = stages
        self._finish = finish
        self._on_stop = on_stop
        self._depth = depth
        self._current: Any = _END
        self._closed = False
        self.stats = [StageStats("read"), *(StageStats(name) for name, _ in stages), StageStats("train")]
        self._asked = time.perf_counter()
        self._stop = threading.Event()
        self._room = threading.Semaphore(depth)
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(len(stages) + 1)]
        self._threads: list[threading.Thread] = []
        if depth > 1:
            works = [self._read, *(lambda i=i: self._work(i) for i in range(len(stages)))]
            for stats, work in zip(self.stats, works, strict=False):
                thread = threading.Thread(target=work, name=f"thermocline-{stats.name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    # ---- the caller's side

    def __iter__(self) -> Pipeline[T]:
        return self

    def __next__(self) -> T:
        now = time.perf_counter()
        train = self.stats[-1]
        if self._current is not _END:
            train.busy_seconds += now - self._asked
            train.items += 1
            self._done()
        if self._closed:
            raise StopIteration
        try:
            item = self._serial() if self._depth == 1 else self._next()
        except BaseException:
            self.close()
            raise
        self._asked = time.perf_counter()
        train.wait_seconds += self._asked - now
        if item is _END:
            self.close()
            raise StopIteration
        self._current = item
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stops the stages, waits for them, and finishes what they had ready. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._on_stop()
        self._room.release()  # the reader may be waiting for room
        for q in self._queues:
            q.put(_END)
        me = threading.current_thread()
        for thread in self._threads:
            if thread is not me:
                thread.join()
        if self._current is not _END:
            self._done()
        # Items between the stages; the first queue's have not been through a stage yet.
        for q in self._queues[1:]:
            while True:
                try:
                    item = q.get_nowait()
                except queue.Empty:
                    break
                if item is not _END and not isinstance(item, _Failure):
                    self._finish(item)

    def __enter__(self) -> Pipeline[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self.close()

    def _done(self) -> None:
        item, self._current = self._current, _END
        self._finish(item)
        self._room.release()

    def _next(self) -> Any:
        last = self._queues[-1]
        self.stats[-2].fill += (last.qsize() - self.stats[-2].fill) / max(1, self.stats[-1].items + 1)
        item = last.get()
        if isinstance(item, _Failure):
            raise item.error
        return item

    def _serial(self) -> Any:
        item = self._timed(0, lambda: next(self._source, _END))
        if item is _END:
            return _END
        for i, (_, stage) in enumerate(self._stages):
            item = self._timed(i + 1, lambda stage=stage, item=item: stage(item))
        return item

    def _timed(self, i: int, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.stats[i].busy_seconds += time.perf_counter() - start
            self.stats[i].items += 1

    # ---- the stages' threads

    def _read(self) -> None:
        stats = self.stats[0]
        while True:
            start = time.perf_counter()
            self._room.acquire()
            stats.blocked_seconds += time.perf_counter() - start
            if self._stop.is_set():
                return
            try:
                item = self._timed(0, lambda: next(self._source, _END))
            except BaseException as error:  # handed to the caller
                item = _Failure(error)
            self._queues[0].put(item)
            if item is _END or isinstance(item, _Failure):
                return

    def _work(self, i: int) -> None:
        stats, stage = self.stats[i + 1], self._stages[i][1]
        source, target = self._queues[i], self._queues[i + 1]
        while True:
            start = time.perf_counter()
            before = self.stats[i]
            before.fill += (source.qsize() - before.fill) / (stats.items + 1)
            item = source.get()
            stats.wait_seconds += time.perf_counter() - start
            if item is _END or isinstance(item, _Failure):
                target.put(item)
                return
            if self._stop.is_set():
                if i > 0:
                    self._finish(item)
                continue
            try:
                item = self._timed(i + 1, lambda item=item: stage(item))
            except BaseException as error:  # handed to the caller
                if i > 0:
                    self._finish(item)
                target.put(_Failure(error))
                return
            target.put(item)
