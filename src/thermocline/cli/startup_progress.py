"""Progress from the start of `train` to its first step: a spinner on a terminal, else a line on stdout per phase."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from thermocline.utils.startup import listening

_SECONDS = 5.0
"""Without a terminal, a phase is printed if it takes this long."""


@contextlib.contextmanager
def startup_progress() -> Iterator[None]:
    """Show the phases inside the block, until the live display of the training starts or the first step has ended."""
    phases = _Spinner() if sys.stderr.isatty() else _Lines()
    with listening(phases.show):
        try:
            yield
        finally:
            phases.show(None)


class _Spinner:
    def __init__(self) -> None:
        self._status: Any = None

    def show(self, text: str | None) -> None:
        if text is not None and self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(text)
            self._status.start()
        elif text is not None:
            self._status.update(text)
        elif self._status is not None:
            self._status.stop()
            self.show = lambda text: None  # type: ignore[method-assign]


class _Lines:
    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def show(self, text: str | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if text is None:
            return
        self._timer = threading.Timer(_SECONDS, lambda: print(f"{text} ...", flush=True))
        self._timer.daemon = True
        self._timer.start()
