"""Progress of long commands other than training, on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SECONDS = 10.0


@contextlib.contextmanager
def progress(title: str, total: int | None, unit: str = "examples") -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of units completed since its last call.

    total   may be an estimate: at the end, the bar shows the number of completed units as the total
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.update(task, advance=count)
            completed = bar.tasks[task].completed
            bar.update(task, total=completed, completed=completed)
            bar.refresh()
        return
    done, printed = 0, time.monotonic()
    lines = 0

    def advance(count: int) -> None:
        nonlocal done, printed, lines
        done += count
        if time.monotonic() - printed >= _SECONDS:
            printed = time.monotonic()
            lines += 1
            share = f" of about {total:,}" if total else ""
            print(f"{title}: {done:,}{share} {unit}", file=sys.stderr, flush=True)

    yield advance
    if lines:
        print(f"{title}: {done:,} {unit}, done", file=sys.stderr, flush=True)


def count_examples(batches: Iterable[Any], advance: Callable[[int], None]) -> Iterator[Any]:
    """Yield the batches; call `advance` with the size of each after its use."""
    for batch in batches:
        yield batch
        advance(len(batch))
