"""Phases of a process before its first step, such as opening the data, for progress displays. Loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[str | None], None]
_listeners: list[Listener] = []


def report_phase(text: str | None) -> None:
    """Report to all listeners that a phase begins, and so that the phase before it has ended.

    text   None: the first step has ended, or another display shows the phases from now on
    """
    for listener in tuple(_listeners):
        listener(text)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` at the beginning of each phase inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
