"""Progress of long work that is not training: a bar on a terminal, else a line every ten seconds. On stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SECONDS = 10.0


@contextlib.contextmanager
def watched(what: str, total: int | None, unit: str = "examples") -> Iterator[Callable[[int], None]]:
    """Gives a function to call with how much more is done."""
    done = 0
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda more: progress.update(task, advance=more)
        return
    told = time.monotonic()

    def advance(more: int) -> None:
        nonlocal done, told
        done += more
        if time.monotonic() - told >= _SECONDS:
            told = time.monotonic()
            share = f" of about {total:,}" if total else ""
            print(f"{what}: {done:,}{share} {unit}", file=sys.stderr, flush=True)

    yield advance


def counted(batches: Iterable[Any], advance: Callable[[int], None]) -> Iterator[Any]:
    """The same batches; each is told to `advance` once it was taken."""
    for batch in batches:
        yield batch
        advance(len(batch))
