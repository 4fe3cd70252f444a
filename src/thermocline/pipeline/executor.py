"""Runs stages connected by queues, one thread per stage. Independent of tables.

    read  ->  stage 1  ->  ...  ->  stage n  ->  the caller's loop

Depth      at most `depth` items are between `read` and the end of the loop's body. Depth 1 runs the same stages
           serially on the caller's thread
Inline     stages that only launch work on a device run on the caller's thread too, ahead of the loop: threads would
           take turns with it at the interpreter lock, which costs more than the stages. The newest item rests after its
           first stage until the next call: the device works meanwhile on what that stage launched
Errors     an exception in the source or a stage is re-raised in the consumer, with its traceback, in place of the item
           that failed; all earlier items are delivered first. Then the pipeline closes
Threads    each stage runs on one thread, in item order. `Pipeline` itself is not thread-safe: one thread consumes and
           closes it, except that the garbage collector may drop it on any thread
"""

from __future__ import annotations

import _thread
import dataclasses
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class StageStats:
    """Time of one stage. Each field has one writer thread; other threads may read it at any time."""

    name: str
    items: int = 0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Time waiting for the previous stage."""
    blocked_seconds: float = 0.0
    """Time waiting because `depth` items are in flight: later stages are slower."""
    fill: float = 0.0
    """Mean number of items ready for the next stage."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class Later(Exception):
    """Raised by a stage that runs on the caller's thread: try again when the loop has finished another item."""


_END = object()
_IDLE_SECONDS = 0.2
_thread_state = threading.local()
"""`on_stage`: True on the threads of stages, of all pipelines. The source of a pipeline may be a pipeline itself."""


class Pipeline(Generic[T]):
    """Iterates over `source` with every item passed through `stages`, in order.

    finish(item)   called for every item that was read: when the caller requests the next item, when a stage fails on
                   it, or on close. Called again for the same item if an interrupt aborted the first call
    idle()         called on the caller's thread every 0.2 s while it waits for an item; may raise. Not at depth 1
    inline(item)   called with the first item: whether all stages shall run on the caller's thread, ahead of the loop
    on_stop()      called before the threads are joined; blocked stages must return or raise
    on_closed(n)   called after the threads have ended; n is the most items that any stage can have started

    Closes at the end of its `with` block, at the end of the source, on an error, and when it is garbage-collected: any
    exit from a `for` loop over it is safe.
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
        inline: Callable[[Any], bool] | None = None,
        idle: Callable[[], None] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}: it must be at least 1, which runs the stages serially")
        self._executor = _Executor(iter(source), stages, depth, finish, on_stop, on_closed, inline, idle)
        # The threads do not refer to this object, so that it can be dropped, and closes them, while they run.
        weakref.finalize(self, _close_executor, self._executor)
        self._executor.start()

    def __iter__(self) -> Pipeline[T]:
        return self

    def __next__(self) -> T:
        return self._executor.next()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the stages, join their threads, and finish all items in flight. Further calls have no effect."""
        self._executor.close()

    def __enter__(self) -> Pipeline[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> list[StageStats]:
        """Statistics of "read", every stage, and "train", the caller's loop."""
        return self._executor.stats


def _close_executor(executor: _Executor) -> None:
    """Close from a finalizer, which cannot raise."""
    if getattr(_thread_state, "on_stage", False):  # it cannot join itself, and may hold a lock that others need to end
        _thread.start_new_thread(executor.close, ())
        return
    try:
        executor.close()
    except KeyboardInterrupt:
        executor.close()
        _thread.interrupt_main()


def _join(thread: threading.Thread) -> None:
    """Join a thread. If an interrupt aborted its start, wait 0.2 s: it may still start."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        try:
            thread.join()
        except RuntimeError:
            time.sleep(0.001)
        else:
            return


class _Executor:
    """State shared by the caller and the stage threads.

    Thread safety: KeyboardInterrupt may be raised in the caller between any two instructions. So all shared state is
    either an attribute with one writer or a SimpleQueue, whose put and get are atomic. An interrupt inside threading's
    Event, Condition or Semaphore could leave their lock acquired forever.
    """

    def __init__(
        self,
        source: Iterator[Any],
        stages: list[tuple[str, Callable[[Any], Any]]],
        depth: int,
        finish: Callable[[Any], None],
        on_stop: Callable[[], None],
        on_closed: Callable[[int], None],
        inline: Callable[[Any], bool] | None,
        idle: Callable[[], None] | None,
    ) -> None:
        self._source = source
        self._stages = [stage for _, stage in stages]
        self._depth = depth
        self._finish = finish
        self._on_stop = on_stop
        self._on_closed = on_closed
        self._idle = idle
        self._choose_inline = inline if depth > 1 else None  # until the first item is there
        self._inline = False
        self._ahead: deque[Any] = deque()  # inline: items that passed all stages
        self._waiting: tuple[int, Any] | None = None  # inline: the next stage of an item, and the item
        self._consumed = 0  # items that the caller has finished
        self._current: Any = _END
        self.stats = [StageStats("read"), *(StageStats(name) for name, _ in stages), StageStats("train")]
        self._returned_at = time.perf_counter()
        self._stopping = False
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry per item that may be read
        for _ in range(depth):
            self._permits.put(None)
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(len(stages) + 1)]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        if self._depth > 1:
            self._start_threads(range(1) if self._choose_inline is not None else range(len(self.stats) - 1))

    def _start_threads(self, numbers: range, first: Any = _END) -> None:
        """Start threads: the reader's is number 0. `first`: an item that stage 1 takes before all others."""
        for i in numbers:
            name = f"thermocline-{self.stats[i].name}"
            thread = threading.Thread(target=self._run, args=(i, first if i == 1 else _END), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    # ---- caller

    def next(self) -> Any:
        now = time.perf_counter()
        train = self.stats[-1]
        try:
            if self._current is not _END:
                train.busy_seconds += now - self._returned_at
                train.items += 1
                self._consumed += 1
                self._finish_current()
            if not self._stopping:
                if self._choose_inline is not None:
                    self._choose_threads()
                if self._inline:
                    self._current = self._next_inline()
                else:
                    self._current = self._next_serial() if self._depth == 1 else self._next_ready()
        except BaseException:
            self.close()
            raise
        self._returned_at = time.perf_counter()
        train.wait_seconds += self._returned_at - now
        if self._current is _END:
            self.close()
            raise StopIteration
        return self._current

    def close(self) -> None:
        """Stop and join. May be called again, also after an interrupt aborted it."""
        self._stopping = True
        self._on_stop()
        self._permits.put(None)  # wakes the reader
        for q in self._queues:
            q.put(_END)
        for thread in self._threads:
            _join(thread)
        self._finish_current()
        if self._waiting is not None and self._waiting[1] is not _END and not isinstance(self._waiting[1], _Failure):
            self._ahead.append(self._waiting[1])
            self._waiting = (0, _END)
        while self._ahead:
            self._finish(self._ahead[0])  # popped after it: an interrupt may abort it
            self._ahead.popleft()
        for q in self._queues:
            while True:
                try:
                    item = q.get_nowait()
                except queue.Empty:
                    break
                if item is not _END and not isinstance(item, _Failure):
                    self._finish(item)
            q.put(_END)  # for a thread that starts only now, after an interrupted start
        self._on_closed(self._consumed + self._depth)

    def _finish_current(self) -> None:
        if self._current is not _END:
            self._finish(self._current)
            self._current = _END
            self._permits.put(None)

    def _choose_threads(self) -> None:
        """Run the stages inline, or start their threads."""
        assert self._choose_inline is not None
        first = self._get(self._queues[0])
        ended = first is _END or isinstance(first, _Failure)
        self._inline = ended or self._choose_inline(first)
        self._choose_inline = None
        if self._inline:
            self._waiting = (0, first)
        else:
            self._start_threads(range(1, len(self.stats) - 1), first)

    def _next_inline(self) -> Any:
        """Run the stages of as many items as may be in flight, without waiting for the reader if one is ready."""
        while self._waiting is None or not isinstance(self._waiting[1], _Failure):
            if self._waiting is None:
                try:
                    inbox = self._queues[0]
                    self._waiting = (0, inbox.get_nowait() if self._ahead else self._get(inbox))
                except queue.Empty:
                    break
            if not self._advance_waiting():
                break
        if self._ahead:
            return self._ahead.popleft()
        assert self._waiting is not None
        item = self._waiting[1]
        if isinstance(item, _Failure):
            raise item.error
        if item is not _END:
            raise RuntimeError("a stage raised Later, but no item is in flight")
        return item

    def _advance_waiting(self) -> bool:
        """Run the remaining stages of the item that waits; return whether it passed all of them.

        The last of `depth` items, the caller's included, rests after its first stage until the next call.
        """
        assert self._waiting is not None
        stage, item = self._waiting
        if item is _END or isinstance(item, _Failure):
            return False
        for i in range(stage, len(self._stages)):
            self._waiting, stats = (i, item), self.stats[i + 1]
            begin = time.perf_counter()
            try:
                try:
                    item = self._stages[i](item)
                finally:
                    stats.busy_seconds += time.perf_counter() - begin
                stats.items += 1
            except Later:
                return False
            except BaseException as error:
                self._waiting = (0, _Failure(error))
                self._finish(item)
                if not isinstance(error, Exception):
                    raise
                return False
            if i == 0 and len(self._stages) > 1 and len(self._ahead) >= max(1, self._depth - 2):
                self._waiting = (1, item)
                return False
        self._ahead.append(item)
        self._waiting = None
        return True

    def _next_ready(self) -> Any:
        last, before = self._queues[-1], self.stats[-2]
        before.fill += (last.qsize() - before.fill) / (self.stats[-1].items + 1)
        item = self._get(last)
        if isinstance(item, _Failure):
            raise item.error
        return item

    def _get(self, inbox: queue.SimpleQueue[Any]) -> Any:
        """Take the next item of a queue; call `idle` while there is none."""
        if self._idle is None:
            return inbox.get()
        while True:
            try:
                return inbox.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                self._idle()

    def _next_serial(self) -> Any:
        item = self._timed(0, lambda: next(self._source, _END))
        if item is not _END:
            for i in range(len(self._stages)):
                item = self._run_stage(i, item)
        return item

    # ---- caller and stage threads

    def _run_stage(self, i: int, item: Any) -> Any:
        """Return the result of stage i; finish the item if the stage fails."""
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

    # ---- stage threads

    def _run(self, thread: int, first: Any) -> None:
        _thread_state.on_stage = True
        if thread == 0:
            self._run_reader()
        else:
            self._run_worker(thread - 1, first)

    def _run_reader(self) -> None:
        stats = self.stats[0]
        while True:
            start = time.perf_counter()
            self._permits.get()
            stats.blocked_seconds += time.perf_counter() - start
            if self._stopping:
                return
            try:
                item = self._timed(0, lambda: next(self._source, _END))
            except BaseException as error:  # re-raised in the consumer
                item = _Failure(error)
            self._queues[0].put(item)
            if item is _END or isinstance(item, _Failure):
                return

    def _run_worker(self, i: int, first: Any) -> None:
        before, stats = self.stats[i], self.stats[i + 1]
        inbox, outbox = self._queues[i], self._queues[i + 1]
        while True:
            item = None  # drop the reference to the last item while waiting
            start = time.perf_counter()
            before.fill += (inbox.qsize() - before.fill) / (stats.items + 1)
            item, first = (inbox.get(), _END) if first is _END else (first, _END)
            stats.wait_seconds += time.perf_counter() - start
            if item is _END or isinstance(item, _Failure):
                outbox.put(item)
                return
            if not self._stopping:
                try:
                    item = self._run_stage(i, item)
                except BaseException as error:  # re-raised in the consumer
                    outbox.put(_Failure(error))
                    return
            if self._stopping:  # no later stage may take it; items still in the queue are finished by close()
                self._finish(item)
                return
            outbox.put(item)
