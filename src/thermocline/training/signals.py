"""Ctrl-C and SIGTERM that wait for the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def caught_signals(active: bool) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM only fill the list; when the block ends, they end the program. A second one does at once.

    One that the process ignores (a background job, nohup) stays ignored; so does one that is not Python's to handle.
    """
    caught: list[int] = []
    if not active or threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def handle(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    ours = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in ours}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt if caught[0] == signal.SIGINT else SystemExit(128 + caught[0])
