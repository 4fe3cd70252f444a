"""Delays SIGINT and SIGTERM until the end of a training step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def caught_signals(active: bool) -> Iterator[list[int]]:
    """Append SIGINT and SIGTERM to the returned list, and exit when the block ends; a second signal exits at once.

    Signals that the process ignores (a background job, nohup) or that Python does not handle are left as they are.
    Does nothing if not `active`, or outside the main thread.
    """
    caught: list[int] = []
    if not active or threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt if caught[0] == signal.SIGINT else SystemExit(128 + caught[0])
