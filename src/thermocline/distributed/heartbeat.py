"""`Heartbeat`: lets a rank do long local work without a timeout of the ranks that wait for it.

`dist.timeout` limits silence. A rank that commits, loads or reads files declares it with `busy`; while the section
lasts, its heartbeat thread increments one counter of the job's store. A collective fails after `timeout` seconds in
which neither its ranks answered nor the counter advanced. All ranks share one counter: a rank that waits for a rank
that itself waits for a busy one needs no knowledge of that chain.

The counter advances only inside busy sections, at most `busy_timeout` seconds per section, and not while the section's
own thread waits in a collective. So a rank that is stopped, killed or blocked outside of a section is detected within
`timeout` seconds, once the sections of other ranks have ended; a section that never ends, within `busy_timeout` +
`timeout`.

Thread     any; one daemon thread per job reads and writes the store, because a store call may block if its host is lost
Blocks     never
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

CLOSED = "the communicator is closed on this rank"
_COUNTER = "heartbeat"
_LONGEST_INTERVAL = 5.0


class Heartbeat:
    """The heartbeat of one rank. `store` is None for a job of one rank: nothing is sent."""

    def __init__(self, store: Any, timeout: float, busy_timeout: float) -> None:
        self.timeout, self.busy_timeout = timeout, busy_timeout
        self._store = store
        self._interval = min(timeout / 10, _LONGEST_INTERVAL)
        self._busy: dict[int, float] = {}
        """Start of the busy section of each thread, by ident."""
        self._waiting: set[int] = set()
        """Threads that have waited in a collective for longer than an instant."""
        self.advanced = -math.inf
        """Time (monotonic) at which the counter was last seen to advance."""
        self._closed = threading.Event()
        if store is not None:
            threading.Thread(target=self._run, name="thermocline-heartbeat", daemon=True).start()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Declare local work of this thread that may take longer than the timeout. Sections may be nested."""
        thread = threading.get_ident()
        if thread in self._busy:
            yield
            return
        self._busy[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._busy[thread]

    @contextlib.contextmanager
    def waiting(self, start: float) -> Iterator[Deadline]:
        """Watch the counter while this thread waits in a collective that it entered at `start` (monotonic)."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            yield Deadline(self, start)
        finally:
            self._waiting.discard(thread)

    def close(self) -> None:
        """End the thread; waiting threads raise."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _run(self) -> None:
        last: int | None = None
        while not self._closed.wait(self._interval):
            busy = self._is_busy()
            if not busy and not self._waiting:
                last = None
                continue
            try:
                count = self._store.add(_COUNTER, int(busy))
            except RuntimeError:  # the host of the store has exited: the ranks that wait time out
                return
            if last is not None and count != last:
                self.advanced = time.monotonic()
            last = count

    def _is_busy(self) -> bool:
        now = time.monotonic()
        return any(
            thread not in self._waiting and now - start < self.busy_timeout for thread, start in [*self._busy.items()]
        )


class Deadline:
    """End of one wait: `timeout` seconds after its start or after the last heartbeat, whichever is later."""

    def __init__(self, heartbeat: Heartbeat, start: float) -> None:
        self._heartbeat, self._start = heartbeat, start

    def check(self, awaited: str) -> None:
        """Raise RuntimeError if the time is over or the communicators were closed. `awaited` names the silent ranks."""
        heartbeat = self._heartbeat
        if heartbeat.closed:
            raise RuntimeError(CLOSED)
        if time.monotonic() - max(self._start, heartbeat.advanced) > heartbeat.timeout:
            raise RuntimeError(f"{awaited} did not answer for {heartbeat.timeout:g} s")
